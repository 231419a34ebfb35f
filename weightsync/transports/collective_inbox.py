"""A member's end of transport `collective`, and an engine's of `direct`: see `collective`. Imports torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from asyncrl.errors import ConfigError
from asyncrl.wire import Instruction
from weightsync.transports.base import TransportError, TransportUnusable, blob_sizes
from weightsync.transports.kept_groups import Choice, Group, Groups, Report, process_id
from weightsync.transports.process_groups import (
    OPERATION_SHARE,
    GroupMaker,
    Place,
    broadcast,
    finish,
    form,
    group_maker,
    lane_store,
    reach,
    seconds,
)

T = TypeVar("T")


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
        self._store: Any = None  # of the generation
        self._left = len(self._sizes)  # blobs to come
        self._failed = False

    def open(self) -> None:
        """Report at the store, wait for the choice of the group, build it if it is new."""
        backend = self._instruction.address.rpartition("://")[0]
        try:
            make_group = group_maker(backend or "gloo")
            self._place = Place(backend or "gloo", device=self._device)
        except ConfigError as error:
            raise TransportUnusable(f"collective: {error.message}") from None
        generation = self._instruction.generation
        self._group = Group(str(generation), address=self._instruction.address)
        choice = self._do(f"generation {generation}", self._meet)
        self._groups.keep_only(choice.held, address=self._instruction.address)
        if choice.built:
            kept = self._groups.take(choice.name)
            self._group.end()
            self._group = kept
            if kept is None:
                raise TransportError(f"group {choice.name} is gone")
            return
        self._add_lanes(choice)
        for number in range(choice.senders):  # in this order everywhere
            self._do(f"generation {generation}", partial(self._build, choice, make_group, number), lane=number)

    def _add_lanes(self, choice: Choice) -> None:
        group = self._group
        if group is None:
            raise TransportError("the group is closed")
        group.senders = choice.senders
        group.further = [Group(f"{group.name}-{number}") for number in range(1, choice.senders)]

    def _meet(self) -> Choice:
        generation = self._instruction.generation
        store = self._store = reach(self._instruction.address, generation, deadline_s=self._instruction.deadline_s)
        report = Report(self._groups.names(self._instruction.address), self._processes)
        store.set(f"here/{self._id}", msgspec.json.encode(report))
        choice = msgspec.json.decode(store.get("group"), type=Choice)
        if self._id not in choice.ranks:
            raise TransportError(f"came too late to generation {generation}")
        return choice

    def _build(self, choice: Choice, make_group: GroupMaker, number: int) -> None:
        if self._group is None:
            raise TransportError("the group is closed")
        group = self._group.lane(number)
        rank, size = choice.ranks.index(self._id) + 1, len(choice.ranks) + 1
        group.store = lane_store(self._store, number)
        group.group = form(make_group, group.store, rank, size, seconds(self._operation_s))

    def _do(self, what: str, work: Callable[[], T], *, lane: int = 0) -> T:
        """Run it on the thread of a lane within the deadline."""
        return self._await(what, self._submit(work, lane))

    def _submit(self, work: Callable[[], T], bucket: int) -> Future[T]:
        if self._group is None or self._failed:
            raise TransportError("the group is closed, or has failed")
        return self._group.lane(bucket).worker.submit(work)

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
            self._do(f"blob {number}", lambda: self._receive(view))  # one sender
        self._left -= 1
        return view

    def _receive(self, view: memoryview) -> None:
        assert self._place is not None
        tensor = self._place.room(view)
        self._receive_into(tensor)
        self._place.fetch(tensor, view)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Instead of `read`: every blob, uint8 on the device of the backend, while the next one of each sender arrives.
        Valid until the next, which may lie in the same memory; the reader's work on the device must have ended by then.
        """
        assert self._place is not None and self._group is not None
        count, ahead = len(self._sizes), self._group.senders
        made: dict[str, Any] = {"dtype": torch.uint8, "device": self._place.device}
        rooms = [torch.empty(max(self._sizes), **made) for _ in range(min(ahead + 1, count))]

        def begin(number: int) -> tuple[torch.Tensor, Future[None]]:
            room = rooms[number % len(rooms)][: self._sizes[number]]
            return room, self._submit(lambda: self._receive_into(room, number), number)

        under_way = deque(begin(number) for number in range(min(ahead, count)))
        for number in range(count):
            if number + ahead < count:
                under_way.append(begin(number + ahead))
            blob, arriving = under_way.popleft()
            self._await(f"blob {number}", arriving)
            self._left -= 1
            yield blob

    def _receive_into(self, tensor: torch.Tensor, number: int = 0) -> None:
        group = self._group.lane(number) if self._group is not None else None
        if group is None or group.group is None or self._place is None:
            raise TransportError("the group is closed")
        if tensor.numel():
            work = broadcast(group.group, tensor, within_s=self._operation_s)
            finish(work, group.group, within_s=self._operation_s, on_device=self._place.staged)

    def close(self) -> None:
        """Keep the group after the last blob; else leave it: a hanging operation ends by its own limit."""
        group, self._group, self._store = self._group, None, None
        if group is None:
            return
        if self._failed or self._left or group.group is None:
            group.end(failed=self._failed)
        else:
            self._groups.give(group)
