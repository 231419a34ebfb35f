"""The optimizer Muon, for matrices: its update is the momentum, made orthogonal, at the size of AdamW's updates.

Why not `torch.optim.Muon`: it iterates in bfloat16, which a CPU without instructions for it emulates, and every product
of sharded matrices is a collective operation. Here a CPU iterates in float32, and each rank has its own matrices, which
it gathers once. Formula, names of states and, on other devices, precision are the same.
Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; the scale: Liu et al., arXiv 2502.16982, eq. 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learners.backends.sharded_checkpoint import local_tensor

FACTORS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz step's polynomial
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; each parameter is a matrix, sharded or whole.

    Args:
        matrices: parameters, or groups of them.
        lr: the learning rate that AdamW would have.
        momentum: share of the earlier average of gradients that a step keeps.
        weight_decay: a step multiplies the weights by 1 - lr * weight_decay.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient. Collective if they are sharded."""
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            averages = (self._averaged(matrix, group["momentum"]) for matrix in matrices)
            for matrix, update in zip(matrices, _orthogonalized_by_turns(averages), strict=True):
                rows = local_tensor(matrix)
                if decay:
                    rows.mul_(1 - lr * decay)
                rows.add_(update, alpha=-0.2 * math.sqrt(max(matrix.shape)) * lr)

    def _averaged(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """Return the next momentum, with Nesterov's look ahead; in bfloat16 on a device that is no CPU."""
        average: Tensor = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        assert matrix.grad is not None
        average.lerp_(matrix.grad, 1 - momentum)
        ahead = matrix.grad.lerp(average, momentum)
        return ahead if matrix.device.type == "cpu" else ahead.bfloat16()


def _orthogonalized_by_turns(matrices: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each matrix made orthogonal; of a sharded one this rank's rows. The ranks take as many matrices as they
    are: each gathers one of them, works on it and sends every rank its rows.
    """
    waiting: list[DTensor] = []
    for matrix in matrices:
        if not isinstance(matrix, DTensor):
            yield orthogonalized(matrix)
            continue
        waiting.append(matrix)
        if len(waiting) == dist.get_world_size(_group_of_shards(matrix)):
            yield from _one_each(waiting)
            waiting = []
    if waiting:
        yield from _one_each(waiting)


def _group_of_shards(matrix: DTensor) -> dist.ProcessGroup:
    """The last dimension of a mesh is that of the shards; before it may be one of copies."""
    mesh = matrix.device_mesh
    return mesh.get_group(mesh.ndim - 1)


def _one_each(matrices: Sequence[DTensor]) -> Iterator[Tensor]:
    """Yield this rank's rows of the matrices made orthogonal, the first by the first rank, and so on. Collective."""
    group = _group_of_shards(matrices[0])
    own, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine: list[Tensor] = []
    for owner, matrix in enumerate(matrices):
        share = _padded(matrix.to_local(), -(-matrix.shape[0] // ranks))  # rows as `torch.chunk` splits them
        parts = [torch.empty_like(share) for _ in range(ranks)] if owner == own else None
        dist.gather(share, parts, group=group, group_dst=owner)  # bounded: the timeout of the group
        mine = parts or mine
    if mine:
        each = len(mine[0])
        whole = orthogonalized(torch.cat(mine)[: matrices[own].shape[0]])
        mine = [_padded(whole[rank * each : (rank + 1) * each], each) for rank in range(ranks)]
    for owner, matrix in enumerate(matrices):
        rows = matrix.to_local()
        share = rows.new_empty(-(-matrix.shape[0] // ranks), matrix.shape[1])
        dist.scatter(share, mine if owner == own else None, group=group, group_src=owner)  # bounded: as above
        yield share[: len(rows)]


def _padded(rows: Tensor, count: int) -> Tensor:
    return nn.functional.pad(rows, (0, 0, 0, count - len(rows))).contiguous()


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return roughly U V' of the singular value decomposition U S V', by five Newton-Schulz steps."""
    first, second, third = FACTORS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=second, alpha=third), wide, beta=first)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
