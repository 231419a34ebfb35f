"""Who gets how much of the work that is ready: groups are kept for producers that hold none.

Called by `buffers.leasing`, the layer above, for every request. Without it the one that asks first takes
all, and where little is ready (a synchronous run begins a batch of few groups) the others have none. Guarantees:
1. a producer that holds nothing gets at least one group while there is one: nobody idles beside work;
2. groups are kept only for producers that hold nothing, each its share by capacity of all that is held and ready; where
   everybody holds something, whoever asks takes what it can;
3. for one that does not come they are kept at most `KEPT_S` per committed version: then others get them.
A producer counts once it has asked for work, while it is heard from. This layer decides how many groups a request may
get, not which, and keeps nothing that a restart of the service needs.

Example: 64 groups are ready, a and b hold nothing and can hold 64 each. The first request of a gets 32, its next one
none, for b is still expected.

>>> both = {"a": Standing(64, 0, True), "b": Standing(64, 0, True)}
>>> kept_for("a", both, ready=64)
{'b': 32}
>>> kept_for("a", both | {"a": Standing(64, 32, False)}, ready=32), room_for(32, 32, holds=32)
({'b': 32}, 0)
>>> kept_for("b", both | {"a": Standing(64, 32, False)}, ready=32)
{}
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

import msgspec

from buffers.admission import capacity, levels
from buffers.ledger import State
from buffers.notes import Worker
from buffers.underway import HandingOut

KEPT_S = 2.0
FRESH_S = 5.0  # who was heard from in that time may ask soon


class Standing(msgspec.Struct, frozen=True):
    """A living producer: groups that it can hold, those that it holds, and whether it is to get some soon."""

    capacity: int
    held: int
    expected: bool


def kept_for(asker: str, producers: Mapping[str, Standing], *, ready: int) -> dict[str, int]:
    """How many of the `ready` groups are kept for which others."""
    total = ready + sum(one.held for one in producers.values())
    capacity = sum(one.capacity for one in producers.values())
    shares = {
        name: total * one.capacity // max(1, capacity)
        for name, one in producers.items() if name != asker and one.expected and not one.held
    }  # fmt: skip
    return {name: share for name, share in shares.items() if share}


def room_for(ready: int, kept: int, *, holds: int) -> int:
    """How many of the `ready` groups its request may get where `kept` are kept for others."""
    return max(ready - kept, 0 if holds else 1)


class Sharing(HandingOut):
    """The layer below plus the shares of producers."""

    _stood: tuple[int, float, dict[str, Standing]] = (-1, math.nan, {})  # generation, now, what `_standing` found

    @property
    def _competing(self) -> int:
        return self.counts[State.LEASED] + self.counts[State.UNSCORED] + self.counts[State.READY]

    @property
    def _training_version(self) -> int:
        """The version that the step in training starts from; between steps the committed one."""
        return max(self.meta.version, self.frontier - 1)

    @property
    def _unbegun(self) -> int:
        """Groups that wait for another attempt and of which nothing arrived."""
        return len(self.pending_order) - bisect.bisect_left(self.pending_order, (math.inf, -1))

    def _fair_room(self, worker: Worker, most: int, engine_version: int, now: float) -> float:
        """How many groups a producer that can hold `most` may be granted, so that those that hold none get theirs."""
        worker.others = ""
        if worker.capacity != most:
            worker.capacity, self._stood = most, (-1, math.nan, {})
        standing = self._standing(now)
        if not any(one.expected and name != worker.name for name, one in standing.items()):
            return math.inf
        ready = self._ready_for(engine_version)
        kept = kept_for(worker.name, standing, ready=ready) if ready else {}
        for name in kept:
            other = self.workers["producer", name]
            if other.kept[0] != self.meta.version:
                other.kept = (self.meta.version, now)
        worker.others = ", ".join(sorted(kept)[:4])
        return room_for(ready, sum(kept.values()), holds=len(self.held.get(worker.name, ()))) if kept else math.inf

    def _standing(self, now: float) -> dict[str, Standing]:
        """The living producers that have asked for work; found once for all requests that wait while nothing changes.

        Expected are those that hold nothing and are not barred, for `KEPT_S` from when groups are first kept for them
        at a committed version.
        """
        if self._stood[:2] != (self.generation, now):
            limit, version = min(self.settings.lease_timeout_s, FRESH_S), self.meta.version
            found = {
                name: Standing(
                    worker.capacity, held := len(self.held.get(name, ())),
                    not held and name not in self.barred
                    and (worker.kept[0] != version or now - worker.kept[1] <= KEPT_S),
                )
                for (role, name), worker in self.workers.items()
                if role == "producer" and worker.capacity > 0 and (now - worker.seen <= limit or self.held.get(name))
            }  # fmt: skip
            self._stood = (self.generation, now, found)
        return self._stood[2]

    def _ready_for(self, engine_version: int) -> int:
        """How many groups could be leased to engines at this version; about, where bounds differ."""
        settings, v, at = self.settings, self._training_version, self.frontier
        deadline = engine_version + settings.max_staleness
        begun = len(self.pending) - self._unbegun
        if self.meta.emptied or engine_version < 0 or deadline < at:
            return begun
        deep = capacity(self.plan, v, v + settings.depth - max(0, v - engine_version)) - self.outstanding
        fits = min(capacity(self.plan, at, u) - n for u, n in levels(self.due, at, deadline) if u >= deadline) + 1
        left = self.unclaimed - self._competing
        return begun + max(0, min(deep + self._unbegun, fits, left + self._unbegun))
