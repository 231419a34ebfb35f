"""Publishing without a gathering: every rank writes its rows into the slot of the version, in shared memory.

Rank 0 takes the slot and offers it when all have written. This needs a copy of the model on the ranks of one host, and
a back-end that knows its rows (`own_rows`); else the weights are gathered on rank 0 (`iter_hf_weights`). The bytes and
digests are the same. All methods are collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.host_facts import kernel_id
from learners.gang.gang import Gang
from learners.rank_zero import Services
from weightsync.copy_digest import cores
from weightsync.plan.buckets import Plan, TensorSpec, bucket_starts, plan_buckets
from weightsync.row_writing import Written, join_written, write_rows
from weightsync.staging import Fill, Slot, Staging
from weightsync.transports.base import TransportError
from weightsync.transports.shared_memory import Maps

NO_SLOT = Path()  # rank 0 could not take one: it says why, and ends


class NotSeen(Exception):
    """A rank does not see the slot."""


class RowWeights:
    def __init__(self, config: Config, *, gang: Gang, backend: Any, services: Services | None) -> None:
        self._bucket_bytes = config.weightsync.bucket_bytes
        self._gang = gang
        self._backend = backend
        self._services = services
        self._maps = Maps(writable=True)
        self._writers = -1  # ranks that write; -1: unknown, 0: the weights are gathered
        self._plan: Plan | None = None

    def publish(self, version: int) -> bool:
        """Publish a version. False: nothing is published, the weights have to be gathered."""
        services = self._services
        return self._write_slot(None if services is None else partial(services.publish, version))

    def stage(self) -> bool:
        """The same for the announced version of transport `direct`."""
        services = self._services
        return self._write_slot(None if services is None else partial(services.publisher.stage_direct, services.plan))

    def plan(self) -> Plan:
        """Return the plan of the published weights, which all ranks need."""
        if self._plan is None:
            specs = [TensorSpec(*spec) for spec in self._backend.weight_specs()]
            self._plan = plan_buckets(specs, bucket_bytes=self._bucket_bytes)
        return self._plan

    def _write_slot(self, offer: Callable[[Fill], object] | None) -> bool:
        """Write all rows into a slot. `offer` (rank 0) calls its argument and offers the version."""
        rows = self._find_rows()
        if rows is None:
            return False
        if self._services is None or offer is None:
            path = Path(os.fsdecode(self._gang.share(None)))
            return path == NO_SLOT or self._all_written(self._gang.gather(self._write(rows, path)))
        opened = list[Slot]()
        try:
            offer(partial(self._fill, rows, self._services.plan, opened))
        except NotSeen:
            print("learner: ranks do not share memory: their weights are gathered", flush=True)
        finally:
            if not opened:  # the other ranks wait for it
                self._gang.share(b"")
        return self._writers > 0

    def _fill(self, rows: Any, plan: Plan, opened: list[Slot], staging: Staging) -> tuple[Slot, tuple[str, ...]]:
        """Fill a slot with the rows of all ranks (`weightsync.staging.Fill`)."""
        slot = staging.take(plan)
        opened.append(slot)
        self._gang.share(os.fsencode(slot.path))
        parts = self._gang.gather(self._write(rows, slot.path, slot.view))
        if not self._all_written(parts):
            raise NotSeen
        digests = join_written(plan, slot.view, [msgspec.msgpack.decode(part, type=Written) for part in parts])
        staging.complete(slot)
        return slot, digests

    def _find_rows(self) -> Any:
        """Return the rows of this rank; None if they have to be gathered."""
        find = getattr(self._backend, "own_rows", None)
        rows = find() if find is not None and self._writers else None
        if rows is not None and self._writers < 0:
            said = self._gang.gather(f"{rows.writes:d}{kernel_id()}".encode())
            hosts = [one for one in said if one.startswith(b"1")]
            self._writers = len(hosts) if set(hosts) == {hosts[0]} != {b"1"} else 0
        return rows if self._writers > 0 else None

    def _write(self, rows: Any, path: Path, view: memoryview | None = None) -> bytes:
        """Return what this rank wrote, in msgpack; empty if it does not see the slot."""
        if not rows.writes:
            return msgspec.msgpack.encode(Written(0, b"", b""))
        plan = self.plan()
        try:
            view = view or self._maps.view(path, bucket_starts(plan.bucket_bytes)[1])
        except TransportError:
            return b""
        failpoint("learner.writing_rows")
        return msgspec.msgpack.encode(write_rows(plan, view, rows.run, threads=cores(self._writers)))

    def _all_written(self, parts: list[bytes]) -> bool:
        """Whether every rank wrote its rows; if not, the weights are gathered from now on."""
        if not all(parts):
            self._writers = 0
        return self._writers > 0
