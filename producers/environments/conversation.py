"""The engine handle of one sample (`asyncrl.environment.Chat`): turns with the engine, observations in between.

Guarantees:
1. tokens in, tokens out: the engine gets the exact tokens of the session, and its answer is stored as it was sampled
   (`producers.rollout.session`); only observations are encoded, each of them once, with their images;
2. the conversation ends at the limit of its tokens, its turns or the calls of a turn: the next `say` gives an empty
   turn (`Turn.over`), and the sample's finish is `length` if the tokens were the reason;
3. an answer of a tool is cut to `max_tool_response_tokens`; calls beyond `max_parallel_calls`, and malformed ones, get
   an error message each, up to `max_parallel_calls`, and one for all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from asyncrl.config.sections.environment import EnvironmentConfig
from asyncrl.engine import Engine, GenDelta, GenRequest, join_deltas
from asyncrl.environment import EnvironmentFailure, Message, Observation, OtherChat, Turn
from producers.environments.images import Shown, expand, hold_images, split_images
from producers.environments.rendering import Renderer, make_messages
from producers.rollout.session import Session
from producers.tools.base import ERROR, Toolbox

CUT = " ... "  # marks a cut in a long answer
TOKEN_LETTERS = 32  # more than tokens of text have on average


class GivenUp(Exception):
    """The engine aborted the sample: it is no longer needed."""


class Counts(msgspec.Struct):
    """Counters over all samples of this process, for its heartbeat."""

    turns: int = 0
    tool_calls: int = 0
    malformed_calls: int = 0
    failed_calls: int = 0
    failed_episodes: int = 0


class Setting(msgspec.Struct, frozen=True):
    """Settings of the conversations of a group. `longest`: maximum tokens of prompt and response together."""

    config: EnvironmentConfig
    engine: Any  # asyncrl.engine.Engine
    renderer: Any  # Renderer
    reader: Any  # TurnReader
    tools: Toolbox
    counts: Counts
    max_prompt_tokens: int
    longest: int
    inputs: Any  # asyncrl.images.model_inputs.ImageInputs | None: model or engine reads text alone
    policy: str = ""  # the trained one
    others: Mapping[str, Any] = {}  # producers.environments.other_policy.OtherPolicy by name
    own: Sequence[Mapping[str, Any]] = ()  # schemas of the tools of the row's prompt


class Conversation:
    """`prompt` is the messages (or the text) of `request.prompt_ids`."""

    def __init__(self, setting: Setting, request: GenRequest, *, index: int, prompt: str | Sequence[Message]) -> None:
        self.session = Session(request.prompt_ids, index=index, images=request.images)
        self.turn_rewards: dict[int, float] = {}
        self.cut = False  # no room for more tokens
        self._setting = setting
        self._request = request
        self._messages = hold_images(make_messages(prompt, sees=bool(request.images)), request.images)
        self._pending: list[dict[str, Any]] = []
        self._last = -1  # token that the last turn of this row ended with
        self._opened = True  # the context ends with the opening of an answer
        self._given_up = False
        self._tools = setting.tools.begin()
        self._text = isinstance(prompt, str)
        self._others = 0  # conversations with other policies

    async def end(self) -> None:
        """The sample is over: its tools end."""
        await self._tools.end()

    # ------------------------------------------------------------ what an environment sees

    @property
    def messages(self) -> Sequence[Message]:
        return (*self._messages, *self._pending)

    @property
    def room(self) -> int:
        return self.session.room(longest=self._setting.longest, max_new_tokens=self._request.max_new_tokens)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [*self._setting.tools.schemas, *self._setting.own]

    @property
    def policy(self) -> str:
        return self._setting.policy

    def other(self, name: str) -> OtherChat:
        if name not in self._setting.others:
            known = ", ".join(self._setting.others) or "none"
            raise EnvironmentFailure("raised", f"chat.other({name!r}): the other policies of this run are: {known}")
        self._others += 1
        chat: OtherChat = self._setting.others[name].chat(
            self._request, self.session, number=self._others, text=self._text
        )
        return chat

    def show(self, observation: Observation) -> None:
        self._pending += self._hold(observation)

    def restart(self, prompt: str | Sequence[Message]) -> None:
        messages = self._hold(prompt)
        shown = self._encode(messages, self._renderer.prompt)
        if not shown.ids or len(shown.ids) >= self._setting.longest:
            what = f"a prompt of {len(shown.ids)} tokens, a sample has room for {self._setting.longest}"
            raise EnvironmentFailure("too_long", what)
        self._messages, self._pending = messages, []
        self.session.extend(*shown)
        self._opened = True

    def reward(self, value: float, *, turn: int = -1) -> None:
        place = self.session.turns + turn if turn < 0 else turn
        if not 0 <= place < self.session.turns:
            raise EnvironmentFailure("result", f"a reward for turn {turn} of {self.session.turns}")
        self.turn_rewards[place] = self.turn_rewards.get(place, 0.0) + require_number(value)

    async def say(self, observation: Observation = None, *, max_new_tokens: int = 0) -> Turn:
        self.show(observation)
        if self.cut or self.session.turns >= self._setting.config.max_turns or not self._observe():
            return Turn(number=self.session.turns)
        room = min(self.room, max_new_tokens) if max_new_tokens else self.room
        request = self.session.request(
            self._request, max_prompt_tokens=self._setting.max_prompt_tokens, max_new_tokens=room
        )
        delta = await self._ask(request)
        number = self.session.turns
        self.session.add_turn(delta)
        self._last, self._opened = int(delta.token_ids[-1]), False
        return self._turn(delta, number)

    async def call(self, turn: Turn, *, tools: Mapping[str, Any] = MappingProxyType({})) -> list[Message]:
        config, counts = self._setting.config, self._setting.counts
        counts.tool_calls += len(turn.calls)
        counts.malformed_calls += len(turn.malformed)
        taken = turn.calls[: config.max_parallel_calls]
        # bounded: each call has its time limit
        answers = await asyncio.gather(
            *(self._tools.call(one, timeout_s=config.step_timeout_s, more=tools) for one in taken)
        )
        counts.failed_calls = self._setting.tools.failed_calls
        found: list[Message] = [
            {"role": "tool", "name": one.name, "content": self._shorten(answer)}
            for one, answer in zip(taken, answers, strict=True)
        ]
        wrong = [f"{one.name}: only {config.max_parallel_calls} calls at once" for one in turn.calls[len(taken) :]]
        problems = [*turn.malformed, *wrong]
        more = len(problems) - config.max_parallel_calls
        if more > 0:  # a turn may hold as many calls as tokens
            problems[config.max_parallel_calls :] = [f"and {more} more calls that were not run"]
        return found + [{"role": "tool", "content": self._shorten(ERROR + text)} for text in problems]

    # ------------------------------------------------------------ turns

    @property
    def _renderer(self) -> Renderer:
        renderer: Renderer = self._setting.renderer
        return renderer

    def _hold(self, observation: Observation) -> list[dict[str, Any]]:
        """The messages of an observation, which hold their images."""
        return hold_images(make_messages(observation, sees=self._setting.inputs is not None))

    def _encode(self, messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]]) -> Shown:
        plain, images = split_images(messages)
        return expand(encode(plain), images, self._setting.inputs)

    def _observe(self) -> bool:
        """Add the pending observations to the session; False without room for them and one more token."""
        shown = Shown([])
        if self._opened and self._pending:  # before the first turn: a new prompt
            self.restart([*self._messages, *self._pending])
        elif not self._opened:
            shown = self._encode(self._pending, partial(self._renderer.delta, last_token=self._last))
        if self.room <= len(shown.ids):
            self.cut = True
            return False
        self.session.observe(*shown)
        self._messages += self._pending
        self._pending = []
        return True

    async def _ask(self, request: GenRequest) -> GenDelta:
        """One complete turn of the engine."""
        if self._given_up:
            raise GivenUp
        engine: Engine = self._setting.engine
        parts: list[GenDelta] = []
        # Closed at once if this is cancelled: the engine then drops the turn.
        async with aclosing(engine.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                parts.append(delta)
        self._given_up = not parts or not parts[-1].finish
        if self._given_up:
            raise GivenUp
        return join_deltas(parts)

    def _turn(self, delta: GenDelta, number: int) -> Turn:
        ids = delta.token_ids.tolist()
        text = self._renderer.decode(ids)
        read = self._setting.reader.read(text, ids, self.tools)
        self._setting.counts.turns += 1
        self._messages.append({"role": "assistant", "content": text})
        return Turn(text, tuple(ids), delta.finish, read.calls, read.malformed, number, read.text)

    def _shorten(self, text: str | list[Message]) -> str | list[Message]:
        """A tool's answer within its limit; parts as they are."""
        if not isinstance(text, str):
            return text
        limit, side = self._setting.config.max_tool_response_tokens, self._setting.config.truncation
        return shorten(text, limit=limit, side=side, renderer=self._renderer)


def shorten(text: str, *, limit: int, side: str, renderer: Renderer) -> str:
    """A text of at most `limit` tokens (0: any) without its `side`: left, middle or right."""
    most = limit * TOKEN_LETTERS
    if limit and len(text) > 2 * most:  # the tokens of megabytes would stop the event loop for seconds
        text = text[:most] + CUT + text[-most:]
    ids = renderer.text_tokens(text) if limit else []
    if len(ids) <= limit or not limit:
        return text
    mark = renderer.text_tokens(CUT)
    left = max(0, limit - len(mark))
    head = {"right": left, "left": 0, "middle": left - left // 2}[side]
    tail = left - head
    parts = [
        renderer.decode(ids[:head]),
        CUT if left else "",
        renderer.decode(ids[len(ids) - tail :] if tail else []),
    ]
    return "".join(parts)


def require_number(value: Any) -> float:
    """A reward as a number. Raises `EnvironmentFailure` for anything else."""
    if isinstance(value, bool | int | float | np.number):
        number = float(value)
        if not np.isfinite(number):
            raise EnvironmentFailure("not_finite", f"a reward is {number}")
        return number
    raise EnvironmentFailure("result", f"a reward is a {type(value).__name__}, not a number")
