"""Packs the tensors of a version, on their device, into the buckets of its plan. Imports torch.

Tensors that already lie in memory as in their bucket are sent from there, others are copied to one of two rooms of the
size of a bucket. Guarantees:
1. buckets are sent in order, whole, each tensor at its place of the plan;
2. a room is filled again only when its bucket has been sent;
3. an iterator of tensors that uses their memory again calls `settle` before: afterwards nothing refers to it;
4. of several senders each packs its own buckets: sender s of n those with number s, s + n, s + 2 n and so on.

Example: a gathering puts the tensors of bucket 3 one after the other: it is sent as it lies, and `settle` waits for it
while bucket 4 is gathered elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.wire import Tensor as Place
from weightsync.plan.buckets import Plan


class Packing:
    """One version. `begin` sends a bucket, `wait` returns when at most that many buckets are under way."""

    def __init__(
        self,
        plan: Plan,
        *,
        begin: Callable[[Tensor], None],
        wait: Callable[[int], None],
        sender: int = 0,
        senders: int = 1,
    ) -> None:
        self._sizes = plan.bucket_bytes
        self._tensors = tuple(one for one in plan.tensors if one.bucket % senders == sender)
        self._senders = senders
        self._begin, self._wait = begin, wait
        self._next = 0  # of the tensors
        self._rooms: list[Tensor | None] = [None, None]
        self._room: Tensor | None = None  # of the incomplete bucket, once something was copied
        self._lent: list[tuple[Place, Tensor]] = []  # of the incomplete bucket: where they came
        self._lent_under_way = False

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor; send its bucket if it is the last one. Raises ValueError for another one."""
        place = self._tensors[self._next] if self._next < len(self._tensors) else None
        if place is None or (place.name, place.nbytes) != (name, tensor.nbytes):
            raise ValueError(f"tensor {name} of {tensor.nbytes} bytes where the plan has {place}")
        self._next += 1
        self._lent.append((place, tensor.detach().contiguous().view(-1).view(torch.uint8)))
        if self._room is not None or not self._lies_in_place():
            self._copy()
        if self._next == len(self._tensors) or self._tensors[self._next].bucket != place.bucket:
            self._send(place.bucket)

    def settle(self) -> None:
        """Copy or send what lies in memory of the iterator."""
        self._copy()
        if self._lent_under_way:
            self._wait(0)
            self._lent_under_way = False

    def end(self) -> None:
        """Wait for all buckets. Raises ValueError if tensors are missing."""
        if self._next < len(self._tensors):
            raise ValueError(f"the tensors end before {self._tensors[self._next].name}")
        self._wait(0)

    def _lies_in_place(self) -> bool:
        """Whether the newest tensor lies behind the first one of its bucket as in the plan."""
        (first, start), (place, tensor) = self._lent[0], self._lent[-1]
        if not tensor.numel():
            return True
        same = tensor.untyped_storage().data_ptr() == start.untyped_storage().data_ptr()
        return same and not first.offset and tensor.data_ptr() - start.data_ptr() == place.offset

    def _copy(self) -> None:
        if not self._lent:
            return
        number = self._lent[0][0].bucket
        if self._room is None:
            self._room = self._take_room(number, self._lent[0][1].device)
        for place, tensor in self._lent:
            self._room[place.offset : place.offset + place.nbytes].copy_(tensor)
        self._lent.clear()

    def _take_room(self, number: int, device: torch.device) -> Tensor:
        self._wait(1)  # the bucket two before lies there
        which = number // self._senders % 2
        room = self._rooms[which]
        if room is None:
            room = self._rooms[which] = torch.empty(max(self._sizes), dtype=torch.uint8, device=device)
        return room[: self._sizes[number]]

    def _send(self, number: int) -> None:
        if self._room is not None:
            self._begin(self._room)
        else:
            start = self._lent[0][1]
            self._begin(start.as_strided((self._sizes[number],), (1,)))
            self._lent_under_way = True
        self._room = None
        self._lent.clear()
