"""The result of a judge model for one sample: a number, or the reason for none. Never a made-up 0.

Reasons: `timeout`, `memory`, `raised` and `not_finite` as for functions, and `too_long` (the text exceeds the judge's
limit), `unparsed` (its answer has no number), `unreachable` (no server answered), `refused` (the server refused, or
sent garbage)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.errors import AsyncRLError
from producers.rewards.sample import RewardSample


class Verdict(NamedTuple):
    """The number, and further parts by name; a teacher's arrays by name, as bytes. Not the text of its answer: an
    evaluation counts majorities by the answers of the policy."""

    value: float
    parts: dict[str, float] = {}
    arrays: dict[str, bytes] = {}


class Problem(Exception):
    """There is no number: `reason` of `wire.RewardFailure`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


Outcome = Verdict | Problem
Report = Callable[[int, Outcome], None]  # place of the sample, its outcome


class TeacherSettings(msgspec.Struct, frozen=True):
    """What a teacher is asked: log-probs at a temperature, its `top_k` likeliest tokens (0: none), and about which rows
    (none: all).
    """

    api: str
    temperature: float
    top_k: int = 0
    data_sources: tuple[str, ...] = ()
    sees: bool = False  # its model sees images, as that of the run


class JudgeSettings(msgspec.Struct, frozen=True):
    """A judge's settings, and the settings of the run that it needs."""

    table: JudgeConfig
    timeout_s: float  # of one sample
    policy: str  # model.path, the model of the samples' tokens
    dtype: str  # of the model
    prompt_key: str
    teacher: TeacherSettings | None = None  # None: it gives rewards
    max_image_pixels: int = 0  # of the run

    @property
    def sees_images(self) -> bool:
        """Whether it looks at the images of a sample."""
        return self.table.sees_images if self.teacher is None else self.teacher.sees


class HasIds(Protocol):
    """A row of a forward pass."""

    @property
    def ids(self) -> list[int]: ...


Row = TypeVar("Row", bound=HasIds)


class Model(Protocol):
    """A judge. It runs on the event loop of its own process."""

    async def start(self) -> None:
        """Load the model. Raises an `AsyncRLError` on failure."""

    async def score(self, samples: Sequence[RewardSample], done: Report) -> None:
        """Call `done` once for every sample, in any order, as soon as it is known."""

    def version(self) -> str:
        """Digest of everything that its scores depend on, as far as known here."""

    async def close(self) -> None:
        """Free everything."""


def require_finite(value: float) -> float:
    """The value. Raises `not_finite` for NaN and infinities."""
    if not math.isfinite(value):
        raise Problem("not_finite", f"its score is {value}")
    return value


def make_problem(error: Exception) -> Problem:
    """The problem for an exception of a model's library."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return Problem("memory", f"{type(error).__name__}: {error}"[:500])
    if isinstance(error, TimeoutError):
        return Problem("timeout", str(error) or "TimeoutError")
    return Problem("raised", f"{type(error).__name__}: {error}"[:500])


async def score_each(
    samples: Sequence[RewardSample], one: Callable[[RewardSample], Any], done: Report, *, timeout_s: float, at_once: int
) -> None:
    """Score samples by `one`, `at_once` in parallel, each within its own time."""
    room = asyncio.Semaphore(at_once)

    async def guard(place: int, sample: RewardSample) -> None:
        async with room:
            try:
                outcome: Outcome = await asyncio.wait_for(one(sample), timeout_s)
            except TimeoutError:
                outcome = Problem("timeout", f"no score within {timeout_s:g} s")
            except Exception as error:  # any error of a model's library is a failure of this sample
                outcome = make_problem(error)
        done(place, outcome)

    # bounded: each by wait_for
    await asyncio.gather(*(guard(place, sample) for place, sample in enumerate(samples)))


async def score_batches(
    samples: Sequence[RewardSample],
    done: Report,
    *,
    encode: Callable[[RewardSample], Row],
    forward: Callable[[list[Row]], list[Outcome]],
    rows: int,
) -> None:
    """Score samples by forward passes of up to `rows` rows of similar length, on a thread. `done` as in `Model`."""
    found: list[tuple[int, Row]] = []
    for place, sample in enumerate(samples):
        try:
            found.append((place, encode(sample)))
        except (Problem, AsyncRLError) as error:  # a template may refuse a conversation
            done(place, make_problem(error))
    found.sort(key=lambda row: len(row[1].ids))
    for first in range(0, len(found), rows):
        batch = found[first : first + rows]
        outcomes = await asyncio.to_thread(forward, [row for _, row in batch])
        for (place, _), outcome in zip(batch, outcomes, strict=True):
            done(place, outcome)
