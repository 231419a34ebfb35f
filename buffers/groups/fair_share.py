"""Divides the groups that are ready to be leased among the producers that ask for work.

Without shares the producer that asks first takes everything, and if little is ready (a synchronous run starts a batch
of few groups) the others get nothing. A producer's share of all held and ready groups is in proportion to its capacity.
Guarantees:
1. a producer that holds nothing gets at least one group while there is one;
2. a request gets what its producer lacks of its share, whatever the others lack; more than that only if it is not
   reserved for others;
3. groups are reserved for a producer that does not ask for at most `RESERVED_S` per committed version.
A producer counts once it has asked for work, while it is heard from. Shares decide how many groups a request gets, not
which, and nothing of them needs to survive a restart of the service.

Example: 64 groups are ready; a and b hold nothing and can hold 64 each. The first request of a gets 32, its next one
none, because b is expected; b gets the other 32.

>>> first = {"a": Standing(64, 0, True), "b": Standing(64, 0, True)}
>>> then = first | {"a": Standing(64, 32, True)}
>>> room_for("a", first, ready=64), room_for("a", then, ready=32), room_for("b", then, ready=32)
((32, ['b']), (0, ['b']), (32, []))
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from buffers.groups.schedule import Schedule
from buffers.groups.transaction import Transaction
from buffers.groups.workers import Worker, Workers

RESERVED_S = 2.0
FRESH_S = 5.0  # a producer heard from within this time may ask soon


class Standing(msgspec.Struct, frozen=True):
    """A producer: the groups it can hold, those it holds, and whether it may ask for more soon."""

    capacity: int
    held: int
    expected: bool


def missing_groups(producers: Mapping[str, Standing], *, ready: int) -> dict[str, int]:
    """How many groups each producer lacks of its share; a share is at most what the producer can hold."""
    total = ready + sum(one.held for one in producers.values())
    capacity = max(1, sum(one.capacity for one in producers.values()))
    lacks = {name: min(total * one.capacity // capacity, one.capacity) - one.held for name, one in producers.items()}
    return {name: number for name, number in lacks.items() if number > 0}


def room_for(asker: str, producers: Mapping[str, Standing], *, ready: int) -> tuple[int, list[str]]:
    """How many of the `ready` groups the asker's request may get, and the producers that others are reserved for."""
    lacks = missing_groups(producers, ready=ready)
    others = [name for name in lacks if name != asker and producers[name].expected]
    reserved = sum(lacks[name] for name in others)
    own = max(lacks.get(asker, 0), 1 if not producers[asker].held else 0)
    return max(ready - reserved, min(ready, own)), others


class FairShare:
    """The shares of producers over the schedule and the workers that are known."""

    def __init__(self, tx: Transaction, schedule: Schedule, workers: Workers) -> None:
        self.tx = tx
        self.schedule = schedule
        self.workers = workers
        self._standing: tuple[int, float, dict[str, Standing]] = (-1, math.nan, {})  # generation, now, result

    def note_capacity(self, worker: Worker, capacity: int) -> None:
        """The producer can hold that many groups, by its last request."""
        if worker.capacity != capacity:
            worker.capacity, self._standing = capacity, (-1, math.nan, {})

    def room(self, worker: Worker, engine_version: int) -> float:
        """How many groups a producer may be granted; inf if nothing is reserved for others."""
        worker.others = ""
        standing = self.standings()
        ready = self.schedule.count_ready(engine_version) if len(standing) > 1 and worker.name in standing else 0
        if not ready:
            return math.inf
        room, others = room_for(worker.name, standing, ready=ready)
        version = self.schedule.table.meta.version
        for name in others:
            other = self.workers.known["producer", name]
            if other.reserved[0] != version:
                other.reserved = (version, self.tx.now)
        worker.others = ", ".join(sorted(others)[:4])
        return room if others else math.inf

    def standings(self) -> dict[str, Standing]:
        """The living producers that have asked for work; computed once while nothing changes.

        A producer is expected to ask if it was heard from and is not barred, for `RESERVED_S` from the time groups are
        first reserved for it at a committed version.
        """
        now = self.tx.now
        if self._standing[:2] != (self.tx.generation, now):
            table = self.schedule.table
            limit, version = min(self.schedule.live.current.lease_timeout_s, FRESH_S), table.meta.version
            found = {}
            for (role, name), worker in self.workers.known.items():
                if role == "producer" and worker.capacity > 0:
                    held, fresh = len(table.indexes.held.get(name, ())), now - worker.seen <= limit
                    over = worker.reserved[0] == version and now - worker.reserved[1] > RESERVED_S
                    if held or fresh:
                        expected = fresh and not over and name not in self.workers.barred
                        found[name] = Standing(worker.capacity, held, expected)
            self._standing = (self.tx.generation, now, found)
        return self._standing[2]
