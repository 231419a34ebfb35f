"""Messages between reward workers and the buffer."""

from __future__ import annotations

from asyncrl.wire.base import Field, Message, Name, Whole


class RewardRequest(Message, frozen=True, tag=30):
    """Ask for up to `max_samples` unscored samples; waits up to `wait_s`. Answer: `RewardWork` + one payload each."""

    worker: Name
    max_samples: Whole
    wait_s: float
    judge: Name = ""  # samples that this judge has to score; empty: the default one


class RewardItem(Message, frozen=True):
    """One sample to score. Its payload holds `prompt` i4 `[P]`, `response` i4 `[T]` and, where some tokens were not
    sampled by the policy, `mask` u1 `[T]`; `rows` as in `SampleHead`.
    """

    group: int
    index: int
    token: int  # fences this reward lease
    attempt: int
    row: str  # JSON
    finish: str
    fields: tuple[Field, ...]
    judge: str = ""  # by whom it is to be scored
    rows: tuple[tuple[int, int], ...] = ()


class RewardWork(Message, frozen=True, tag=31):
    """Samples to score, maybe none."""

    items: tuple[RewardItem, ...]
    done: bool = False


class Score(Message, frozen=True):
    """The reward of one sample: the weighted sum and its parts by name."""

    group: int
    index: int
    token: int
    reward: float
    parts: dict[str, float] = {}
    answer: str = ""  # that the function found in the response, where it says so
    text: str = ""  # of the response, for samples of an evaluation alone


class RewardFailure(Message, frozen=True):
    """A reward that could not be computed. Never a reward of 0: the sample is tried again elsewhere."""

    group: int
    index: int
    token: int
    reason: str  # raised | timeout | memory | not_finite | died | parts
    detail: str = ""


class Scores(Message, frozen=True, tag=32):
    """Scores and failures. Answer: `ScoresReply`."""

    worker: Name
    scores: tuple[Score, ...]
    failures: tuple[RewardFailure, ...] = ()
    reward_version: str = ""
    judge: Name = ""  # for whom the worker scores: one message is of one judge


class ScoresReply(Message, frozen=True, tag=33):
    """How many were taken; refused ones (old token, unknown group) by `group:index` with a reason."""

    accepted: int
    refused: dict[str, str] = {}
