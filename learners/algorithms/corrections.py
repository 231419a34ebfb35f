"""Importance weights between behaviour, proximal and current policy, and how far they are apart.

Called by `losses` and `learners.update`. Names, never mixed: `behaviour` was recorded by the generator at sampling
time, `proximal` is of the learner's weights at the start of the step, `current` has the gradient. Guarantees:
1. inputs outside the mask may be NaN or infinite: they are replaced before any arithmetic, outputs are 0 there;
2. weights carry no gradient; log-ratios are clamped to +-20 before `exp`;
3. float32 or wider, whatever the model runs in.
All tensors are flat over the trained tokens, `[N]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in float32 or wider, 0 outside the mask; a NaN there has no effect and no gradient."""
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return torch.where(mask, wide, torch.zeros((), dtype=wide.dtype, device=wide.device))


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """`new - old`, clamped to +-20; the clamp kills the gradient outside. 0 outside the mask."""
    return (masked(new, mask) - masked(old, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def is_weights(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, upper: float | None) -> Tensor:
    """Token-level truncated weights `min(exp(proximal - behaviour), upper)`, `[N]`; None does not truncate."""
    raw = masked(log_ratio(proximal.detach(), behaviour.detach(), mask).exp(), mask)
    return raw if upper is None else raw.clamp(max=upper)


def correction_sums(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, cap: float | None) -> dict[str, Tensor]:
    """Sums over tokens from which `correction_metrics` makes shares and means (`ratio_max` is a maximum).

    The sums of ranks and micro-batches add up, so that the metrics do not depend on how the batch was cut.
    """
    gap = log_ratio(proximal.detach(), behaviour.detach(), mask)
    ratio = masked(gap.exp(), mask)
    weights = ratio if cap is None else ratio.clamp(max=cap)
    zero = torch.zeros((), dtype=gap.dtype, device=gap.device)
    return {
        "kl_sum": -gap.sum(),
        "k3_sum": masked(gap.exp() - gap - 1, mask).sum(),
        "gap_sum": gap.abs().sum(),
        "weight_sum": weights.sum(),
        "weight_square_sum": (weights * weights).sum(),
        "capped_sum": zero if cap is None else (ratio > cap).to(gap.dtype).sum(),
        "ratio_max": ratio.max() if ratio.numel() else zero,
    }


def correction_metrics(sums: dict[str, float], tokens: float) -> dict[str, float]:
    """Metrics by catalogue name from the global sums over `tokens` trained tokens.

    `ess` is `(sum w)^2 / (N sum w^2)` of the weights as used, after truncation.
    """
    count = max(tokens, 1.0)
    square = sums["weight_square_sum"]
    return {
        "kl_behaviour": sums["k3_sum"] / count,
        "logprob_gap_mean": sums["gap_sum"] / count,
        "ess": sums["weight_sum"] ** 2 / (count * square) if square > 0 else 0.0,
        "tis_capped_share": sums["capped_sum"] / count,
        "ratio_max": sums["ratio_max"],
    }
