"""Transport `collective`: one broadcast per blob in a process group of the publisher and the members.

The publisher hosts a TCPStore, in which every formation has its own prefix (the generation). Steps of a generation:
1. every member sets `here/<rank>` and the publisher waits for all of them, at most a quarter of the deadline;
2. it writes which group they use (`group`): one of an earlier generation if exactly these members still hold it, else a
   new one, which they build (`kept_groups`). A member that came too late leaves;
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch

from asyncrl.errors import ConfigError
from asyncrl.runtime.device import collective_backend
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Instruction, RoundReply
from weightsync.transports.base import TransportError, TransportUnusable, Version, blob_sizes
from weightsync.transports.kept_groups import Choice, Group, Groups, Report, come, process_id
from weightsync.transports.process_groups import Place, broadcast, dist, finish, form, group_maker, listening_store

T = TypeVar("T")
JOIN_SHARE = 0.25  # of the deadline: for members to appear
OPERATION_SHARE = 0.5  # of the deadline: for one broadcast; Gloo cannot be interrupted within it
REACH_SHARE = 0.2  # of the deadline: to connect to the store, which torch tries twice


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=max(value, 0.05))


class CollectiveOutbox:
    """Rank 0: hosts the store, forms groups, broadcasts. `backend` auto: that of this process's device. `formed` counts
    the groups that were built."""

    def __init__(self, host: str, *, timeout_s: float, backend: str = "auto", device: str = "") -> None:
        self.formed = 0
        self._host = host
        self._timeout_s = timeout_s
        self._backend = collective_backend(backend)
        self._make_group = group_maker(self._backend)
        self._place = Place(self._backend, device=device)
        self._generation = 0  # the last one
        self._groups = Groups()
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
        with self.form(reply, deadline_s=deadline_s) as sending:
            sending.run(blobs)

    @contextmanager
    def form(self, reply: RoundReply, *, deadline_s: float) -> Iterator[Sending]:
        """A generation with its group, for everything that it carries. Raises TransportError, also for errors of the
        block's own operations; then the group is left."""
        sending = Sending(self._groups, self._place, str(reply.generation), deadline_s)
        whole = False
        try:
            store = self._begin(reply)
            choice = sending.meet(store, sorted(reply.ranks.values()))
            if not choice.built:
                self.formed += 1
                sending.build(dist.PrefixStore("pg", store), len(choice.ranks), self._make_group)
            yield sending
            sending.settle()
            whole = True
        except RuntimeError as error:  # DistError and errors of the backends
            raise TransportError(f"generation {reply.generation}: {error}") from None
        finally:
            sending.end(whole=whole)

    def decline(self, reply: RoundReply) -> None:
        """Form no group: members that come to this generation leave at once. Raises TransportError."""
        self._begin(reply).set("group", msgspec.json.encode(Choice("", (), built=False, held=())))

    def _begin(self, reply: RoundReply) -> Any:
        """The store of a new generation."""
        self.open()
        if reply.generation <= self._generation:
            raise TransportError(f"generation {reply.generation} after {self._generation}: each is sent once")
        self._generation = reply.generation
        return dist.PrefixStore(f"ws/{reply.generation}", self._store)

    def close(self) -> None:
        """End the groups and the store; members of an open generation fail."""
        self._groups.close()
        self._store = None


class Sending:
    """One generation at rank 0."""

    def __init__(self, groups: Groups, place: Place, name: str, deadline_s: float) -> None:
        self._groups = groups
        self._place = place
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._operation_s = deadline_s * OPERATION_SHARE
        self._group = Group(name)  # not built; replaced by a kept one
        self._pending: deque[Future[None]] = deque()

    def _do(self, work: Callable[[], T]) -> T:
        return self._group.worker.run(work, timeout_s=self._deadline - time.monotonic())

    def meet(self, store: Any, ranks: list[int]) -> Choice:
        """Wait for the members and choose the group."""
        choice = self._do(lambda: self._gather(store, ranks))
        if choice.built:
            kept = self._groups.take(choice.name)
            if kept is None:
                raise TransportError(f"group {choice.name} is gone")
            self._group.end()
            self._group = kept
        return choice

    def _gather(self, store: Any, ranks: list[int]) -> Choice:
        until = time.monotonic() + self._deadline_s * JOIN_SHARE
        while True:
            try:
                present = come(store, ranks)
            except ValueError as error:
                raise TransportError(f"a report of a member cannot be read: {error}") from None
            if present.keys() >= set(ranks) or time.monotonic() > until:
                break
            time.sleep(0.005)
        choice = self._groups.choose(self._group.name, present)
        store.set("group", msgspec.json.encode(choice))
        if not present:
            raise TransportError("no member came to the group")
        return choice

    def build(self, store: Any, others: int, make_group: Any) -> None:
        """Build the group with its members."""

        def build() -> None:
            group.store, group.others = store, others
            group.group = form(make_group, store, 0, others + 1, _seconds(self._operation_s))

        group = self._group
        self._do(build)

    def begin(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor of bytes, which must not change until `settle`; two are under way at a time."""
        self.settle(1)
        mark = self._place.mark()
        self._pending.append(self._group.worker.submit(lambda: self._carry(tensor, mark)))

    def settle(self, at_most: int = 0) -> None:
        """Wait until at most this many tensors of `begin` are under way. Raises TransportError, RuntimeError."""
        while len(self._pending) > at_most:
            try:
                self._pending.popleft().result(max(self._deadline - time.monotonic(), 0.0))
            except FutureTimeout:
                raise TransportError(f"not sent within {self._deadline_s:g} s") from None

    def _carry(self, tensor: torch.Tensor, mark: Any) -> None:
        if tensor.numel():
            failpoint("weightsync.send_tensor")
            self._finish(broadcast(self._group.group, self._place.carry(tensor, mark), within_s=self._operation_s))

    def run(self, blobs: Sequence[memoryview]) -> None:
        """Broadcast the blobs from host memory."""
        self._do(lambda: self._broadcast(blobs))

    def _broadcast(self, blobs: Sequence[memoryview]) -> None:
        under_way: Any = None
        for blob in filter(len, blobs):
            tensor = self._place.send(blob)
            if under_way is not None:
                self._finish(under_way)
            if time.monotonic() > self._deadline:
                raise TransportError(f"not sent within {self._deadline_s:g} s")
            failpoint("weightsync.send_blob")
            under_way = broadcast(self._group.group, tensor, within_s=self._operation_s)
        if under_way is not None:
            self._finish(under_way)

    def _finish(self, work: Any) -> None:
        finish(work, self._group.group, within_s=self._operation_s, on_device=self._place.staged)

    def end(self, *, whole: bool) -> None:
        """Keep the group after a whole transfer; else interrupt and leave it."""
        for one in self._pending:
            one.cancel()
        self._pending.clear()  # an error in one, its traceback and this object would hold each other
        if whole:
            self._groups.give(self._group)
        else:
            self._group.end(failed=True)


class CollectiveInbox:
    """A member of one generation, or with `process` (number, of how many) one of its processes. `groups` keeps the
    group for later ones."""

    def __init__(
        self,
        instruction: Instruction,
        *,
        device: str = "",
        groups: Groups | None = None,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        assert instruction.manifest is not None
        self._id = process_id(instruction.rank, process[0])
        self._processes = process[1]
        self._instruction = instruction
        self._sizes = blob_sizes(instruction.manifest, instruction.hops)
        self._deadline = time.monotonic() + instruction.deadline_s
        self._operation_s = instruction.deadline_s * OPERATION_SHARE
        self._device = device
        self._buffers = [bytearray(), bytearray()]  # a result of `read` is valid until the second next read
        self._place: Place | None = None
        self._groups = groups if groups is not None else Groups()
        self._group: Group | None = None
        self._left = len(self._sizes)  # blobs to come
        self._failed = False

    def open(self) -> None:
        """Report at the store, wait for the choice of the group, build it if it is new."""
        backend, _, place = self._instruction.address.rpartition("://")
        host, _, port = place.rpartition(":")
        try:
            make_group = group_maker(backend or "gloo")
            self._place = Place(backend or "gloo", device=self._device)
        except ConfigError as error:
            raise TransportUnusable(f"collective: {error.message}") from None
        generation = self._instruction.generation
        self._group = Group(str(generation), address=self._instruction.address)
        choice = self._do(f"generation {generation}", lambda: self._meet(host, int(port)))
        self._groups.keep_only(choice.held, address=self._instruction.address)
        if choice.built:
            kept = self._groups.take(choice.name)
            self._group.end()
            self._group = kept
            if kept is None:
                raise TransportError(f"group {choice.name} is gone")
            return
        self._do(f"generation {generation}", lambda: self._build(choice, make_group))

    def _meet(self, host: str, port: int) -> Choice:
        assert self._group is not None
        generation = self._instruction.generation
        store = dist.TCPStore(host, port, None, False, timeout=_seconds(self._instruction.deadline_s * REACH_SHARE))
        store.set_timeout(_seconds(self._operation_s))
        self._group.store = dist.PrefixStore(f"ws/{generation}", store)
        report = Report(self._groups.names(self._instruction.address), self._processes)
        self._group.store.set(f"here/{self._id}", msgspec.json.encode(report))
        choice = msgspec.json.decode(self._group.store.get("group"), type=Choice)
        if self._id not in choice.ranks:
            raise TransportError(f"came too late to generation {generation}")
        return choice

    def _build(self, choice: Choice, make_group: Any) -> None:
        group = self._group
        if group is None:
            raise TransportError("the group is closed")
        rank, size = choice.ranks.index(self._id) + 1, len(choice.ranks) + 1
        group.store = dist.PrefixStore("pg", group.store)
        group.group = form(make_group, group.store, rank, size, _seconds(self._operation_s))

    def _do(self, what: str, work: Callable[[], T]) -> T:
        """Run it on the group's thread within the deadline."""
        if self._group is None or self._failed:
            raise TransportError(f"{what}: the group is closed, or has failed")
        return self._await(what, self._group.worker.submit(work))

    def _await(self, what: str, work: Future[T]) -> T:
        """The result within the deadline; every failure is a TransportError and ends the group."""
        try:
            return work.result(max(self._deadline - time.monotonic(), 0.0))
        except FutureTimeout:
            self._failed = True
            raise TransportError(f"{what}: not done within {self._instruction.deadline_s:.3g} s") from None
        except (RuntimeError, ValueError) as error:  # DistError, the backends'; a bad address
            self._failed = True
            raise TransportError(f"{what}: {error}") from None
        except TransportError:
            self._failed = True
            raise
        finally:
            del work  # else an error, its traceback and this frame hold each other, and a process group with them

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        """Take part in the broadcast of blob `number`, directly into `into` if given."""
        size = self._sizes[number]
        if into is None and len(self._buffers[number % 2]) < size:
            self._buffers[number % 2] = bytearray(size)
        view = into if into is not None else memoryview(self._buffers[number % 2])[:size]
        if size:
            self._do(f"blob {number}", lambda: self._receive(view))
        self._left -= 1
        return view

    def _receive(self, view: memoryview) -> None:
        assert self._place is not None
        tensor = self._place.room(view)
        self._receive_into(tensor)
        self._place.fetch(tensor, view)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Instead of `read`: every blob, uint8 on the device of the backend, while the next one arrives. Valid until
        the next; the reader's work on the device must have ended by then."""
        assert self._place is not None
        rooms = [torch.empty(max(self._sizes), dtype=torch.uint8, device=self._place.device) for _ in range(2)]
        blobs = [rooms[number % 2][:size] for number, size in enumerate(self._sizes)]
        under_way = deque([self._begin(blobs[0])])  # not in a variable: see `_await`
        for number, blob in enumerate(blobs):
            if number + 1 < len(blobs):
                under_way.append(self._begin(blobs[number + 1]))
            self._await(f"blob {number}", under_way.popleft())
            self._left -= 1
            yield blob

    def _begin(self, into: torch.Tensor) -> Future[None]:
        if self._group is None or self._failed:
            raise TransportError("the group is closed, or has failed")
        return self._group.worker.submit(lambda: self._receive_into(into))

    def _receive_into(self, tensor: torch.Tensor) -> None:
        group = self._group
        if group is None or group.group is None or self._place is None:
            raise TransportError("the group is closed")
        if tensor.numel():
            work = broadcast(group.group, tensor, within_s=self._operation_s)
            finish(work, group.group, within_s=self._operation_s, on_device=self._place.staged)

    def close(self) -> None:
        """Keep the group after the last blob; else leave it: a hanging operation ends by its own limit."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._failed or self._left or group.group is None:
            group.end(failed=self._failed)
        else:
            self._groups.give(group)
