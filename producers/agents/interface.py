"""What the interfaces of agents share: requests, answers and errors in normal form, and readers of common parts. Pure.

An interface (`Interface`) is a set of functions: bodies to `ChatRequest`, `Answer` to bodies and to the events of a
stream. Guarantees:
1. messages have the form of Chat Completions, whatever the interface is: text as content, tool calls in the message of
   their answer, objects as their arguments. An answer that comes back in any form is the same message
   (`Answer.message`);
2. unsupported parts are refused with 400 and the name of their parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncrl.environment import ToolCall
from producers.data.openai_items import ApiError, Message, read_call

Conversations = Mapping[str, Sequence[Message]]  # of a session, by the ids of its answers


class ChatRequest(msgspec.Struct, frozen=True):
    """One request for an answer: `messages` of a chat, or a `prompt` of text or token ids."""

    messages: tuple[Message, ...] | None
    prompt: str | tuple[int, ...] = ""
    tools: tuple[Message, ...] = ()
    max_tokens: int = 0  # 0: as long as there is room
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False  # an extension that vLLM has too: ids with the text
    instructions: int = 0  # messages at the beginning that belong to this request alone

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages that a later request can refer to."""
        return (self.messages or ())[self.instructions :]


class Answer(msgspec.Struct, frozen=True):
    """An answer: its text without the stop, its tokens and their log-probs."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str  # stop | length
    prompt_tokens: int
    calls: tuple[tuple[str, ToolCall], ...] = ()  # with the id of the call
    version: int = 0
    prompt_ids: tuple[int, ...] = ()
    stop: str = ""  # the stop of the request that ended it
    reasoning: str = ""  # in front of the text

    @property
    def message(self) -> Message:
        """The message that the agent sends back."""
        found: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            found["tool_calls"] = [
                read_call(name, call.name, call.arguments, param="messages") for name, call in self.calls
            ]
        return found


class Events(Protocol):
    """Writes one answer as a stream of events; each method returns the next events as bytes."""

    def begin(self) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def end(self, said: Answer) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


class Interface(NamedTuple):
    """One interface that an agent can use. `prefix` begins the ids of its answers."""

    prefix: str
    read: Callable[[Any, Conversations], ChatRequest]
    answer: Callable[..., dict[str, Any]]  # (said, ask, *, id, model, texts)
    events: Callable[..., Events]  # (ask, *, id, model)
    error: Callable[[ApiError], dict[str, Any]]


# ---------------------------------------------------------------- readers


def read_object(body: Any) -> dict[str, Any]:
    """The body if it is an object that asks for one answer."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    if body.get("n") not in (None, 1):
        raise ApiError(400, "n must be 1: the run decides the number of samples", param="n")
    return body


def read_limit(value: Any, *, param: str) -> int:
    """A number of tokens; 0 without one."""
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise ApiError(400, f"{param} is {value!r}", param=param)
    return value


def read_stops(value: Any, *, param: str, most: int) -> tuple[str, ...]:
    """Texts that end an answer."""
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > most or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"{param} must be a text, or a list of at most {most}", param=param)
    return tuple(stops)


def event(body: Mapping[str, Any], *, named: bool = False) -> bytes:
    """A body as a server-sent event; `named` by its type."""
    name = f"event: {body['type']}\n".encode() if named else b""
    return name + b"data: " + msgspec.json.encode(dict(body)) + b"\n\n"
