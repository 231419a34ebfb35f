"""The optimizer Muon, for matrices: its update is the momentum, made orthogonal, at the size of AdamW's updates.

Why not `torch.optim.Muon`: it iterates in bfloat16, which a CPU without instructions for it emulates. Here a CPU
iterates in float32. Formula, names of states and, on other devices, precision are the same.
Sources: Jordan et al., https://kellerjordan.github.io/posts/muon/; the scale: Liu et al., arXiv 2502.16982, eq. 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

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
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                average = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - momentum)
                update = orthogonalized(matrix.grad.lerp(average, momentum))
                if group["weight_decay"]:
                    matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * math.sqrt(max(matrix.shape)) * lr)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return roughly U V' of the singular value decomposition U S V', by five Newton-Schulz steps."""
    first, second, third = FACTORS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    if matrix.device.type != "cpu":
        wide = wide.bfloat16()
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=second, alpha=third), wide, beta=first)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
