"""Messages between reward workers and the buffer."""

from __future__ import annotations

from asyncrl.wire.base import Field, Message, Name, Whole


class RewardRequest(Message, frozen=True, tag=30):
    """Ask for up to `max_samples` unscored samples; waits up to `wait_s`. Answer: `RewardWork` + one payload each."""

    worker: Name
    max_samples: Whole
    wait_s: float
    judge: Name = ""  # samples for this judge; empty: the default one


class RewardItem(Message, frozen=True):
    """One sample to score. Its payload holds `prompt` i4 `[P]`, `response` i4 `[T]` and, if the policy did not sample
    all tokens, `mask` u1 `[T]`; `rows` as in `SampleHead`; `images`: digests of those in the response, in order.
    """

    group: int
    index: int
    token: int  # fences this reward lease
    attempt: int
    row: str  # JSON
    finish: str
    fields: tuple[Field, ...]
    judge: str = ""  # judge that scores it
    rows: tuple[tuple[int, int], ...] = ()
    images: tuple[str, ...] = ()


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
    answer: str = ""  # answer that the function found in the response, if it reports one
    text: str = ""  # text of the response, only for samples of an evaluation


class RewardFailure(Message, frozen=True):
    """A reward that could not be computed. It never counts as 0: another worker tries the sample again."""

    group: int
    index: int
    token: int
    reason: str  # raised | timeout | memory | not_finite | too_large | died | parts
    detail: str = ""


class Scores(Message, frozen=True, tag=32):
    """Scores and failures. Answer: `ScoresReply`."""

    worker: Name
    scores: tuple[Score, ...]
    failures: tuple[RewardFailure, ...] = ()
    reward_version: str = ""
    judge: Name = ""  # judge of the worker: all scores of a message belong to one judge


class TeacherLogprobs(Message, frozen=True, tag=34):
    """What a teacher says about one sample; stored as it came, next to the sample. Answer: `ScoresReply`.

    The payload holds `teacher_logprobs` f4 `[T]`, the log-prob of each token of the response, at the temperature of the
    run; 0 where the policy did not sample. Where the teacher's likeliest tokens were asked for, `teacher_ids` i4
    `[T * K]` and `teacher_top` f4 `[T * K]` are these and their log-probs, the likeliest first.
    """

    worker: Name
    judge: Name  # name of the teacher
    group: int
    index: int
    token: int
    version: str  # digest of the teacher's files, or of its address
    fields: tuple[Field, ...]


class ScoresReply(Message, frozen=True, tag=33):
    """Number of accepted scores; refused ones (old token, unknown group) by `group:index` with a reason."""

    accepted: int
    refused: dict[str, str] = {}
