"""Transport `collective`: one broadcast per blob in a process group of its own.

The publisher hosts a TCPStore; every formation is a new process group under its own prefix (the generation), never
re-used. Steps of a generation:
1. every member sets `here/<rank>` and the publisher waits for all of them, at most a quarter of the deadline;
2. it writes the ranks that came (`group`); a member that is not among them leaves, the others build the group;
3. one broadcast of a uint8 tensor per blob (bucket, or encoded bucket of a hop), rank 0 sends. The next blob is staged
   while one is under way; a member has two buffers, so that it works on one blob while the next arrives.
Guarantees: a member that never comes costs a quarter of the deadline; one that dies or stops in the middle fails the
whole generation within half of it; the survivors get a new generation. Collectives run on separate threads: nothing
waits longer than the deadline even if the backend cannot be interrupted (such a thread ends with its operation, at most
half a deadline later; Gloo ends by its own limit, NCCL is aborted).
The address names the backend (`gloo://host:port`): a member without that backend gets another transport.
Gloo, NCCL and HCCL have no authentication; Gloo listens at the address of the host name (`GLOO_SOCKET_IFNAME` chooses
the interface): use it on an isolated network. The store listens only at `weightsync.collective_host`, on a free port.
This module imports torch; import it only when the transport is needed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.runtime.device import collective_backend
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Instruction, RoundReply
from weightsync.transports.base import TransportError, TransportUnusable, Version, blob_sizes
from weightsync.transports.process_groups import (
    Place,
    abort,
    dist,
    finish,
    group_maker,
    leave,
    listening_store,
)
from weightsync.transports.worker_thread import Worker

JOIN_SHARE = 0.25  # of the deadline: for members to appear
OPERATION_SHARE = 0.5  # of the deadline: for one broadcast; Gloo cannot be interrupted within it
REACH_SHARE = 0.2  # of the deadline: to connect to the store, which torch tries twice
END_S = 0.5  # a healthy group ends at once


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=max(value, 0.05))


class CollectiveOutbox:
    """Rank 0: hosts the store, forms groups, broadcasts. `backend` auto: that of this process's device."""

    def __init__(self, host: str, *, timeout_s: float, backend: str = "auto", device: str = "") -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._backend = collective_backend(backend)
        self._make_group = group_maker(self._backend)
        self._place = Place(self._backend, device=device)
        self._generation = 0  # the last one that was formed
        self._store: Any = None

    def open(self) -> str:
        """Start the store; `backend://host:port`. Raises `config.network` if this host lacks that address."""
        if self._store is None:
            timeout = _seconds(self._timeout_s)
            self._store = listening_store(self._host, timeout=timeout, where="weightsync.collective_host")
        return f"{self._backend}://{self._host}:{self._store.port}"

    def offer(self, version: Version) -> str:
        """Only `open`: members do not pull."""
        return self.open()

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None:
        """Form the generation and broadcast every blob. Raises TransportError."""
        self.open()
        if reply.generation <= self._generation:
            raise TransportError(f"generation {reply.generation} after {self._generation}: a group is used once")
        self._generation = reply.generation
        sending = _Sending(self._make_group, self._place, deadline_s)
        worker = Worker(f"generation-{reply.generation}")
        store = dist.PrefixStore(f"ws/{reply.generation}", self._store)
        ranks = sorted(reply.ranks.values())
        try:
            worker.run(lambda: sending.run(store, ranks, blobs), timeout_s=deadline_s)
        except RuntimeError as error:  # DistError and errors of the backends
            sending.abort()
            raise TransportError(f"generation {reply.generation}: {error}") from None
        except TransportError:
            sending.abort()
            raise
        finally:
            worker.close(sending.end, within_s=END_S)

    def close(self) -> None:
        """End the store; members of an open generation fail."""
        self._store = None


class _Sending:
    """One generation at rank 0. Its group is made, used and ended on one thread; `abort` may come from another."""

    def __init__(self, make_group: Any, place: Place, deadline_s: float) -> None:
        self._make_group = make_group
        self._place = place
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._group: Any = None

    def run(self, store: Any, ranks: list[int], blobs: Sequence[memoryview]) -> None:
        present = self._gather(store, ranks)
        store.set("group", ",".join(map(str, present)))
        if not present:
            raise TransportError("no member came to the group")
        timeout = _seconds(self._deadline_s * OPERATION_SHARE)
        self._group = self._make_group(dist.PrefixStore("pg", store), 0, len(present) + 1, timeout)
        under_way: Any = None
        for blob in filter(len, blobs):
            tensor = self._place.send(blob)
            if under_way is not None:
                self._finish(under_way)
            if time.monotonic() > self._deadline:
                raise TransportError(f"not sent within {self._deadline_s:g} s")
            failpoint("weightsync.send_blob")
            under_way = self._group.broadcast(tensor, 0)
        if under_way is not None:
            self._finish(under_way)

    def _finish(self, work: Any) -> None:
        finish(work, self._group, within_s=self._deadline_s * OPERATION_SHARE, on_device=self._place.staged)

    def _gather(self, store: Any, ranks: list[int]) -> list[int]:
        """The ranks that came in time."""
        until = time.monotonic() + self._deadline_s * JOIN_SHARE
        while True:
            present = [rank for rank in ranks if store.check([f"here/{rank}"])]
            if len(present) == len(ranks) or time.monotonic() > until:
                return present
            time.sleep(0.005)

    def abort(self) -> None:
        """Interrupt the running operation, if the backend can."""
        abort(self._group)

    def end(self) -> None:
        leave(self._group)
        self._group = None


class CollectiveInbox:
    """A member of one generation."""

    def __init__(self, instruction: Instruction, *, device: str = "") -> None:
        assert instruction.manifest is not None
        self._instruction = instruction
        self._sizes = blob_sizes(instruction.manifest, instruction.hops)
        self._deadline = time.monotonic() + instruction.deadline_s
        self._operation_s = instruction.deadline_s * OPERATION_SHARE
        self._device = device
        self._buffers = [bytearray(), bytearray()]  # a result of `read` is valid until the second next read
        self._place: Place | None = None
        self._group: Any = None
        self._failed = False
        self._worker: Worker | None = None

    def open(self) -> None:
        """Report at the store, wait for the list of ranks, build the group."""
        backend, _, place = self._instruction.address.rpartition("://")
        host, _, port = place.rpartition(":")
        try:
            make_group = group_maker(backend or "gloo")
            self._place = Place(backend or "gloo", device=self._device)
        except ConfigError as error:
            raise TransportUnusable(f"collective: {error.message}") from None
        self._worker = Worker(f"member-{self._instruction.rank}")
        self._do(f"generation {self._instruction.generation}", lambda: self._join(make_group, host, int(port)))

    def _join(self, make_group: Any, host: str, port: int) -> None:
        rank, timeout = self._instruction.rank, _seconds(self._operation_s)
        reach = _seconds(self._instruction.deadline_s * REACH_SHARE)
        whole = dist.TCPStore(host, port, None, False, timeout=reach)
        whole.set_timeout(timeout)
        store = dist.PrefixStore(f"ws/{self._instruction.generation}", whole)
        store.set(f"here/{rank}", "1")
        present = [int(text) for text in store.get("group").decode().split(",") if text]
        if rank not in present:
            raise TransportError(f"came too late to generation {self._instruction.generation}")
        self._group = make_group(dist.PrefixStore("pg", store), present.index(rank) + 1, len(present) + 1, timeout)

    def _do(self, what: str, work: Any) -> None:
        """Run it on the worker within the deadline; every failure is a TransportError and ends the group."""
        worker = self._worker
        if worker is None or self._failed:
            raise TransportError(f"{what}: the group is closed, or has failed")
        try:
            worker.run(work, timeout_s=self._deadline - time.monotonic())
        except (RuntimeError, ValueError) as error:  # DistError, errors of the backends; a bad address
            self._failed = True
            raise TransportError(f"{what}: {error}") from None
        except TransportError:
            self._failed = True
            raise

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        """Take part in the broadcast of blob `number`, directly into `into` if given."""
        size = self._sizes[number]
        if into is None and len(self._buffers[number % 2]) < size:
            self._buffers[number % 2] = bytearray(size)
        view = into if into is not None else memoryview(self._buffers[number % 2])[:size]
        if size:
            self._do(f"blob {number}", lambda: self._receive(view))
        return view

    def _receive(self, view: memoryview) -> None:
        assert self._place is not None
        group = self._group
        if group is None:
            raise TransportError("the group is closed")
        tensor = self._place.room(view)
        finish(group.broadcast(tensor, 0), group, within_s=self._operation_s, on_device=self._place.staged)
        self._place.fetch(tensor, view)

    def close(self) -> None:
        """Leave the group; a hanging operation ends by its own limit."""
        worker, self._worker = self._worker, None
        if worker is not None:
            if self._failed:
                abort(self._group)
            worker.close(self._leave, within_s=END_S)

    def _leave(self) -> None:
        leave(self._group)
        self._group = None
