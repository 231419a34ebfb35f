"""One session of an agent, as tokens: the context of each request, and the policy's answer.

Guarantees:
1. an answer reaches training as it was sampled; if the agent sends one of our answers back, its exact tokens stand in
   the context again, and none of it is encoded again. With `environment.agent.reasoning = "cut"` those of its reasoning
   do not, and the next request opens its own row;
2. a conversation that continues the last one continues the row of tokens; any other (an edited history, a helper's
   conversation, other tools) opens its own row (`producers.rollout.session`), with the tokens of the answers in it;
3. turns follow each other: a request waits for the one before it; a cancelled one leaves no trace in the sample;
4. a request without room, or beyond `environment.max_turns`, is refused with the reason; the first sets `cut`;
5. an answer ends where the engine ends it, or with the token that completes one of `stop`; that token stays in the
   sample, the text for the agent ends before the stop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from asyncrl.engine import Engine, GenDelta, GenRequest, join_deltas
from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import AsyncRLError, ConfigError
from producers.agents.interface import Answer, ChatRequest
from producers.data.openai_items import ApiError, Message
from producers.data.tokenizer import Tokenizer
from producers.environments.conversation import Counts, GivenUp
from producers.environments.rendering import ChatTemplate, PlainText, Renderer, encode_text
from producers.rollout.session import Session
from producers.tools.turn_reader import Reading, TurnReader

MARK = "asyncrl0said{}x"
LOOK_TOKENS = 8  # new tokens after which a stream, or a search for a stop, looks again
OnText = Callable[[str], None]


class Setting(msgspec.Struct, frozen=True):
    """Settings of the sessions of a group. `longest`: maximum tokens of a row."""

    engine: Any  # asyncrl.engine.Engine
    tokenizer: Tokenizer
    reader: TurnReader
    counts: Counts
    max_prompt_tokens: int
    longest: int
    max_turns: int
    template: Any  # environment.template
    chat: bool  # messages go through the chat template; else their contents are concatenated
    reasoning: str  # environment.agent.reasoning


class Dialogue:
    def __init__(self, setting: Setting, request: GenRequest, *, index: int) -> None:
        self.session = Session(request.prompt_ids, index=index)
        self.turn_rewards: dict[int, float] = {}
        self.cut = False
        self.fatal: AsyncRLError | None = None  # an error of the engine or the configuration, not of the agent
        self._setting = setting
        self._request = request
        self._turn = asyncio.Lock()
        self._tools = b""
        self._renderers: dict[bytes, Renderer] = {}
        self._history: list[Message] = []  # of the open row, its last answer included
        self._text = ""  # of the open row, if it is text
        self._last = -1  # token that the last answer ended with
        self._was_cut = False  # later requests see the last answer without its reasoning
        self._known: dict[str, tuple[int, ...]] = {}  # our answers by the message that the agent sends back

    @property
    def room(self) -> int:
        """Tokens that the open row may still grow by."""
        return self.session.room(longest=self._setting.longest, max_new_tokens=self._request.max_new_tokens)

    async def end(self) -> None:
        """The sample is over."""

    async def answer(self, ask: ChatRequest, on_text: OnText | None = None) -> Answer:
        """The policy's answer. `on_text` gets the text as it comes.

        Raises:
            ApiError: the request cannot be answered.
        """
        async with self._turn:  # bounded: by the episode's time limit
            try:
                return await self._answer(ask, on_text)
            except AsyncRLError as error:
                self.fatal = error
                raise ApiError(500, f"{error.code}: {error.message}", code="engine") from None
            except EnvironmentFailure as error:
                raise ApiError(400, error.reason, param="messages") from None
            except GivenUp:
                raise ApiError(503, "the sample is no longer needed", code="given_up") from None

    def is_read(self, ask: ChatRequest) -> bool:
        """Whether its answer is read for calls or reasoning, so that it has no text before its end."""
        return ask.messages is not None and (bool(ask.tools) or self._setting.reader.splits_reasoning)

    async def count(self, ask: ChatRequest) -> int:
        """Tokens of the context that the request would have."""
        async with self._turn:  # bounded: by the episode's time limit
            try:
                return len(self._context(ask))
            except EnvironmentFailure as error:
                raise ApiError(400, error.reason, param="messages") from None

    async def _answer(self, ask: ChatRequest, on_text: OnText | None) -> Answer:
        if self.session.turns >= self._setting.max_turns:
            raise ApiError(
                400,
                f"the session has had its {self._setting.max_turns} turns (environment.max_turns)",
                code="max_turns",
            )
        context = self._context(ask)
        self._extend(context)
        room = min(self.room, ask.max_tokens) if ask.max_tokens else self.room
        request = self.session.request(
            self._request, max_prompt_tokens=self._setting.max_prompt_tokens, max_new_tokens=room
        )
        try:
            delta, stopped = await self._generate(request, ask.stop, on_text)
        except BaseException:  # a request that is repeated finds the row as it was
            self.session.drop_context()
            raise
        number = self.session.turns
        self.session.add_turn(delta)
        self._setting.counts.turns += 1
        return self._remember(ask, delta, stopped, number)

    def _extend(self, context: Sequence[int]) -> None:
        """Make this the context of the next turn, if there is room for one more token."""
        ids = np.asarray(context, np.int32)
        known = self.session.context
        goes_on = len(ids) >= len(known) and np.array_equal(ids[: len(known)], known)
        room = self.room - (len(ids) - len(known)) if goes_on else self._setting.longest - len(ids)
        if room < 1 or not len(ids):
            self.cut = True
            raise ApiError(
                400,
                f"the context has {len(ids)} tokens, a sample has room for {self._setting.longest} "
                f"({self._request.max_new_tokens} of them behind its prompt)",
                code="context_length_exceeded",
                param="messages",
            )
        self.session.extend(ids)

    # ------------------------------------------------------------ contexts

    def _context(self, ask: ChatRequest) -> Sequence[int]:
        """Token ids of the context for the policy."""
        if ask.messages is None:
            return self._text_context(ask.prompt)
        messages, history = list(ask.messages), self._history
        same = len(messages) > len(history) and [_message_key(item) for item in messages[: len(history)]] == [
            _message_key(item) for item in history
        ]
        if history and same and _tools_key(ask) == self._tools and not self._was_cut:
            pending = messages[len(history) :]
            with suppress(ConfigError):  # the template changes earlier messages: open a new row
                return [*self.session.context.tolist(), *self._renderer(ask).delta(pending, last_token=self._last)]
        try:
            return self._splice(messages, ask.tools)
        except ConfigError as error:
            raise ApiError(400, error.message, param="messages") from None

    def _text_context(self, prompt: str | tuple[int, ...]) -> Sequence[int]:
        if isinstance(prompt, tuple):
            if not self._setting.tokenizer.has_ids(prompt):  # an engine would break on them
                raise ApiError(400, "prompt holds ids that the model does not have", param="prompt")
            return prompt
        if self._text and prompt.startswith(self._text):
            new = prompt[len(self._text) :]
            return [
                *self.session.context.tolist(),
                *(encode_text(self._setting.tokenizer.encode_part, new) if new else []),
            ]
        return encode_text(self._setting.tokenizer.encode, prompt)

    def _renderer(self, ask: ChatRequest) -> Renderer:
        known = self._renderers.get(_tools_key(ask))
        if known is None:
            tokenizer = self._setting.tokenizer
            known = (
                ChatTemplate(tokenizer, tools=ask.tools, check=self._setting.template)
                if self._setting.chat
                else PlainText(tokenizer)
            )
            self._renderers[_tools_key(ask)] = known
        return known

    def _splice(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """A conversation from its beginning; our answers stand in it as their tokens."""
        tokenizer = self._setting.tokenizer
        marked: list[Message] = []
        said: list[tuple[int, ...]] = []
        for item in messages:
            ids = self._known.get(_message_key(item)) if item["role"] == "assistant" else None
            if ids is None:
                marked.append(item)
            else:
                marked.append({"role": "assistant", "content": MARK.format(len(said))})
                said.append(ids)
        text = self._render(marked, tools)
        marks = [MARK.format(number) for number in range(len(said))]
        if any(text.count(mark) != 1 for mark in marks):  # the template leaves some of them out
            text, marks = self._render(list(messages), tools), []
        first = text
        rest: list[str] = []
        for mark in reversed(marks):
            first, _, behind = first.partition(mark)
            rest.insert(0, behind)
        found = encode_text(tokenizer.encode_part if self._setting.chat else tokenizer.encode, first)
        for ids, part in zip(said, rest, strict=False):
            between = encode_text(tokenizer.encode_part, part) if part else []
            doubled = between[:1] == [ids[-1]] and ids[-1] in tokenizer.eos_ids
            found += [*ids, *(between[1:] if doubled else between)]
        return found

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        if not self._setting.chat:
            return "".join(str(item["content"]) for item in messages)
        return self._setting.tokenizer.render_chat(messages, opened=True, tools=tools)

    # ------------------------------------------------------------ turns

    async def _generate(self, request: GenRequest, stop: Sequence[str], on_text: OnText | None) -> tuple[GenDelta, str]:
        """One turn of the engine, up to a stop of the agent; the turn and that stop."""
        looks = bool(stop) or on_text is not None
        engine: Engine = self._setting.engine
        parts: list[GenDelta] = []
        stream = TextStream(self._setting.tokenizer, stop, on_text)
        # Closed at once if this is cancelled or stopped: the engine then drops the turn.
        async with aclosing(engine.generate(replace(request, delta_tokens=LOOK_TOKENS * looks))) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                parts.append(delta)
                if looks and (place := stream.find_stop(delta.token_ids.tolist())) is not None:
                    return _first(join_deltas(_mark_stopped(parts)), place), stream.stop
        if not parts or not parts[-1].finish:
            raise GivenUp
        stream.rest()
        return join_deltas(parts), ""

    def _remember(self, ask: ChatRequest, delta: GenDelta, stopped: str, number: int) -> Answer:
        """The answer; remembered for later requests that contain it."""
        ids = tuple(delta.token_ids.tolist())
        whole = self._setting.tokenizer.decode(ids)
        text = whole.partition(stopped)[0] if stopped else whole
        reading = self._read(ask, text, ids, stopped)
        said = Answer(
            reading.text,
            ids,
            tuple(float(value) for value in delta.logprobs),
            delta.finish,
            len(self.session.context) - len(ids),
            tuple((f"call_{number}_{secrets.token_hex(4)}", call) for call in reading.calls),
            delta.runs[-1][0],
            tuple(self.session.context[: -len(ids)].tolist()) if ask.token_ids else (),
            stopped,
            reading.reasoning,
        )
        self._last = ids[-1]
        kept = ids
        if reading.reasoning and self._setting.reasoning == "cut":
            kept = self._setting.reader.cut_reasoning(ids, reading.reasoning)
        self._was_cut = len(kept) < len(ids)
        self._tools = _tools_key(ask)
        self._text, self._history = "", []
        if ask.messages is None:
            self._text = "" if isinstance(ask.prompt, tuple) else ask.prompt + whole
        else:
            self._history = [*ask.messages, said.message]
            self._known[_message_key(said.message)] = kept
        return said

    def _read(self, ask: ChatRequest, text: str, ids: Sequence[int], stopped: str) -> Reading:
        if not self.is_read(ask):
            return Reading(text)
        reading = self._setting.reader.read(text, ids, ask.tools, stop=stopped)
        self._setting.counts.tool_calls += len(reading.calls)
        self._setting.counts.malformed_calls += len(reading.malformed)
        return reading


class TextStream:
    """The growing text of an answer: emits it, and finds where it ends."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], on_text: OnText | None) -> None:
        self.stop = ""
        self._tokenizer = tokenizer
        self._stops = stop
        self._heard = on_text
        self._ids: list[int] = []
        self._read = ""  # text of the first `_end` tokens
        self._begin = self._end = 0
        self._emitted = 0
        self._held = max((len(text) for text in stop), default=1) - 1  # characters that may begin a stop

    def find_stop(self, new: list[int]) -> int | None:
        """Add new tokens; the number of tokens up to a stop, None without one."""
        before = len(self._ids)
        text = self._add(new)
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if not found:
            self._emit(text, len(text) - self._held)
            return None
        place, self.stop = min(found)
        self._emit(text, place)
        for count in range(before + 1, len(self._ids) + 1):
            if self.stop in self._tokenizer.decode(self._ids[:count]):
                return count
        return len(self._ids)

    def _add(self, new: list[int]) -> str:
        """The text with new tokens. Only they and the ones before are decoded: the whole would take quadratic time."""
        self._ids += new
        context = self._tokenizer.decode(self._ids[self._begin : self._end])  # the first token's space may be missing
        added = self._tokenizer.decode(self._ids[self._begin :])[len(context) :]
        text = self._read + added
        if added and not added.endswith("\ufffd"):  # an incomplete character
            self._read, self._begin, self._end = text, self._end, len(self._ids)
        return text

    def rest(self) -> None:
        """Emit the rest: the answer has ended."""
        text = self._tokenizer.decode(self._ids)
        self._emit(text, len(text), whole=True)

    def _emit(self, text: str, until: int, *, whole: bool = False) -> None:
        new = text[self._emitted : max(self._emitted, until)]
        if not whole and "\ufffd" in new:
            new = new[: new.index("\ufffd")]  # an incomplete character
        if new and self._heard is not None:
            self._heard(new)
        self._emitted += len(new)


def _mark_stopped(parts: list[GenDelta]) -> list[GenDelta]:
    return [*parts[:-1], replace(parts[-1], finish="stop")]


def _first(delta: GenDelta, count: int) -> GenDelta:
    """The first `count` tokens of a turn."""
    runs, left = [], count
    for version, length in delta.runs:
        if left > 0:
            runs.append((version, min(length, left)))
            left -= length
    return replace(
        delta,
        token_ids=delta.token_ids[:count],
        logprobs=delta.logprobs[:count],
        runs=tuple(runs),
        finish="stop",
        support=None if delta.support is None else delta.support.cut(0, count),
        experts=None if delta.experts is None else delta.experts[: len(delta.experts) - len(delta.token_ids) + count],
    )


def _tools_key(ask: ChatRequest) -> bytes:
    return msgspec.json.encode(ask.tools)


def _message_key(message: Mapping[str, Any]) -> str:
    """Key of a message: an answer with calls by their ids, any other by role and content."""
    calls = message.get("tool_calls") or []
    if message["role"] == "assistant" and calls and all(call.get("id") for call in calls):
        return msgspec.json.encode(["calls", [call["id"] for call in calls]]).decode()
    content = str(message.get("content") or "").strip()
    return msgspec.json.encode([message["role"], content, message.get("tool_call_id") or "", calls]).decode()
