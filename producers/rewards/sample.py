"""What a reward function gets, and how its result is read.

Guarantees: a result is a number, or a dict with `score` or `reward` whose other numbers become parts, and whose `pred`,
`answer` or `extracted_answer` is the answer that an evaluation counts majorities by. Texts become valid UTF-8.
Anything else is an error; NaN and infinities are `not_finite`. Nothing becomes 0 silently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

ANSWERS = ("pred", "answer", "extracted_answer")  # keys of the answer in a dict result


class RewardSample(msgspec.Struct, frozen=True):
    """The argument of a reward function. `prompt` and `response` are text without special tokens; `row` holds all
    columns of the prompt's row; `finish` is stop | length. With several turns `response` is everything after the
    prompt, with observations, and `turns` has the policy's turns. Images of the prompt are PIL images in
    `row["images"]` and `extra_info["images"]`, those that an environment showed later in `images`."""

    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    row: dict[str, Any]
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Any = {}  # an object, if the data set has verl's form
    finish: str = "stop"
    turns: list[str] = []
    images: list[Any] = []  # until they are opened: digests
    rows: list[tuple[int, int]] = []  # (start, prompt tokens) of sequences of a session with a prompt of their own

    @property
    def last_turn(self) -> str:
        """What the policy said last: its last turn, or the response if it has a single one."""
        return self.turns[-1] if self.turns else self.response

    @classmethod
    def from_row(
        cls,
        row: dict[str, Any],
        *,
        prompt: str,
        response: str,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        finish: str,
        turns: Sequence[str] = (),
        images: Sequence[str] = (),
        rows: Sequence[tuple[int, int]] = (),
    ) -> RewardSample:
        """Takes the columns of verl from the row; `ground_truth` or `answer` may also be columns of the row."""
        model = row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, dict) else None
        for name in ("ground_truth", "answer"):
            truth = row.get(name) if truth is None else truth
        return cls(
            prompt,
            response,
            list(prompt_ids),
            list(response_ids),
            row,
            truth,
            str(row.get("data_source") or ""),
            row.get("extra_info") or {},
            finish,
            list(turns),
            list(images),
            list(rows),
        )


class Value(NamedTuple):
    """A reward, None if the function does not apply, its further parts, and the answer that it found."""

    value: float | None
    parts: dict[str, float]
    answer: str = ""


class NotFinite(ValueError):
    """The function returned NaN or an infinity."""


def read_value(raw: Any) -> Value:
    """The value of one result. Raises TypeError for another type, NotFinite for NaN and infinities."""
    parts: dict[str, float] = {}
    answer = ""
    if isinstance(raw, dict):
        answer = encodable(next((str(raw[name]) for name in ANSWERS if raw.get(name) is not None), ""))
        key = next((name for name in ("score", "reward") if name in raw), None)
        if key is None:
            raise TypeError(f"a dict result needs 'score' or 'reward', it has {', '.join(map(str, raw)) or 'nothing'}")
        for name, item in raw.items():
            number = _number(item)
            if name != key and number is not None and math.isfinite(number):
                parts[encodable(str(name))] = number
        raw = raw[key]
    value = _number(raw)
    if value is None:
        raise TypeError(f"the result is not a number: {describe(raw)}")
    if not math.isfinite(value):
        raise NotFinite(f"the result is {value}")
    return Value(value, parts, answer)


def _number(raw: Any) -> float | None:
    if isinstance(raw, bool | int | float):
        return float(raw)
    if hasattr(raw, "__float__"):
        try:
            return float(raw)  # numpy, torch, Decimal, Fraction
        except (TypeError, ValueError, RuntimeError):
            return None
    return None


def encodable(text: str) -> str:
    """The text with ? for lone surrogates, which UTF-8 does not have; JSON of a response can hold them.

    >>> encodable("a\\ud83d")
    'a?'
    """
    return text.encode(errors="replace").decode()


def describe(raw: Any) -> str:
    """Type and beginning of a value, for errors."""
    return f"{type(raw).__name__} {repr(raw)[:80]}"
