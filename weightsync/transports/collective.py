"""Transport `collective`: one broadcast per blob in a process group of the publisher and the members. This is the
publisher's end, `collective_inbox` a member's.

The publisher hosts a TCPStore, in which every formation has its own prefix (the generation). Steps of a generation:
1. every member sets `here/<rank>` and the publisher waits for all of them, at most a quarter of the deadline;
2. it writes which group they use (`group`): one of an earlier generation if exactly these members still hold it, else a
   new one, which they build (`kept_groups`). A member that came too late leaves;
3. one broadcast of a uint8 tensor per blob (bucket, or encoded bucket of a hop), rank 0 sends. The next blob is staged
   while one is under way; a member has two buffers, so that it works on one blob while the next arrives. With several
   senders (transport `direct`) the group is a process group for each, and buckets take turns in them.
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
from typing import Any, TypeVar

import msgspec
import torch

from asyncrl.runtime.device import collective_backend
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import RoundReply
from weightsync.transports.base import TransportError, Version
from weightsync.transports.kept_groups import Choice, Group, Groups, come
from weightsync.transports.process_groups import (
    OPERATION_SHARE,
    GroupMaker,
    Place,
    broadcast,
    dist,
    finish,
    form,
    group_maker,
    lane_store,
    listening_store,
    seconds,
)

T = TypeVar("T")
JOIN_SHARE = 0.25  # of the deadline: for members to appear


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
            timeout = seconds(self._timeout_s)
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
        sending = self.meet(reply, deadline_s=deadline_s)
        whole = False
        try:
            sending.build()
            yield sending
            sending.settle()
            whole = True
        except RuntimeError as error:  # DistError and errors of the backends
            raise TransportError(f"generation {reply.generation}: {error}") from None
        finally:
            sending.end(whole=whole)

    def meet(self, reply: RoundReply, *, deadline_s: float, senders: int = 1) -> Sending:
        """A generation whose members came and know their group. Raises TransportError."""
        sending = Sending(self._groups, self._place, Group(str(reply.generation), senders=senders), deadline_s)
        try:
            sending.meet(self._begin(reply), sorted(reply.ranks.values()), self._make_group)
        except RuntimeError as error:
            sending.end(whole=False)
            raise TransportError(f"generation {reply.generation}: {error}") from None
        except TransportError:
            sending.end(whole=False)
            raise
        self.formed += not sending.choice.built
        return sending

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
    """One generation at a sender: rank 0, which meets the members, or another one in its `lane`, which `join`s."""

    choice: Choice
    _store: Any
    _make_group: Any

    def __init__(self, groups: Groups, place: Place, group: Group, deadline_s: float, *, lane: int = 0) -> None:
        self._groups = groups
        self._place = place
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._operation_s = deadline_s * OPERATION_SHARE
        self._group = group  # not built; replaced by a kept one
        self.lane = lane
        self._pending: deque[Future[None]] = deque()

    def _do(self, work: Callable[[], T]) -> T:
        return self._group.worker.run(work, timeout_s=self._deadline - time.monotonic())

    def meet(self, store: Any, ranks: list[int], make_group: GroupMaker) -> None:
        """Wait for the members and choose the group."""
        self.join(store, self._do(lambda: self._gather(store, ranks)), make_group)

    def join(self, store: Any, choice: Choice, make_group: GroupMaker) -> None:
        """Take part in the group that was chosen."""
        self.choice, self._store, self._make_group = choice, store, make_group
        if choice.built:
            kept = self._groups.take(choice.name)
            if kept is None:
                raise TransportError(f"group {choice.name} is gone")
            self._group.end()
            self._group = kept

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
        choice = self._groups.choose(self._group.name, present, self._group.senders)
        store.set("group", msgspec.json.encode(choice))
        if not present:
            raise TransportError("no member came to the group")
        return choice

    def build(self) -> None:
        """Build this sender's lane with the members, unless it is kept."""

        def build() -> None:
            group.store, group.others = lane_store(self._store, self.lane), others
            group.group = form(self._make_group, group.store, 0, others + 1, seconds(self._operation_s))

        group, others = self._group, len(self.choice.ranks)
        if not self.choice.built:
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
