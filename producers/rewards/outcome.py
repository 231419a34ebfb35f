"""What a judge that is a model says of one sample: a number, or why there is none. Never a made-up 0.

Reasons of a failure: `timeout`, `memory`, `raised` and `not_finite` as of
functions, and `too_long` (the judge cannot take the text), `unparsed` (its answer holds no number), `unreachable` (no
server answered), `refused` (the server said no, or nonsense).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncrl.config.sections.judge import JudgeConfig
from asyncrl.errors import AsyncRLError
from producers.rewards.sample import RewardSample


class Verdict(NamedTuple):
    """The number, further parts by name, and the text that the model answered with."""

    value: float
    parts: dict[str, float] = {}
    answer: str = ""


class Problem(Exception):
    """There is no number: `reason` of `wire.RewardFailure`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


Outcome = Verdict | Problem
Done = Callable[[int, Outcome], None]  # place of the sample, what the judge says of it


class Asked(msgspec.Struct, frozen=True):
    """A judge's settings, and what of the run it needs to know."""

    table: JudgeConfig
    timeout_s: float  # of one sample
    policy: str  # model.path: whose tokens the samples are
    dtype: str  # of the model
    prompt_key: str


class Model(Protocol):
    """A judge. Made in a process of its own, on whose event loop all of it runs."""

    async def start(self) -> None:
        """Load what is needed. Raises an `AsyncRLError` where it cannot be."""

    async def score(self, samples: Sequence[RewardSample], done: Done) -> None:
        """Call `done` once for every sample, in any order, as soon as it is known."""

    def version(self) -> str:
        """Digest of all that its scores depend on, as far as it can be seen from here."""

    async def close(self) -> None:
        """Give up what is held."""


def checked(value: float) -> float:
    """The value. Raises `not_finite` for what is no number."""
    if not math.isfinite(value):
        raise Problem("not_finite", f"its score is {value}")
    return value


def problem_of(error: Exception) -> Problem:
    """The problem that an exception of a model's library stands for."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return Problem("memory", f"{type(error).__name__}: {error}"[:500])
    if isinstance(error, TimeoutError):
        return Problem("timeout", str(error) or "TimeoutError")
    return Problem("raised", f"{type(error).__name__}: {error}"[:500])


async def each(
    samples: Sequence[RewardSample], one: Callable[[RewardSample], Any], done: Done, *, timeout_s: float, at_once: int
) -> None:
    """Score samples by `one`, so many at once, each within its time from when it begins."""
    room = asyncio.Semaphore(at_once)

    async def guarded(place: int, sample: RewardSample) -> None:
        async with room:
            try:
                outcome: Outcome = await asyncio.wait_for(one(sample), timeout_s)
            except TimeoutError:
                outcome = Problem("timeout", f"no score within {timeout_s:g} s")
            except Exception as error:  # whatever a model's library raises is a failure of this sample
                outcome = problem_of(error)
        done(place, outcome)

    # bounded: each by wait_for
    await asyncio.gather(*(guarded(place, sample) for place, sample in enumerate(samples)))


async def in_batches(
    samples: Sequence[RewardSample],
    done: Done,
    *,
    ids_of: Callable[[RewardSample], list[int]],
    forward: Callable[[list[list[int]]], list[Outcome]],
    rows: int,
) -> None:
    """Score samples by forward passes of up to `rows` rows of similar length, on a thread. `done` as in `Model`."""
    found: list[tuple[int, list[int]]] = []
    for place, sample in enumerate(samples):
        try:
            found.append((place, ids_of(sample)))
        except (Problem, AsyncRLError) as error:  # a template may refuse a conversation
            done(place, problem_of(error))
    found.sort(key=lambda row: len(row[1]))
    for first in range(0, len(found), rows):
        batch = found[first : first + rows]
        outcomes = await asyncio.to_thread(forward, [ids for _, ids in batch])
        for (place, _), outcome in zip(batch, outcomes, strict=True):
            done(place, outcome)
