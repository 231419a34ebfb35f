"""The engine handle of one sample (`asyncrl.environment.Chat`): turns with the engine, observations in between.

Guarantees:
1. tokens in, tokens out: an engine is asked with the very tokens that the session holds, and what it says is stored as
   it was sampled (`producers.rollout.session`); only what is shown is ever encoded, each part of it once;
2. the conversation ends where its room, its turns or the limit on a turn's calls do: the next `say` gives an empty turn
   (`Turn.over`), and the sample's finish is `length` where the room was it;
3. an answer of a tool is cut to `max_tool_response_tokens`; calls beyond `max_parallel_calls`, and malformed ones, are
   answered by an error message, those beyond as many by one together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np

from asyncrl.config.sections.environment import EnvironmentConfig
from asyncrl.engine import Engine, GenDelta, GenRequest, join_deltas
from asyncrl.environment import EnvironmentFailure, Message, Observation, Turn
from producers.environments.rendering import Renderer, messages_of
from producers.rollout.session import Session
from producers.tools.base import ERROR, Toolbox

CUT = " ... "  # stands where a long answer was cut


class GivenUp(Exception):
    """The engine gave the sample up: nobody wants it any more."""


class Counts(msgspec.Struct):
    """What happened in all samples of this process, for its heartbeat."""

    turns: int = 0
    tool_calls: int = 0
    malformed_calls: int = 0
    failed_calls: int = 0
    failed_episodes: int = 0


class Setting(msgspec.Struct, frozen=True):
    """What the conversations of a group share. `longest`: tokens of prompt and response together at most."""

    config: EnvironmentConfig
    engine: Any  # asyncrl.engine.Engine
    renderer: Any  # Renderer
    parser: Any  # Parser
    tools: Toolbox
    counts: Counts
    max_prompt_tokens: int
    longest: int


class Conversation:
    """See the module. `prompt` are the messages (or the text) whose tokens `request.prompt_ids` are."""

    def __init__(self, setting: Setting, request: GenRequest, *, index: int, prompt: str | Sequence[Message]) -> None:
        self.session = Session(request.prompt_ids, index=index)
        self.turn_rewards: dict[int, float] = {}
        self.cut = False  # its room came to an end
        self._setting = setting
        self._request = request
        self._messages = messages_of(prompt)
        self._pending: list[dict[str, Any]] = []
        self._last = -1  # token that the last turn of this row ended with
        self._opened = True  # the context ends where the policy speaks
        self._given_up = False

    # ------------------------------------------------------------ what an environment sees

    @property
    def messages(self) -> Sequence[Message]:
        return (*self._messages, *self._pending)

    @property
    def room(self) -> int:
        whole = self._setting.longest - len(self.session.context)
        return max(0, min(whole, self._request.max_new_tokens - self.session.response_tokens))

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._setting.tools.schemas

    def show(self, observation: Observation) -> None:
        self._pending += messages_of(observation)

    def restart(self, prompt: str | Sequence[Message]) -> None:
        messages = messages_of(prompt)
        ids = self._renderer.prompt(messages)
        if not ids or len(ids) >= self._setting.longest:
            what = f"a prompt of {len(ids)} tokens, a sample has room for {self._setting.longest}"
            raise EnvironmentFailure("too_long", what)
        self._messages, self._pending = messages, []
        self.session.extend(ids)
        self._opened = True

    def reward(self, value: float, *, turn: int = -1) -> None:
        place = self.session.turns + turn if turn < 0 else turn
        if not 0 <= place < self.session.turns:
            raise EnvironmentFailure("result", f"a reward for turn {turn} of {self.session.turns}")
        self.turn_rewards[place] = self.turn_rewards.get(place, 0.0) + number_of(value)

    async def say(self, observation: Observation = None, *, max_new_tokens: int = 0) -> Turn:
        self.show(observation)
        if self.cut or self.session.turns >= self._setting.config.max_turns or not self._observe():
            return Turn(number=self.session.turns)
        room = min(self.room, max_new_tokens) if max_new_tokens else self.room
        request = self.session.request(
            self._request, max_prompt_tokens=self._setting.max_prompt_tokens, max_new_tokens=room
        )
        delta = await self._asked(request)
        number = self.session.turns
        self.session.add_turn(delta)
        self._last, self._opened = int(delta.token_ids[-1]), False
        return self._turn(delta, number)

    async def call(self, turn: Turn) -> list[Message]:
        config, counts = self._setting.config, self._setting.counts
        counts.tool_calls += len(turn.calls)
        counts.malformed_calls += len(turn.malformed)
        taken = turn.calls[: config.max_parallel_calls]
        # bounded: each call has its time limit
        answers = await asyncio.gather(
            *(self._setting.tools.call(one, timeout_s=config.step_timeout_s) for one in taken)
        )
        counts.failed_calls = self._setting.tools.failed_calls
        found: list[Message] = [
            {"role": "tool", "name": one.name, "content": self._shortened(answer)}
            for one, answer in zip(taken, answers, strict=True)
        ]
        wrong = [f"{one.name}: only {config.max_parallel_calls} calls at once" for one in turn.calls[len(taken) :]]
        told = [*turn.malformed, *wrong]
        more = len(told) - config.max_parallel_calls
        if more > 0:  # a turn may hold a call for every token
            told[config.max_parallel_calls :] = [f"and {more} calls more that were not run"]
        return found + [{"role": "tool", "content": self._shortened(ERROR + text)} for text in told]

    # ------------------------------------------------------------ turns

    @property
    def _renderer(self) -> Renderer:
        renderer: Renderer = self._setting.renderer
        return renderer

    def _observe(self) -> bool:
        """Put what is to be shown into the session; False where there is no room for it and a token more."""
        ids: list[int] = []
        if self._opened and self._pending:  # before the policy spoke: a beginning of its own
            self.restart([*self._messages, *self._pending])
        elif not self._opened:
            ids = self._renderer.delta(self._pending, last_token=self._last)
        if self.room <= len(ids):
            self.cut = True
            return False
        self.session.observe(ids)
        self._messages += self._pending
        self._pending = []
        return True

    async def _asked(self, request: GenRequest) -> GenDelta:
        """One turn of the engine, whole."""
        if self._given_up:
            raise GivenUp
        engine: Engine = self._setting.engine
        parts: list[GenDelta] = []
        # Closed at once where this is cancelled: the engine gives the turn up then.
        async with aclosing(engine.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                parts.append(delta)
        self._given_up = not parts or not parts[-1].finish
        if self._given_up:
            raise GivenUp
        return join_deltas(parts)

    def _turn(self, delta: GenDelta, number: int) -> Turn:
        ids = delta.token_ids.tolist()
        text = self._renderer.text_of(ids)
        parsed = self._setting.parser(text)
        self._setting.counts.turns += 1
        self._messages.append({"role": "assistant", "content": text})
        return Turn(text, tuple(ids), delta.finish, parsed.calls, parsed.malformed, number)

    def _shortened(self, text: str) -> str:
        """An answer of a tool within its limit."""
        limit, side = self._setting.config.max_tool_response_tokens, self._setting.config.truncation
        return shortened(text, limit=limit, side=side, renderer=self._renderer)


def shortened(text: str, *, limit: int, side: str, renderer: Renderer) -> str:
    """A text of at most `limit` tokens (0: any), `side` of it left out: left, middle or right."""
    ids = renderer.text_tokens(text) if limit else []
    if len(ids) <= limit or not limit:
        return text
    mark = renderer.text_tokens(CUT)
    left = max(0, limit - len(mark))
    head = {"right": left, "left": 0, "middle": left - left // 2}[side]
    tail = left - head
    parts = [
        renderer.text_of(ids[:head]),
        CUT if left else "",
        renderer.text_of(ids[len(ids) - tail :] if tail else []),
    ]
    return "".join(parts)


def number_of(value: Any) -> float:
    """A reward. Raises `EnvironmentFailure` where it is none."""
    if isinstance(value, bool | int | float | np.number):
        number = float(value)
        if not np.isfinite(number):
            raise EnvironmentFailure("not_finite", f"a reward is {number}")
        return number
    raise EnvironmentFailure("result", f"a reward is a {type(value).__name__}, not a number")
