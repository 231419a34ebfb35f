"""The rows of an output head on the ranks that share it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class Vocabulary(NamedTuple):
    """The rows of an output head on this rank: from `start` on, of the vocabulary split over `group`."""

    group: Any
    start: int

    def sum(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the ranks, in place."""
        dist.all_reduce(values, op, group=self.group)  # bounded: the timeout of the group
        return values

    def own(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return which targets `[n]` lie on this rank, and their places in its `count` rows (0 for others)."""
        places = targets - self.start
        mine = (places >= 0) & (places < count)
        return mine, torch.where(mine, places, 0)


def vocabulary_split(weight: Tensor) -> Vocabulary | None:
    """Return how the rows of an output head lie on ranks; None if it is whole or split in another way."""
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        return None
    mesh, rows = weight.device_mesh, weight.shape[0]
    each = -(-rows // mesh.size())
    if each * (mesh.size() - 1) >= rows:  # a rank without a row
        return None
    return Vocabulary(mesh.get_group(), each * mesh.get_local_rank())
