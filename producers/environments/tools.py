"""A model that may call tools until it answers: the environment `tools`.

Guarantees: the calls of a turn run in parallel and get one message each; a turn without a call is the answer, and ends
the sample; malformed calls get an error message. With `on_malformed = "end"` in `environment.args` such a turn ends the
sample instead. Reward workers score the sample: `sample.turns[-1]` is the answer.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.environment import Chat, Row


async def play(chat: Chat, row: Row, *, on_malformed: Literal["answer", "end"] = "answer") -> None:
    turn = await chat.say()
    while not turn.over:
        if not turn.calls and (not turn.malformed or on_malformed == "end"):
            return
        turn = await chat.say(await chat.call(turn))
