"""Counts and orders of groups, derived from their rows. They decide nothing and are never stored."""

from __future__ import annotations

import bisect
import math
from collections import Counter

from asyncrl.errors import AsyncRLError
from buffers.groups.judgements import Judges, ScoreQueue, open_judges, release
from buffers.groups.records import COMPETING, LEASED, READY, TRAINED, UNSCORED, Group

#: (deadline, sequence, id)
Entry = tuple[int, int, int]


class GroupIndexes:
    """Counts and orders of groups by state, deadline and holder, and the queue of samples to score."""

    def __init__(self, judges: Judges, queue: ScoreQueue) -> None:
        self.judges = judges
        self.queue = queue
        self.counts: Counter[int] = Counter()
        self.due: Counter[int] = Counter()  # deadline -> competing groups
        self.ready: list[Entry] = []  # earliest deadline first
        self.used: list[Entry] = []  # trained groups that may be trained again, earliest deadline first
        self.pending: dict[int, None] = {}  # leased groups without a holder: they wait for a producer
        self.pending_order: list[tuple[float, int]] = []  # the same as (deadline, id); no deadline: inf
        self.held: dict[str, set[int]] = {}  # by producer
        self.named: dict[int, float] = {}  # leased group -> when its holder last named it

    @property
    def competing(self) -> int:
        """Groups that compete for a place in a batch."""
        return self.counts[LEASED] + self.counts[UNSCORED] + self.counts[READY]

    def remove(self, group: Group) -> None:
        """Take the group out of every index."""
        state = group.state
        self.counts[state] -= 1
        if state in COMPETING and group.deadline is not None:
            left = self.due[group.deadline] - 1
            if left:
                self.due[group.deadline] = left
            else:
                del self.due[group.deadline]
        if state == READY:
            del self.ready[bisect.bisect_left(self.ready, _entry(group))]
        elif state == LEASED:
            if group.id in self.pending:
                del self.pending[group.id]
                del self.pending_order[bisect.bisect_left(self.pending_order, _urgency(group))]
            if group.holder:
                release(self.held, group.holder, group.id)
                self.named.pop(group.id, None)
        elif state == TRAINED and len(group.uses) < group.max_uses:
            del self.used[bisect.bisect_left(self.used, _entry(group))]

    def add(self, group: Group) -> None:
        """Put the group into the indexes that its state asks for."""
        state = group.state
        self.counts[state] += 1
        if state in COMPETING and group.deadline is not None:
            self.due[group.deadline] += 1
        if state == READY:
            bisect.insort(self.ready, _entry(group))
        elif state == LEASED:
            if group.holder:
                self.held.setdefault(group.holder, set()).add(group.id)
            else:
                self.pending[group.id] = None
                bisect.insort(self.pending_order, _urgency(group))
        elif state == TRAINED and len(group.uses) < group.max_uses:
            bisect.insort(self.used, _entry(group))
        if group.samples and state in (LEASED, UNSCORED):
            judges = self.judges.judges_for(group.source)
            for index, sample in group.samples.items():
                if sample.reward is None:
                    for judge in open_judges(sample, judges):
                        self.queue.offer((group.id, index, judge))

    def check(self, fresh: GroupIndexes) -> None:
        """Compare with indexes that were built from the rows. Raises `internal` if they disagree."""
        for name in ("counts", "due"):
            if +getattr(fresh, name) != +getattr(self, name):
                raise AsyncRLError("internal", f"{name}: {getattr(self, name)}, the rows say {getattr(fresh, name)}")
        if (fresh.ready, fresh.used) != (self.ready, self.used):
            raise AsyncRLError("internal", "the order of ready or used groups disagrees with the rows")
        if fresh.pending.keys() != self.pending.keys() or fresh.pending_order != self.pending_order:
            raise AsyncRLError("internal", "the pending groups disagree with the rows")
        if fresh.held != {name: ids for name, ids in self.held.items() if ids}:
            raise AsyncRLError("internal", "the lease holders disagree with the rows")
        if fresh.queue.keys() != self.queue.keys():
            raise AsyncRLError("internal", "the samples to score disagree with the rows")


def _entry(group: Group) -> Entry:
    return (group.deadline or 0, group.sequence, group.id)


def _urgency(group: Group) -> tuple[float, int]:
    """The order in which groups that wait for a producer are leased."""
    return (math.inf if group.deadline is None else group.deadline, group.id)
