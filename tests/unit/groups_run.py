"""A book of the buffer with a clock, a learner and producers, for the tests of its state machine."""

from __future__ import annotations

from typing import Any

from asyncrl.wire import SampleHead, Samples
from buffers.groups.group_table import ledger_counts
from buffers.groups.machine import GroupMachine, finish_group
from buffers.groups.records import Ledger, Record, Settings, State


def settings(**changes: Any) -> Settings:
    base: dict[str, Any] = {"group_size": 2, "batch_groups": 1, "max_staleness": 2, "depth": 2, "total_groups": 50}
    base.update(changes)
    if "max_staleness" in changes and "depth" not in changes:
        base["depth"] = changes["max_staleness"]
    return Settings(**base)


class Run:
    """A book with a clock, a learner and producers that ask anew each time."""

    def __init__(self, **changes: Any) -> None:
        self.g = GroupMachine(settings(**changes))
        self.now = 0.0
        self.requests = 0
        self.epoch = self.register(0)

    def register(self, step: int, ledger: Ledger | None = None, **changes: Any) -> int:
        who: dict[str, Any] = {"name": "l", "pid": step, "host": "h", "takeover": True}
        self.epoch = self.g.register(step=step, ledger=ledger or Ledger(), now=self.now, **{**who, **changes})
        return self.epoch

    def lease(self, version: int = 0, count: int = 1, name: str = "p") -> list[int]:
        self.requests += 1
        self.g.workers.see("producer", name, self.now)
        return [
            lease.group
            for lease in self.g.lease(
                name, engine_version=version, max_groups=count, request=self.requests, now=self.now
            )
        ]

    def finish(self, *numbers: int, version: int | None = None) -> None:
        for number in numbers:
            finish_group(self.g, number, now=self.now, version=version)

    def send(
        self,
        group: int,
        *indices: int,
        token: int | None = None,
        version: int = 0,
        checksum: int = 1,
        rewards: bool = True,
        digests: dict[int, str] | None = None,
        invalid: str = "",
        name: str = "p",
    ) -> Any:
        heads = tuple(SampleHead(index, 1, "stop", ((version, 1),)) for index in indices)
        token = self.g.table.groups[group].token if token is None else token
        head = Samples(
            name, group, token, heads, digests or {}, (), "", 1, rewards=dict.fromkeys(indices, 0.5) if rewards else {}
        )
        return self.g.samples(
            head, checksum=checksum, invalid=lambda: invalid, keep=lambda: Record(1, 0, 1, 1, checksum), now=self.now
        )

    def claim(self, step: int) -> list[int] | None:
        claimed = self.g.claim(epoch=self.epoch, step=step, version=step - 1, now=self.now)
        return None if claimed is None else list(claimed.batch.groups)

    def commit(self, step: int, digest: str = "") -> None:
        self.g.commit(epoch=self.epoch, step=step, version=step, digest=digest, now=self.now)

    def step(self, step: int, version: int | None = None) -> list[int]:
        """Lease, finish, claim and commit one batch."""
        at = step - 1 if version is None else version
        while self.g.table.indexes.counts[State.READY] < self.g.schedule.batch_size(step):
            got = self.lease(at)
            assert got, self.g.lease_blocked(at)
            self.finish(*got)
        batch = self.claim(step)
        assert batch is not None
        self.commit(step)
        return batch

    def state(self, number: int) -> str:
        group = self.g.table.groups.get(number)
        if group is not None:
            return State(group.state).name
        if number in self.g.table.archive:
            return self.g.table.archive.kind(number).partition(":")[0].upper()
        return "RETIRED" if number in self.g.table.retired else State(self.g.table.ended[number].state).name

    def reload(self) -> None:
        """Through the rows, as a restart of the service."""
        rows = [(change.key, change.value) for change in self.g.rows()]
        fresh = GroupMachine(self.g.settings, epoch=self.g.service_epoch + 1)
        fresh.load([(key, value) for key, value in rows if value is not None])
        fresh.note_start(self.now)
        fresh.check()
        assert ledger_counts(fresh.table) == ledger_counts(self.g.table)
        assert (
            fresh.table.indexes.due == self.g.table.indexes.due
            and fresh.table.indexes.ready == self.g.table.indexes.ready
        )
        self.g = fresh
