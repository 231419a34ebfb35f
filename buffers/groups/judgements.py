"""What judges said about one sample: answers that are in, failures so far, and the sum once all have answered.

The records
themselves are `buffers.groups.records.Sample` and `buffers.evaluation.records.HeldOut`. Guarantees:
1. a sample has its reward when every judge that is asked about its row has answered, never before: it is the sum of
   their rewards in the order of the configuration, whatever the order of arrival, and its parts are all of theirs;
2. tries and failures are counted by judge; a failure that is told twice under one token counts once.

Example: two judges, the second one answers first.

>>> from buffers.groups.records import Sample
>>> sample = Sample(token=1, length=1, oldest=0, record=0, finish="stop")
>>> both = ("", "slow")
>>> take_answer(sample, both, "slow", Judged(0.5, {"deep": 0.5})), sample.reward, open_judges(sample, both)
(False, None, ('',))
>>> take_answer(sample, both, "", Judged(1.0, {"exact": 1.0})), sample.reward, sample.parts
(True, 1.5, {'exact': 1.0, 'deep': 0.5})
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Judged(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """What one judge said about a sample. `reward` is None until it has answered."""

    reward: float | None = None
    parts: dict[str, float] = {}
    failures: int = 0
    failed_by: tuple[str, ...] = ()
    failed_token: int = 0  # of the newest failure: a copy of it counts no second time
    version: str = ""  # of its functions
    answer: str = ""  # that it found in the response


class Scored(Protocol):
    """A sample that judges look at."""

    reward: float | None
    parts: dict[str, float]
    failures: int  # as rows of before judges had names hold them; now in `judged`
    failed_by: tuple[str, ...]
    judged: dict[str, Judged]  # until all have answered


def said_by(sample: Scored, judge: str) -> Judged:
    """What is known of a judge and this sample."""
    return sample.judged.get(judge) or Judged(failures=sample.failures, failed_by=sample.failed_by)


def open_judges(sample: Scored, judges: tuple[str, ...]) -> tuple[str, ...]:
    """The judges whose answer is missing."""
    if sample.reward is not None:
        return ()
    if not sample.judged:
        return judges
    return tuple(judge for judge in judges if said_by(sample, judge).reward is None)


def take_answer(sample: Scored, judges: tuple[str, ...], judge: str, said: Judged) -> bool:
    """Note an answer; True where it was the last one that was missing: the sample has its reward now."""
    sample.judged = {**sample.judged, judge: said}
    return settle(sample, judges)


def settle(sample: Scored, judges: tuple[str, ...]) -> bool:
    """Sum up where nothing is missing; whether that is so."""
    if not judges or sample.reward is not None or open_judges(sample, judges):
        return False
    answers = [said_by(sample, judge) for judge in judges]
    sample.reward = sum((said.reward or 0.0 for said in answers), 0.0)
    sample.parts = {name: value for said in answers for name, value in said.parts.items()}
    sample.judged = {}
    return True


def take_failure(sample: Scored, judge: str, worker: str, token: int) -> None:
    """Note that a worker of this judge failed."""
    before = said_by(sample, judge)
    by = tuple(sorted({*before.failed_by, worker}))
    after = Judged(failures=before.failures + 1, failed_by=by, failed_token=token)
    sample.judged = {**sample.judged, judge: after}
