"""The critic's loss, and the explained variance of its values.

All tensors have the same shape, flat `[N]` or padded `[S, T]`. Guarantees:
1. the loss and its gradient are 0 outside the mask, even for NaN inputs;
2. only the predictions get a gradient;
3. without tokens the loss is zero everywhere, connected to the autograd graph; the explained variance is 0.

Aggregate the loss with the same denominators as the policy's loss.
Example: a value rose from 0 to 1, the return is 2, cliprange is 0.5. Clipped to 0.5 its error is 1.5, larger than 1:
the loss is 1.125, without gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import masked
from learners.algorithms.types import TokenLoss


def value_loss(
    predictions: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, cliprange: float | None = 0.5
) -> TokenLoss:
    """PPO's clipped value loss per token: `max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2`.

    The targets G are from arXiv 1506.02438, the clip from the code of PPO's authors. `old`: the critic's values at the
    start of the step (from the learner, not the generator). `cliprange` c is in units of reward; None: no clip.
    `clipped`: the clipped error is strictly larger. Raises `config.type` for a cliprange that is not above 0.
    """
    values, targets = masked(predictions, mask), masked(returns.detach(), mask)
    error = (values - targets) ** 2
    if cliprange is None:
        return TokenLoss(masked(error / 2, mask), torch.zeros_like(mask))
    if cliprange <= 0:
        raise ConfigError("config.type", f"cliprange = {cliprange}: it must be above 0")
    before = masked(old.detach(), mask)
    bounded = values.clamp(before - cliprange, before + cliprange)
    clipped = (bounded - targets) ** 2
    return TokenLoss(masked(torch.maximum(error, clipped) / 2, mask), (clipped > error) & mask)


def explained_variance(sums: Mapping[str, float]) -> float:
    """Return `1 - Var(G - V) / Var(G)` from sums over tokens of all ranks; 0 if all returns are equal.

    1 is a perfect critic, 0 one that predicts the mean. It shows when a critic is warmed up (arXiv 2503.01491). `sums`:
    `tokens_sum`, and `_sum` and `_square_sum` of `return` (G) and `left` (G - V).
    """
    count = max(sums["tokens_sum"], 1.0)

    def variance(name: str) -> float:
        return sums[f"{name}_square_sum"] / count - (sums[f"{name}_sum"] / count) ** 2

    whole = variance("return")
    # Equal returns leave a rounding error of about 1e-16 of their square.
    return 1 - variance("left") / whole if whole > 1e-12 * (sums["return_square_sum"] / count) else 0.0
