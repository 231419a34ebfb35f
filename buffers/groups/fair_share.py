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

Of more than `FEW` producers the shares are kept for `KEPT_S`, of more than 200 longer (0.25 s for 1,000), because a
pass over all of them at every request would cost a fleet most of the service's time: what others lack is then a little
old, what the asker lacks is not.

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
from typing import NamedTuple

import msgspec

from buffers.groups.schedule import Schedule
from buffers.groups.transaction import Transaction
from buffers.groups.workers import Worker, Workers

RESERVED_S = 2.0
FRESH_S = 5.0  # a producer heard from within this time may ask soon
FLEET_FRESH_S = 10.0  # of more than `FEW`, whose heartbeats may be further apart (asyncrl.net.peers)
FEW, KEPT_S, KEPT_EACH_S = 32, 0.05, 0.00025


class Standing(msgspec.Struct, frozen=True):
    """A producer: the groups it can hold, those it holds, and whether it may ask for more soon."""

    capacity: int
    held: int
    expected: bool


class Shares(NamedTuple):
    """Shares of `total` held and ready groups among producers that can hold `capacity` together; `lacks`: what each
    still lacks, if anything; `expected`: those of them that may ask soon, and `reserved` groups wait for them.
    """

    total: int
    capacity: int
    lacks: Mapping[str, int]
    expected: list[str]
    reserved: int

    def room(self, name: str, one: Standing, *, ready: int) -> int:
        """How many of the `ready` groups a request of this producer may get."""
        lack = min(self.total * one.capacity // self.capacity, one.capacity) - one.held
        own = max(lack, 1 if not one.held else 0)
        reserved = self.reserved - (self.lacks.get(name, 0) if one.expected else 0)
        return max(ready - reserved, min(ready, own))


def missing_groups(producers: Mapping[str, Standing], *, ready: int) -> dict[str, int]:
    """How many groups each producer lacks of its share; a share is at most what the producer can hold."""
    total = ready + sum(one.held for one in producers.values())
    capacity = max(1, sum(one.capacity for one in producers.values()))
    lacks = {name: min(total * one.capacity // capacity, one.capacity) - one.held for name, one in producers.items()}
    return {name: number for name, number in lacks.items() if number > 0}


def divide(producers: Mapping[str, Standing], *, ready: int) -> Shares:
    """The shares of these producers."""
    lacks = missing_groups(producers, ready=ready)
    expected = sorted(name for name in lacks if producers[name].expected)
    return Shares(
        ready + sum(one.held for one in producers.values()),
        max(1, sum(one.capacity for one in producers.values())),
        lacks,
        expected,
        sum(lacks[name] for name in expected),
    )


def room_for(asker: str, producers: Mapping[str, Standing], *, ready: int) -> tuple[int, list[str]]:
    """How many of the `ready` groups the asker's request may get, and the producers that others are reserved for."""
    shares = divide(producers, ready=ready)
    room = shares.room(asker, producers[asker], ready=ready)
    return room, [name for name in shares.expected if name != asker]


NOTHING: tuple[int, float, int, dict[str, Standing]] = (-1, math.nan, -1, {})


class FairShare:
    """The shares of producers over the schedule and the workers that are known."""

    def __init__(self, tx: Transaction, schedule: Schedule, workers: Workers) -> None:
        self.tx = tx
        self.schedule = schedule
        self.workers = workers
        self._standing: tuple[int, float, int, dict[str, Standing]] = NOTHING  # generation, now, version, result
        self._shares: tuple[float, Shares] | None = None  # of more than `FEW` producers, and the time of the standing

    def note_capacity(self, worker: Worker, capacity: int) -> None:
        """The producer can hold that many groups, by its last request."""
        if worker.capacity != capacity:
            worker.capacity = capacity
            if len(self._standing[3]) <= FEW or worker.name not in self._standing[3]:
                self._standing = NOTHING

    def room(self, worker: Worker, engine_version: int) -> float:
        """How many groups a producer may be granted; inf if nothing is reserved for others."""
        worker.others = ""
        standing = self.standings()
        ready = self.schedule.count_ready(engine_version) if len(standing) > 1 and worker.name in standing else 0
        if not ready:
            return math.inf
        shares = self._divide(worker, standing, ready)
        others = [name for name in shares.expected[:5] if name != worker.name]
        worker.others = ", ".join(others[:4])
        held = len(self.schedule.table.indexes.held.get(worker.name, ()))
        mine = Standing(worker.capacity, held, standing[worker.name].expected)
        return shares.room(worker.name, mine, ready=ready) if others else math.inf

    def _divide(self, asker: Worker, standing: Mapping[str, Standing], ready: int) -> Shares:
        """The shares, kept as long as the standing of many producers is; what is reserved for others is from now on."""
        at = self._standing[1]
        if len(standing) > FEW and self._shares is not None and self._shares[0] == at:
            return self._shares[1]
        shares, version = divide(standing, ready=ready), self.schedule.table.meta.version
        self._shares = (at, shares)
        for name in shares.expected:
            worker = self.workers.known["producer", name]
            if worker is not asker and worker.reserved[0] != version:
                worker.reserved = (version, self.tx.now)
        return shares

    def standings(self) -> dict[str, Standing]:
        """The living producers that have asked for work; computed once while nothing changes.

        A producer is expected to ask if it was heard from and is not barred, for `RESERVED_S` from the time groups are
        first reserved for it at a committed version.
        """
        now, table = self.tx.now, self.schedule.table
        generation, at, version, found = self._standing
        limit = max(KEPT_S, KEPT_EACH_S * len(found))
        kept = len(found) > FEW and version == table.meta.version and 0 <= now - at < limit
        if not kept and (generation, at) != (self.tx.generation, now):
            version, fresh_s = table.meta.version, FLEET_FRESH_S if len(self.workers.known) > FEW else FRESH_S
            fresh_s = min(self.schedule.live.current.lease_timeout_s, fresh_s)
            found = {}
            for (role, name), worker in self.workers.known.items():
                if role == "producer" and worker.capacity > 0:
                    held, fresh = len(table.indexes.held.get(name, ())), now - worker.seen <= fresh_s
                    over = worker.reserved[0] == version and now - worker.reserved[1] > RESERVED_S
                    if held or fresh:
                        expected = fresh and not over and name not in self.workers.barred
                        found[name] = Standing(worker.capacity, held, expected)
            self._standing = (self.tx.generation, now, version, found)
        return found
