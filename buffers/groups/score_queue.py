"""Samples that wait for judges, and who scores which: the queues of `buffers.groups.book` and
`buffers.evaluation.records`.

An entry is a key (group, sample, judge): a sample
that two judges are asked about stands in two queues and may be with two workers at once. Guarantees:
1. a key is in its judge's queue, or leased to one worker, or in neither (answered, or gone); queues keep their order;
2. nothing here is persisted: after a restart every sample without an answer is handed out again.
It decides nothing about rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

#: Group (or prompt of an evaluation), sample, judge.
Key = tuple[int, int, str]


def let_go(held: dict[str, set[Any]], holder: str, what: Any) -> None:
    """It no longer holds this; who holds nothing is no entry: names are what peers say.

    >>> held = {"a": {1}}; let_go(held, "a", 1); held
    {}
    """
    mine = held[holder]
    mine.discard(what)
    if not mine:
        del held[holder]


class RewardLease(msgspec.Struct, frozen=True, gc=False):
    """Who scores a sample for a judge. Not persisted."""

    token: int
    worker: str
    request: int


class ScoreQueue:
    def __init__(self) -> None:
        self.waiting: dict[str, dict[tuple[int, int], None]] = {}  # by judge
        self.leases: dict[Key, RewardLease] = {}
        self.held: dict[str, set[Key]] = {}  # by worker
        self.named: dict[int, float] = {}  # token -> when its holder last named it

    def offer(self, key: Key) -> None:
        """It is to be scored, unless somebody scores it already."""
        if key not in self.leases:
            self.waiting.setdefault(key[2], {})[key[:2]] = None

    def release(self, key: Key) -> None:
        """It is no longer to be scored, or was."""
        lease = self.leases.pop(key, None)
        if lease is not None:
            let_go(self.held, lease.worker, key)
            self.named.pop(lease.token, None)
        queue = self.waiting.get(key[2])
        if queue is not None:
            queue.pop(key[:2], None)

    def again(self, worker: str, request: int) -> list[Key]:
        """What this request of the worker got before."""
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

    def lose(self, worker: str) -> int:
        """What this worker holds waits for another one; how many that were."""
        lost = sorted(self.held.pop(worker, ()))
        for key in lost:
            self._give_up(key)
        return len(lost)

    def lose_unnamed(self, worker: str, holds: Iterable[Sequence[int]], *, now: float, limit_s: float) -> int:
        """The same for what its living holder has not named (group, token) for so long: the grant never arrived."""
        mine = {(number, token) for number, token in holds}
        lost = 0
        for key in sorted(self.held.get(worker, ())):
            token = self.leases[key].token
            if (key[0], token) in mine:
                self.named[token] = now
            elif now - self.named.setdefault(token, now) > limit_s:
                let_go(self.held, worker, key)
                self._give_up(key)
                lost += 1
        return lost

    def _give_up(self, key: Key) -> None:
        self.named.pop(self.leases.pop(key).token, None)
        self.waiting.setdefault(key[2], {})[key[:2]] = None

    def busy(self) -> list[str]:
        """The workers that hold something."""
        return [worker for worker, keys in self.held.items() if keys]

    def waits(self, judge: str) -> int:
        """How many samples nobody scores yet."""
        return len(self.waiting.get(judge, ()))

    def leased(self, judge: str) -> int:
        """How many samples are being scored."""
        return sum(key[2] == judge for key in self.leases)

    def keys(self) -> set[Key]:
        """Everything that waits or is being scored."""
        return {(*pair, judge) for judge, queue in self.waiting.items() for pair in queue} | self.leases.keys()

    def __bool__(self) -> bool:
        return bool(self.leases) or any(self.waiting.values())
