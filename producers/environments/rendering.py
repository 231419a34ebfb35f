"""What a policy is shown, as tokens: prompts by the chat template, and what follows an answer as a delta of it.

Guarantees:
1. what a policy said is never rendered: a delta is what the template puts behind an answer that stands in its place, so
   the tokens of the answer stay those that were sampled;
2. where the answer ended with the stop token that the template puts behind answers, the delta begins after it;
3. a template that does not show a conversation as a pure extension is found out before anything is trained
   (`config.template`): `strict` wants all that came before unchanged, `tail` only that it goes on behind the answer;
4. text prompts have no template: what is shown is encoded as it is and put behind the answer.

Example: ChatML, an answer of "<think>..</think>4<|im_end|>" and the user message "why?": the delta is
"\\n<|im_start|>user\\nwhy?<|im_end|>\\n<|im_start|>assistant\\n".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from asyncrl.environment import EnvironmentFailure, Message, Observation
from asyncrl.errors import ConfigError
from producers.data.tokenizer import Tokenizer

MARK = "asyncrl0answer"  # stands for what the policy said
#: Some templates show the reasoning of an answer only while it is the newest, and an empty one where there is none.
ANSWERS = (MARK, f"<think>\nasyncrl0thought\n</think>\n\n{MARK}")
BEFORE = {"role": "user", "content": "asyncrl0question"}


class Renderer(Protocol):
    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """A conversation from its beginning, up to where the policy speaks."""

    def delta(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        """What stands between an answer that ended with `last_token` and the next one."""

    def text_tokens(self, text: str) -> list[int]:
        """Tokens of a part of a message, to see how long it is."""

    def text_of(self, ids: Sequence[int]) -> str: ...


def messages_of(observation: Observation, *, role: str = "user") -> list[dict[str, Any]]:
    """An observation as messages. Raises `EnvironmentFailure` where it is none."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": role, "content": observation}]
    found = [observation] if isinstance(observation, Mapping) else list(observation)
    for item in found:
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise EnvironmentFailure("observation", f"no message with a role: {str(item)[:80]}")
    return [dict(item) for item in found]


class PlainText:
    """For text prompts: contents after each other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The texts as a prompt."""
        return encoded(self._tokenizer.encode, "".join(_content(message) for message in messages))

    def delta(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        """The texts as they are."""
        text = "".join(_content(message) for message in messages)
        return encoded(self._tokenizer.encode_part, text) if text else []

    def text_tokens(self, text: str) -> list[int]:
        return encoded(self._tokenizer.encode_part, text)

    def text_of(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class ChatTemplate:
    """For chat messages: by the tokenizer's template. `tools`: schemas that the template shows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        check: Literal["strict", "tail"] = "strict",
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._check = check
        self._tails: dict[bytes, str] = {}  # of messages seen before: most environments repeat themselves

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """A conversation from its beginning, up to where the policy speaks."""
        return encoded(self._tokenizer.encode_part, self._render(messages, opened=True))

    def delta(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        ids = encoded(self._tokenizer.encode_part, self._tail(messages))
        said = last_token in self._tokenizer.eos_ids and ids[:1] == [last_token]
        return ids[1:] if said else ids

    def text_tokens(self, text: str) -> list[int]:
        return encoded(self._tokenizer.encode_part, text)

    def text_of(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _tail(self, messages: Sequence[Message]) -> str:
        """What the template puts behind an answer, up to where the policy speaks again."""
        key = msgspec.json.encode(list(messages))
        known = self._tails.get(key)
        if known is None:
            if len(self._tails) > 256:
                self._tails.clear()
            known = self._tails[key] = self._tail_of(messages)
        return known

    def _tail_of(self, messages: Sequence[Message]) -> str:
        tail, rewritten = "", ""
        for answer in ANSWERS:
            before = [BEFORE, {"role": "assistant", "content": answer}]
            short = self._render(before, opened=False)
            whole = self._render([*before, *messages], opened=True)
            closing, tail = _behind(short), _behind(whole)
            if not tail.startswith(closing):
                raise _refused(
                    f"it puts {closing!r} behind an answer, but {tail[:60]!r} where {_roles(messages)} "
                    "follows: it cannot be continued",
                    "",
                )
            if self._check == "tail" or whole.startswith(short):
                return tail
            rewritten = rewritten or _difference(short, whole)
        raise _refused(
            f"where {_roles(messages)} follows, it shows what came before otherwise: {rewritten}",
            'environment.template = "tail" keeps what the policy saw and said, and shows the rest behind it',
        )

    def _render(self, messages: Sequence[Message], *, opened: bool) -> str:
        return self._tokenizer.render_chat(messages, opened=opened, tools=self._tools)


def renderer_of(
    prompt: Any, tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]], check: Literal["strict", "tail"]
) -> Renderer:
    """By what a row's prompt is: text, or chat messages."""
    if isinstance(prompt, str):
        return PlainText(tokenizer)
    return ChatTemplate(tokenizer, tools=tools, check=check)


def encoded(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Tokens of a text that an environment shows. Raises `EnvironmentFailure` where the tokenizer has none for it."""
    try:
        return encode(text)
    except Exception as error:  # the package raises bare Exception for a letter that it does not know
        raise EnvironmentFailure("observation", f"the tokenizer cannot encode it: {error}") from None


def _behind(text: str) -> str:
    """What stands behind the answer. Raises `config.template`."""
    if text.count(MARK) != 1:
        raise _refused(f"it shows an answer {text.count(MARK)} times", "")
    return text.partition(MARK)[2]


def _roles(messages: Sequence[Message]) -> str:
    return " and ".join(f"a message of {message.get('role')}" for message in messages) or "another answer"


def _difference(short: str, whole: str) -> str:
    at = next((n for n, (one, other) in enumerate(zip(short, whole, strict=False)) if one != other), len(whole))
    return f"{short[max(0, at - 20) : at + 30]!r} becomes {whole[max(0, at - 20) : at + 30]!r}"


def _refused(what: str, remedy: str) -> ConfigError:
    return ConfigError("config.template", what, where="the tokenizer's chat template", remedy=remedy)


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise EnvironmentFailure("observation", f"the content of a message is a {type(content).__name__}, not text")
    return content
