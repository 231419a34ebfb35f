"""Observations and prompts as tokens: prompts by the chat template, the text after an answer as a delta of it.

Guarantees:
1. answers of the policy are never rendered: a delta is the text that the template puts behind an answer, so the tokens
   of the answer stay those that were sampled;
2. if the answer ended with the stop token that the template puts behind answers, the delta begins after it;
3. a template that does not render a conversation as a pure extension is found before training (`config.template`):
   `strict` requires all earlier text unchanged, `tail` only that it continues after the answer;
4. text prompts have no template: observations are encoded as they are and appended to the answer.

Example: ChatML, an answer of "<think>..</think>4<|im_end|>" and the user message "why?": the delta is
"\\n<|im_start|>user\\nwhy?<|im_end|>\\n<|im_start|>assistant\\n".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from asyncrl.config.media import find_media
from asyncrl.environment import EnvironmentFailure, Message, Observation
from asyncrl.errors import ConfigError
from producers.data.tokenizer import Tokenizer

MARK = "asyncrl0answer"  # a placeholder for the policy's answer
#: Some templates show the reasoning only of the newest answer, and an empty one if there is none.
ANSWERS = (MARK, f"<think>\nasyncrl0thought\n</think>\n\n{MARK}")
BEFORE = {"role": "user", "content": "asyncrl0question"}


class Renderer:
    """Turns messages into tokens, and tokens into text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """A conversation from its beginning, up to the opening of an answer."""
        raise NotImplementedError

    def delta(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        """The tokens between an answer that ended with `last_token` and the next one."""
        raise NotImplementedError

    def text_tokens(self, text: str) -> list[int]:
        """Tokens of a part of a message."""
        return encode_text(self._tokenizer.encode_part, text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def make_messages(observation: Observation, *, role: str = "user", sees: bool = False) -> list[dict[str, Any]]:
    """An observation as messages; with images if the policy `sees`. Raises `EnvironmentFailure` for anything else."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": role, "content": observation}]
    found = [observation] if isinstance(observation, Mapping) else list(observation)
    for item in found:
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise EnvironmentFailure("observation", f"no message with a role: {str(item)[:80]}")
        if media := find_media({"observation": item}, sees=sees):
            reads = "images and text" if sees else "text"
            raise EnvironmentFailure("observation", f"it has {media}, and the policy reads {reads} alone")
    return [dict(item) for item in found]


class PlainText(Renderer):
    """For text prompts: concatenated contents."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return encode_text(self._tokenizer.encode, "".join(_content(message) for message in messages))

    def delta(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        text = "".join(_content(message) for message in messages)
        return self.text_tokens(text) if text else []


class ChatTemplate(Renderer):
    """For chat messages: the tokenizer's template. `tools`: schemas for the template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        check: Literal["strict", "tail"] = "strict",
    ) -> None:
        super().__init__(tokenizer)
        self._tools = [dict(tool) for tool in tools]
        self._check = check
        self._tails: dict[bytes, str] = {}  # a cache: most environments repeat themselves

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.text_tokens(self._render(messages, opened=True))

    def delta(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        ids = self.text_tokens(self._tail(messages))
        said = last_token in self._tokenizer.eos_ids and ids[:1] == [last_token]
        return ids[1:] if said else ids

    def _tail(self, messages: Sequence[Message]) -> str:
        """The text that the template puts between an answer and the next one."""
        key = msgspec.json.encode(list(messages))
        known = self._tails.get(key)
        if known is None:
            if len(self._tails) > 256:
                self._tails.clear()
            known = self._tails[key] = self._render_tail(messages)
        return known

    def _render_tail(self, messages: Sequence[Message]) -> str:
        tail, rewritten = "", ""
        for answer in ANSWERS:
            before = [BEFORE, {"role": "assistant", "content": answer}]
            short = self._render(before, opened=False)
            whole = self._render([*before, *messages], opened=True)
            closing, tail = _text_after_mark(short), _text_after_mark(whole)
            if not tail.startswith(closing):
                raise _refuse(
                    f"it puts {closing!r} behind an answer, but {tail[:60]!r} where {_roles(messages)} "
                    "follows: it cannot be continued",
                    "",
                )
            if self._check == "tail" or whole.startswith(short):
                return tail
            rewritten = rewritten or _difference(short, whole)
        raise _refuse(
            f"where {_roles(messages)} follows, it shows what came before otherwise: {rewritten}",
            'environment.template = "tail" keeps what the policy saw and said, and shows the rest behind it',
        )

    def _render(self, messages: Sequence[Message], *, opened: bool) -> str:
        return self._tokenizer.render_chat(messages, opened=opened, tools=self._tools)


def make_renderer(
    prompt: Any, tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]], check: Literal["strict", "tail"]
) -> Renderer:
    """By the type of a row's prompt: text, or chat messages."""
    if isinstance(prompt, str):
        return PlainText(tokenizer)
    return ChatTemplate(tokenizer, tools=tools, check=check)


def encode_text(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Tokens of an observation. Raises `EnvironmentFailure` if the tokenizer cannot encode it."""
    try:
        return encode(text)
    except Exception as error:  # the package raises bare Exception for an unknown character
        raise EnvironmentFailure("observation", f"the tokenizer cannot encode it: {error}") from None


def _text_after_mark(text: str) -> str:
    """The text after the answer. Raises `config.template`."""
    if text.count(MARK) != 1:
        raise _refuse(f"it shows an answer {text.count(MARK)} times", "")
    return text.partition(MARK)[2]


def _roles(messages: Sequence[Message]) -> str:
    return " and ".join(f"a message of {message.get('role')}" for message in messages) or "another answer"


def _difference(short: str, whole: str) -> str:
    at = next((n for n, (one, other) in enumerate(zip(short, whole, strict=False)) if one != other), len(whole))
    return f"{short[max(0, at - 20) : at + 30]!r} becomes {whole[max(0, at - 20) : at + 30]!r}"


def _refuse(what: str, remedy: str) -> ConfigError:
    return ConfigError("config.template", what, where="the tokenizer's chat template", remedy=remedy)


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise EnvironmentFailure("observation", f"the content of a message is a {type(content).__name__}, not text")
    return content
