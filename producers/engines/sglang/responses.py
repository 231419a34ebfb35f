"""Strict decoding of SGLang's answers to `/generate`. No state, no I/O.

Guarantees:
1. an answer that lacks a field, has one of another type, or has not one log-prob per token is `engine.broken`;
2. the server's stream may be cumulative (its default) or incremental: `completion_tokens` gives the end of an event's
   tokens;
3. versions come only with the last event of a sample: until then the weights of a token are unknown, unless no weights
   have changed meanwhile.

Example: after 3 tokens were taken an event with `completion_tokens = 5` and `output_ids` of 5 ids has 2 new ones; so
has one with `output_ids` of 2 ids.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE, WorkError


class Finish(msgspec.Struct):
    """The reason of the end: `type` is length, stop or abort."""

    type: str
    message: str = ""


class Span(msgspec.Struct):
    """Tokens `start..end` of the answer are of these weights."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    """`meta_info` of an answer."""

    completion_tokens: int
    finish_reason: Finish | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_versions: list[Span] | None = None
    cached_tokens: int = 0


class Answer(msgspec.Struct):
    """An answer, or an event of a stream."""

    output_ids: list[int]
    meta_info: Meta
    prompt_token_ids: list[int] | None = None


class Refusal(msgspec.Struct):
    """The event of a refused request."""

    error: dict[str, Any]


class Piece(msgspec.Struct):
    """The new part of a sample in one event: `finish` is empty before the end, `spans` (over all its tokens) are None
    if unknown."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    spans: list[tuple[str, int, int]] | None
    why: str = ""
    prompt: list[int] | None = None  # its ids, if they were asked for


def read_piece(event: Any, taken: int, *, where: str) -> Piece:
    """The new part of this event after `taken` tokens.

    Raises:
        WorkError: `engine.broken`; `sample.invalid` if the server refused the request.
    """
    try:
        answer = msgspec.convert(event, Answer)
    except UNREADABLE as error:
        raise _not_an_answer(event, str(error), where=where) from None
    meta, ids = answer.meta_info, answer.output_ids
    begin = meta.completion_tokens - len(ids)  # place of the first of `ids` in the sample
    first = taken - begin  # of what is new, in `ids`
    if begin < 0 or not 0 <= first <= len(ids) or len(meta.output_token_logprobs) != len(ids):
        raise WorkError(
            "engine.broken",
            f"{len(ids)} ids and {len(meta.output_token_logprobs)} log-probs of "
            f"{meta.completion_tokens} tokens, after {taken} were taken",
            where=where,
        )
    new = meta.output_token_logprobs[first:]
    if [token for _, token, _ in new] != ids[first:]:
        raise WorkError("engine.broken", "log-probs of other tokens than the sample's", where=where)
    finish = meta.finish_reason
    spans = meta.weight_versions if finish is not None else None
    return Piece(
        ids[first:],
        [value for value, _, _ in new],
        finish.type if finish is not None else "",
        None if spans is None else [(span.version, span.start, span.end) for span in spans],
        finish.message if finish is not None else "",
        answer.prompt_token_ids,
    )


def _not_an_answer(event: Any, why: str, *, where: str) -> WorkError:
    try:
        said = msgspec.convert(event, Refusal).error
    except UNREADABLE:
        return WorkError("engine.broken", f"not an SGLang answer ({why}): {str(event)[:200]}", where=where)
    code, words = said.get("code", 400), str(said.get("message", said))[:300]
    refused = isinstance(code, int) and 400 <= code < 500
    return WorkError("sample.invalid" if refused else "engine.broken", f"the server says: {words}", where=where)
