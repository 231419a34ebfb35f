"""Which judges score a sample, their answers, and the queue of samples that wait for them.

Samples of training groups and of held-out prompts are treated alike. Guarantees:
1. a sample has its reward when every judge that is asked about its row has answered, never before: the sum of their
   rewards in the order of the configuration, whatever the order of arrival. Its parts are those of all judges;
2. attempts and failures are counted per judge; a failure reported twice under one token counts once;
3. a key of the queue waits for its judge, or is leased to one worker, or is gone; the queue keeps its order;
4. the queue is not persisted: after a restart every sample without an answer is handed out again.

Example: two judges, and the second one answers first.

>>> from buffers.groups.records import Sample
>>> sample = Sample(token=1, length=1, oldest=0, record=0, finish="stop")
>>> both = ("", "slow")
>>> take_answer(sample, both, "slow", Judgement(0.5, {"deep": 0.5})), sample.reward, open_judges(sample, both)
(False, None, ('',))
>>> take_answer(sample, both, "", Judgement(1.0, {"exact": 1.0})), sample.reward, sample.parts
(True, 1.5, {'exact': 1.0, 'deep': 0.5})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from asyncrl.config.judges import judges_for
from asyncrl.config.sections.reward import DEFAULT

#: Group (or held-out prompt), sample, judge.
Key = tuple[int, int, str]
#: Data sources whose judges are remembered: their names come with the rows.
KEPT_SOURCES = 1024


class Judgement(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """The answer of one judge about one sample. `reward` is None until the judge has answered."""

    reward: float | None = None
    parts: dict[str, float] = {}
    failures: int = 0
    failed_by: tuple[str, ...] = ()
    failed_token: int = 0  # of the newest failure: a copy of that message does not count again
    version: str = ""  # of the judge's functions
    answer: str = ""  # answer found in the response


class ScoredSample(Protocol):
    """A sample that judges look at."""

    reward: float | None
    parts: dict[str, float]
    failures: int  # in rows older than named judges; now in `judged`
    failed_by: tuple[str, ...]
    judged: dict[str, Judgement]  # until every judge has answered


def judgement(sample: ScoredSample, judge: str) -> Judgement:
    """The judge's answer and failures about this sample so far."""
    return sample.judged.get(judge) or Judgement(failures=sample.failures, failed_by=sample.failed_by)


def open_judges(sample: ScoredSample, judges: tuple[str, ...]) -> tuple[str, ...]:
    """The judges that have not answered."""
    if sample.reward is not None:
        return ()
    if not sample.judged:
        return judges
    return tuple(judge for judge in judges if judgement(sample, judge).reward is None)


def take_answer(sample: ScoredSample, judges: tuple[str, ...], judge: str, answer: Judgement) -> bool:
    """Record an answer. True if it was the last one: the sample has its reward now."""
    sample.judged = {**sample.judged, judge: answer}
    return sum_up(sample, judges)


def sum_up(sample: ScoredSample, judges: tuple[str, ...]) -> bool:
    """Set the reward if every judge has answered; whether that is so."""
    if not judges or sample.reward is not None or open_judges(sample, judges):
        return False
    reward = 0.0
    parts: dict[str, float] = {}
    for judge in judges:
        answer = sample.judged[judge]
        reward += answer.reward or 0.0
        parts |= answer.parts
    sample.reward, sample.parts, sample.judged = reward, parts, {}
    return True


def take_failure(sample: ScoredSample, judge: str, worker: str, token: int) -> None:
    """Record that a worker of this judge failed."""
    before = judgement(sample, judge)
    failed_by = tuple(sorted({*before.failed_by, worker}))
    after = Judgement(failures=before.failures + 1, failed_by=failed_by, failed_token=token)
    sample.judged = {**sample.judged, judge: after}


class JudgeRule(msgspec.Struct, frozen=True):
    """A judge: how often a failure is retried, and the data sources it is asked about (empty: all). `teaches`: it
    answers with log-probs, and only about samples that are trained.
    """

    name: str
    retries: int
    data_sources: tuple[str, ...] = ()
    teaches: bool = False


class Judges:
    """The judges of a run. Without rules the default judge scores every row."""

    def __init__(self, rules: tuple[JudgeRule, ...], *, retries: int) -> None:
        self.rules = rules
        self._retries = retries
        self._by_source: dict[str, tuple[str, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every judge of the run."""
        return tuple(rule.name for rule in self.rules) or (DEFAULT,)

    def drop_teachers(self) -> Judges:
        """The judges of held-out prompts."""
        return Judges(tuple(rule for rule in self.rules if not rule.teaches), retries=self._retries)

    def teaches(self, name: str) -> bool:
        """Whether the judge is a teacher."""
        return any(rule.teaches for rule in self.rules if rule.name == name)

    def judges_for(self, source: str | None) -> tuple[str, ...]:
        """The judges of a data source; none while the source is unknown and it would matter."""
        if not self.rules:
            return (DEFAULT,)
        if source is None:
            return ()
        found = self._by_source.get(source)
        if found is None:
            if len(self._by_source) >= KEPT_SOURCES:
                self._by_source.clear()
            rules = [(rule.name, rule.data_sources) for rule in self.rules]
            found = self._by_source[source] = judges_for(source, rules)
        return found

    def retries(self, judge: str) -> int:
        """How often a failure of this judge is retried."""
        return next((rule.retries for rule in self.rules if rule.name == judge), self._retries)


def release(held: dict[str, set[Any]], holder: str, item: Any) -> None:
    """The holder no longer holds the item. A holder of nothing has no entry: names come from peers.

    >>> held = {"a": {1}}; release(held, "a", 1); held
    {}
    """
    mine = held[holder]
    mine.discard(item)
    if not mine:
        del held[holder]


class RewardLease(msgspec.Struct, frozen=True, gc=False):
    """A sample that a worker scores for a judge."""

    token: int
    worker: str
    request: int


class ScoreQueue:
    """Samples that wait for judges, and those that workers score."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[tuple[int, int], None]] = {}  # judge -> (group, sample), oldest first
        self.leases: dict[Key, RewardLease] = {}
        self.held: dict[str, set[Key]] = {}  # by worker
        self.named: dict[int, float] = {}  # token -> when its holder last named it

    def offer(self, key: Key) -> None:
        """Queue a sample, unless a worker scores it already."""
        if key not in self.leases:
            self.waiting.setdefault(key[2], {})[key[:2]] = None

    def remove(self, key: Key) -> None:
        """The sample no longer needs this judge."""
        lease = self.leases.pop(key, None)
        if lease is not None:
            release(self.held, lease.worker, key)
            self.named.pop(lease.token, None)
        queue = self.waiting.get(key[2])
        if queue is not None:
            queue.pop(key[:2], None)

    def find_granted(self, worker: str, request: int) -> list[Key]:
        """The samples that this request of the worker got before."""
        return [key for key in sorted(self.held.get(worker, ())) if self.leases[key].request == request]

    def grant(
        self,
        worker: str,
        judge: str,
        *,
        request: int,
        max_samples: int,
        may: Callable[[Key], bool],
        new_token: Callable[[], int],
    ) -> list[Key]:
        """Lease the oldest samples that wait for the judge and that this worker `may` score."""
        queue = self.waiting.get(judge)
        taken: list[Key] = []
        for number, index in queue or ():
            if len(taken) == max_samples:
                break
            key = (number, index, judge)
            if may(key):
                taken.append(key)
        for key in taken:
            assert queue is not None
            del queue[key[:2]]
            self.held.setdefault(worker, set()).add(key)
            self.leases[key] = RewardLease(new_token(), worker, request)
        return taken

    def requeue(self, worker: str) -> int:
        """Queue everything that this worker holds for another one; how many samples."""
        lost = sorted(self.held.pop(worker, ()))
        for key in lost:
            self._requeue(key)
        return len(lost)

    def requeue_unnamed(self, worker: str, holds: Iterable[Sequence[int]], *, now: float, limit_s: float) -> int:
        """Queue again what the living holder has not named for `limit_s`: the grant never arrived."""
        mine = {(number, token) for number, token in holds}
        lost = 0
        for key in sorted(self.held.get(worker, ())):
            token = self.leases[key].token
            if (key[0], token) in mine:
                self.named[token] = now
            elif now - self.named.setdefault(token, now) > limit_s:
                release(self.held, worker, key)
                self._requeue(key)
                lost += 1
        return lost

    def _requeue(self, key: Key) -> None:
        self.named.pop(self.leases.pop(key).token, None)
        self.waiting.setdefault(key[2], {})[key[:2]] = None

    def busy_workers(self) -> list[str]:
        """The workers that hold something."""
        return [worker for worker, keys in self.held.items() if keys]

    def count_waiting(self, judge: str) -> int:
        """Samples that no worker scores yet."""
        return len(self.waiting.get(judge, ()))

    def count_leased(self, judge: str) -> int:
        """Samples that workers score."""
        return sum(key[2] == judge for key in self.leases)

    def keys(self) -> set[Key]:
        """Every sample that waits or is being scored."""
        return {(*pair, judge) for judge, queue in self.waiting.items() for pair in queue} | self.leases.keys()

    def __bool__(self) -> bool:
        return bool(self.leases) or any(self.waiting.values())
