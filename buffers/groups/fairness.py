"""Who gets how much of the work that is ready: producers that lack something of their share are kept it.

Without it the one that asks first takes
all, and where little is ready (a synchronous run begins a batch of few groups) the others have none. The share of a
producer is by capacity, of all groups that are held and ready. Guarantees:
1. a producer that holds nothing gets at least one group while there is one: nobody idles beside work;
2. a request gets what its producer lacks of its share, whoever else lacks something; beyond that only what is not kept;
3. for one that does not come groups are kept at most `KEPT_S` per committed version: then others get them.
A producer counts once it has asked for work, while it is heard from. This layer decides how many groups a request may
get, not which, and keeps nothing that a restart of the service needs.

Example: 64 groups are ready, a and b hold nothing and can hold 64 each. The first request of a gets 32, its next one
none, for b is still expected; b gets the other 32.

>>> first = {"a": Standing(64, 0, True), "b": Standing(64, 0, True)}
>>> then = first | {"a": Standing(64, 32, True)}
>>> room_for("a", first, ready=64), room_for("a", then, ready=32), room_for("b", then, ready=32)
((32, ['b']), (0, ['b']), (32, []))
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

import msgspec

from buffers.groups.changes import Worker
from buffers.groups.records import State
from buffers.groups.schedule import capacity, levels
from buffers.groups.underway import HandingOut

KEPT_S = 2.0
FRESH_S = 5.0  # who was heard from in that time may ask soon


class Standing(msgspec.Struct, frozen=True):
    """A producer: groups that it can hold, those that it holds, and whether it may ask for more soon."""

    capacity: int
    held: int
    expected: bool


def missing(producers: Mapping[str, Standing], *, ready: int) -> dict[str, int]:
    """How many groups each lacks of its share of the `ready` ones and all that are held; nobody's share is more than it
    can hold."""
    total = ready + sum(one.held for one in producers.values())
    capacity = max(1, sum(one.capacity for one in producers.values()))
    lacks = {name: min(total * one.capacity // capacity, one.capacity) - one.held for name, one in producers.items()}
    return {name: number for name, number in lacks.items() if number > 0}


def room_for(asker: str, producers: Mapping[str, Standing], *, ready: int) -> tuple[int, list[str]]:
    """How many of the `ready` groups its request may get, and for whom others are kept."""
    lacks = missing(producers, ready=ready)
    others = [name for name in lacks if name != asker and producers[name].expected]
    kept = sum(lacks[name] for name in others)
    own = max(lacks.get(asker, 0), 1 if not producers[asker].held else 0)
    return max(ready - kept, min(ready, own)), others


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
        """How many groups a producer that can hold `most` may be granted, so that the others get their shares."""
        worker.others = ""
        if worker.capacity != most:
            worker.capacity, self._stood = most, (-1, math.nan, {})
        standing = self._standing(now)
        ready = self._ready_for(engine_version) if len(standing) > 1 and worker.name in standing else 0
        if not ready:
            return math.inf
        room, others = room_for(worker.name, standing, ready=ready)
        for name in others:
            other = self.workers["producer", name]
            if other.kept[0] != self.meta.version:
                other.kept = (self.meta.version, now)
        worker.others = ", ".join(sorted(others)[:4])
        return room if others else math.inf

    def _standing(self, now: float) -> dict[str, Standing]:
        """The producers that have asked for work and live; found once for all requests that wait while nothing changes.

        Expected are those that were heard from and are not barred, for `KEPT_S` from when groups are first kept for
        them at a committed version.
        """
        if self._stood[:2] != (self.generation, now):
            limit, version = min(self.settings.lease_timeout_s, FRESH_S), self.meta.version
            found = {}
            for (role, name), worker in self.workers.items():
                if role == "producer" and worker.capacity > 0:
                    held, fresh = len(self.held.get(name, ())), now - worker.seen <= limit
                    over = worker.kept[0] == version and now - worker.kept[1] > KEPT_S
                    if held or fresh:
                        found[name] = Standing(worker.capacity, held, fresh and not over and name not in self.barred)
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
