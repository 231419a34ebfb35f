"""Gathers the weights of several ranks on rank 0: each rank sends its rows of many tensors at once. For transport
`direct` parts are buckets and are gathered by turns on the ranks that send them (`Turns`).

FSDP's own all-gather by layer gives every rank what only rank 0 needs, in the compute dtype.

Guarantees:
1. the bytes equal those of `Sharded.whole` cast to the published dtype;
2. tensors come in the order of the units; at most two parts of `PART_BYTES` (or one larger tensor) are whole at a time,
   and the rows of a third are in transfer;
3. with `settle`, a part stays unchanged until `settle` was called, before the memory of two parts before it on the
   same rank is used again;
4. collective: every rank exhausts it, also those that send nothing (other copies of HSDP).

Only tensors split by rows over one mesh dimension are supported (`fits`): no tensor or expert places, no parameters in
host memory with an accelerator, no adapters.
Example: ranks 0 and 1, a weight `[5, 2]`: rank 0 holds rows 0-2, rank 1 rows 3-4; each sends 6 numbers, rank 1 with
padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()


def fits(parameters: Sequence[Any], *, device: str) -> bool:
    """Whether all parameters are split by rows over the same group of ranks, on this kind of device."""
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
    """Return the first row of this rank's share and the row after its last, as `torch.chunk` splits."""
    each = -(-total // ranks)
    return min(rank * each, total), min((rank + 1) * each, total)


class Turns(NamedTuple):
    """Part p is gathered on sender p modulo `senders`. Senders are ranks at equal distances, so that all hosts send."""

    ranks: int = 1
    senders: int = 1

    def target(self, part: int) -> int:
        """The rank on which it is gathered."""
        return part % self.senders * (self.ranks // self.senders)

    def sender(self, rank: int) -> int | None:
        """The number of this rank among the senders."""
        number, rest = divmod(rank, self.ranks // self.senders)
        return number if not rest and number < self.senders else None


def group_rows(rows: Sequence[Row], *, itemsize: int, part_bytes: int = PART_BYTES) -> list[list[Row]]:
    """Group neighbours up to `part_bytes`; a larger tensor alone."""
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
    """One pass over the weights. `named`: parameters in publishing order; `buckets`: parts by name, instead of
    `part_bytes`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        *,
        compute: torch.dtype,
        sent: torch.dtype,
        part_bytes: int = PART_BYTES,
        buckets: Mapping[str, int] | None = None,
        senders: int = 1,
    ) -> None:
        mesh = named[0][1].device_mesh
        self._group = mesh.get_group(mesh.ndim - 1)
        self.ranks = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        self._turns = Turns(self.ranks, senders)
        self._sends = self._turns.sender(self._rank) is not None
        self._asked = dist.get_global_rank(self._group, 0) == 0  # no other copy of the model
        self._compute, self._sent = compute, sent
        rows = [Row(name, tuple(parameter.shape), parameter.to_local().detach()) for name, parameter in named]
        if buckets is None:
            self._parts = group_rows(rows, itemsize=sent.itemsize, part_bytes=part_bytes)
        else:
            self._parts = [list(part) for _, part in itertools.groupby(rows, key=lambda row: buckets[row.name])]

    @torch.no_grad()
    def run(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each on the rank that sends it; nothing on the others."""
        if not self._asked:
            return
        settle = settle or _nothing
        wholes = [self._room(), self._room()] if self._sends else []
        arriving = self._room_of_shares()
        under_way = self._begin(0, arriving)
        try:
            for number, part in enumerate(self._parts):
                under_way.wait()  # bounded: the timeout of the group
                made: list[tuple[str, Tensor]] = []
                if self._turns.target(number) == self._rank:
                    made = self._assemble(part, arriving, wholes[number // self._turns.senders % 2])
                    settle()  # of the previous part here: its memory is used next
                if number + 1 < len(self._parts):
                    under_way = self._begin(number + 1, arriving)
                yield from made
        finally:
            settle()
            under_way.wait()  # bounded: the timeout of the group; a second wait returns at once

    def _count_shared(self, part: Sequence[Row]) -> int:
        """Return the elements that every rank sends of a part: the first rank has the most rows of each tensor."""
        return sum(-(-row.shape[0] // self.ranks) * row.numel // row.shape[0] for row in part if row.numel)

    def _room(self) -> Tensor:
        largest = max(sum(row.numel for row in part) for part in self._parts)
        return torch.empty(largest, dtype=self._sent, device=self._parts[0][0].own.device)

    def _room_of_shares(self) -> Tensor:
        """Return `[ranks, share]` on a sender; `[1, share]` for sending rows on the others."""
        largest = max(map(self._count_shared, self._parts))
        ranks = self.ranks if self._sends else 1
        return torch.zeros(ranks, largest, dtype=self._sent, device=self._parts[0][0].own.device)

    def _begin(self, number: int, room: Tensor) -> Any:
        """Start to gather a part: `[share]` of each rank into a row of `room` on the rank that sends it."""
        part, target = self._parts[number], self._turns.target(number)
        share = self._count_shared(part)
        at, own = 0, room[self._rank if self._sends else 0, :share]
        for row in part:
            count = row.own.numel()
            own[at : at + count].copy_(row.own.reshape(-1).to(self._compute))
            at += count
        if self.ranks == 1:
            return _Done()
        here = target == self._rank
        into = [own if rank == target else room[rank, :share] for rank in range(self.ranks)] if here else None
        return dist.gather(own, into, group=self._group, group_dst=target, async_op=True)

    def _assemble(self, part: Sequence[Row], shares: Tensor, whole: Tensor) -> list[tuple[str, Tensor]]:
        """Return the whole tensors of a part, consecutively in `whole`."""
        made = []
        at = 0
        ends = [0] * self.ranks  # read position in each rank's share
        for row in part:
            tensor = whole[at : at + row.numel].view(row.shape)
            at += row.numel
            made.append((row.name, tensor))
            width = row.numel // row.shape[0] if row.numel else 0
            for rank in range(self.ranks):
                first, end = share_rows(row.shape[0], rank=rank, ranks=self.ranks)
                count = (end - first) * width
                tensor[first:end].view(-1).copy_(shares[rank, ends[rank] : ends[rank] + count])
                ends[rank] += count
        return made


class _Done:
    """The gather of a single rank."""

    def wait(self) -> None: ...


def _nothing() -> None: ...
