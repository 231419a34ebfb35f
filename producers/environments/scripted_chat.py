"""A chat with a scripted user: the environment `chat`.

The row's column `followups` (`[environment] args = {key = "..."}`) is a list of the user's messages after each answer:
texts, or messages. Guarantees: the model answers the prompt and every follow-up in turn, until there are none, or no
room or turn is left; reward workers score the sample.
"""

from __future__ import annotations

from asyncrl.environment import Chat, EnvironmentFailure, Row


async def play(chat: Chat, row: Row, *, key: str = "followups") -> None:
    followups = row.get(key) or []
    if not isinstance(followups, list | tuple):
        raise EnvironmentFailure("observation", f"column {key!r} is a {type(followups).__name__}, not a list")
    turn = await chat.say()
    for followup in followups:
        if turn.over:
            return
        turn = await chat.say(followup)
