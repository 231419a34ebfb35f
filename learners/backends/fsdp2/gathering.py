"""Weights of several ranks, whole on rank 0: each rank sends its rows of many tensors at once, to nobody else.

FSDP's own way is an all-gather by layer, which gives every rank what
only rank 0 needs, in the dtype of compute. Guarantees:
1. the bytes are those of `Sharded.whole` cast to the dtype that is sent: cast to that of compute first;
2. tensors come in the order of the units; at most two parts of `PART_BYTES` (or one tensor, if larger) are whole at a
   time, and the rows of a third one are on their way;
3. with `settle` a part stays as it is until that was called, which happens before its memory is used again;
4. collective: every rank exhausts it, also those that send nothing (other copies of HSDP).
Only tensors that are split by rows over one dimension of a mesh can leave so (`fits`): no tensor or expert places, no
parameters in host memory beside an accelerator, no adapters.

Example: ranks 0 and 1, a weight `[5, 2]`: rank 0 holds rows 0-2, rank 1 rows 3-4; a part of that weight alone is 6
numbers of each, as rank 1 fills up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

PART_BYTES = 16 << 20


class Row(NamedTuple):
    """One tensor of a part: `own` is this rank's share of it."""

    name: str
    shape: tuple[int, ...]
    own: Tensor

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return torch.Size(self.shape).numel()


def fits(parameters: Sequence[Any], *, device: str) -> bool:
    """Whether all of them are split by rows over one and the same group of ranks, on this kind of device."""
    groups = set()
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or parameter.to_local().device.type != device:
            return False
        split = [place for place in parameter.placements if not place.is_replicate()]
        if split != [Shard(0)] or parameter.placements[-1] != Shard(0):
            return False
        groups.add(parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1))
    return len(groups) == 1


def share_rows(total: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """First row of this rank's share and the one after its last, as `torch.chunk` cuts."""
    each = -(-total // ranks)
    return min(rank * each, total), min((rank + 1) * each, total)


def group_rows(rows: Sequence[Row], *, itemsize: int, part_bytes: int = PART_BYTES) -> list[list[Row]]:
    """Neighbours together up to `part_bytes`; a larger tensor alone."""
    parts: list[list[Row]] = []
    room = 0
    for row in rows:
        size = row.numel * itemsize
        if size > room or not parts:
            parts.append([])
            room = part_bytes
        parts[-1].append(row)
        room -= size
    return parts


class Gathering:
    """One pass over the weights. `named`: parameters in the order in which they leave."""

    def __init__(
        self, named: Sequence[tuple[str, Any]], *, compute: torch.dtype, sent: torch.dtype, part_bytes: int = PART_BYTES
    ) -> None:
        mesh = named[0][1].device_mesh
        self._group = mesh.get_group(mesh.ndim - 1)
        self._ranks = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        self._lead = dist.get_rank() == 0
        self._target = dist.get_global_rank(self._group, 0)  # of another copy of the model: gathers for nobody
        self._asked = self._target == 0
        self._compute, self._sent = compute, sent
        rows = [Row(name, tuple(parameter.shape), parameter.to_local().detach()) for name, parameter in named]
        self._parts = group_rows(rows, itemsize=sent.itemsize, part_bytes=part_bytes)

    @torch.no_grad()
    def run(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each, on rank 0; the others get nothing."""
        if not self._asked:
            return
        settle = settle or _nothing
        wholes = [self._room(), self._room()] if self._lead else []
        arriving = self._room_of_shares()
        under_way = self._begin(0, arriving)
        try:
            for number, part in enumerate(self._parts):
                under_way.wait()  # bounded: the timeout of the group
                made = self._assemble(part, arriving, wholes[number % 2]) if self._lead else []
                settle()  # of the part before: its memory is the next one's
                if number + 1 < len(self._parts):
                    under_way = self._begin(number + 1, arriving)
                yield from made
        finally:
            settle()
            under_way.wait()  # bounded: the timeout of the group; a second wait returns at once

    def _shared(self, part: Sequence[Row]) -> int:
        """Elements that every rank sends of a part: rank 0 has the most rows of each tensor."""
        return sum(-(-row.shape[0] // self._ranks) * row.numel // row.shape[0] for row in part if row.numel)

    def _room(self) -> Tensor:
        largest = max(sum(row.numel for row in part) for part in self._parts)
        return torch.empty(largest, dtype=self._sent, device=self._parts[0][0].own.device)

    def _room_of_shares(self) -> Tensor:
        """`[ranks, share]` on rank 0; `[1, share]`, what is sent, on the others."""
        largest = max(map(self._shared, self._parts))
        ranks = self._ranks if self._lead else 1
        return torch.zeros(ranks, largest, dtype=self._sent, device=self._parts[0][0].own.device)

    def _begin(self, number: int, room: Tensor) -> Any:
        """Start to gather a part: `[share]` of each rank into a row of `room` on rank 0."""
        part = self._parts[number]
        share = self._shared(part)
        at, own = 0, room[0, :share]
        for row in part:
            count = row.own.numel()
            own[at : at + count].copy_(row.own.reshape(-1).to(self._compute))
            at += count
        if self._ranks == 1:
            return _Done()
        into = [own if rank == 0 else room[rank, :share] for rank in range(self._ranks)] if self._lead else None
        return dist.gather(own, into, dst=self._target, group=self._group, async_op=True)

    def _assemble(self, part: Sequence[Row], shares: Tensor, whole: Tensor) -> list[tuple[str, Tensor]]:
        """The whole tensors of a part, one behind the other in `whole`."""
        made = []
        at = 0
        ends = [0] * self._ranks  # how far each rank's share has been read
        for row in part:
            tensor = whole[at : at + row.numel].view(row.shape)
            at += row.numel
            made.append((row.name, tensor))
            width = row.numel // row.shape[0] if row.numel else 0
            for rank in range(self._ranks):
                first, end = share_rows(row.shape[0], rank=rank, ranks=self._ranks)
                count = (end - first) * width
                tensor[first:end].view(-1).copy_(shares[rank, ends[rank] : ends[rank] + count])
                ends[rank] += count
        return made


class _Done:
    """A gather of one rank."""

    def wait(self) -> None:
        """Nothing to wait for."""


def _nothing() -> None:
    """Nobody was lent anything."""
