"""Rejects tokens and rows that are too far from the behaviour policy.

All functions take flat `[N]` log-probs of the proximal policy (or the current one, detached) and of the behaviour
policy, with `d = proximal - behaviour`. Guarantees:
1. no gradient; values outside the mask, NaN included, have no effect; results are within the mask;
2. `rejection_mask` first clamps each token's d to +-20;
3. each row is complete in one piece, so row options do not depend on the split; `m2po_keep` must be called on all
tokens of the batch.

The aggregation decides whether rejected tokens still count in the denominator.
Example: for a row with d = 0.1, -0.3, 0.5, seq_sum_k1 is -0.3, inside log [0.5, 2], so the row is kept; seq_max_k2 is
0.125, above a threshold of 0.1, so the row is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import masked, sequence_means, sequence_sums

LOG_RATIO_LIMIT = 20.0

RejectOption = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
OPTIONS: tuple[str, ...] = get_args(RejectOption)
#: A ratio interval [low, high], one number h for [1/h, h] (both k1 only), or an upper bound (k2 and k3).
Threshold = float | tuple[float, float]


def rejection_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    options: Sequence[RejectOption],
    thresholds: Sequence[Threshold],
) -> Tensor:
    """Return the mask without the tokens that any of the options rejects, bool `[N]`.

    An option combines a scope (`token`, or the sum, mean or maximum over the row, which rejects whole rows) and an
    estimator: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. k1 keeps `log low <= value <= log high` of a ratio interval, a
    bound on behaviour / proximal; k2 and k3 keep values up to their threshold. Bounds are inclusive. Raises
    `config.type` for an unknown option, a threshold that does not fit it, or unequal numbers of the two.
    Truncated and rejection forms: arXiv 2510.18855, 2512.02556; estimators as in arXiv 2402.03300, equation 4.
    """
    limits = rejection_limits(options, thresholds)
    gap = (masked(proximal.detach(), mask) - masked(behaviour.detach(), mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    keep = mask
    for option, (low, high) in zip(options, limits, strict=True):
        where, _, kind = option.rpartition("_")
        values = _divergence(gap, kind)
        if where != "token":
            values = _per_row(values, mask, sequences, where)[sequences]
        keep = keep & (values >= low) & (values <= high)
    return keep


def rejection_limits(options: Sequence[str], thresholds: Sequence[Threshold]) -> list[tuple[float, float]]:
    """Return the interval of values that each option keeps. Raises `config.type`, see `rejection_mask`."""
    if len(options) != len(thresholds):
        raise ConfigError("config.type", f"{len(options)} rejection options but {len(thresholds)} thresholds")
    return [_limits(option, threshold) for option, threshold in zip(options, thresholds, strict=True)]


def sequence_mask(
    current: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, sequences: Tensor, *, delta: float
) -> Tensor:
    """Return the mask without stale rows that have a negative advantage, bool `[N]`.

    A row is stale if its mean of `behaviour - current` is above `delta`; rows whose advantage is not negative stay.
    `advantages` `[N]` has the row's advantage at every token; if they differ within a row, their mean decides. The loss
    is multiplied by the result, and the denominator does not change. arXiv 2512.02556 (off-policy sequence masking).
    """
    distance = sequence_means(masked(behaviour.detach(), mask) - masked(current.detach(), mask), mask, sequences)
    gain = sequence_means(advantages.detach(), mask, sequences)
    return mask & ((gain >= 0) | (distance <= delta))[sequences]


def m2po_keep(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Return the mask without the tokens of the largest `(behaviour - proximal)^2`, bool `[N]`. arXiv 2510.01161.

    The largest are removed one by one until the mean of the rest is below `threshold`; one token always stays. Of equal
    values, the later one is removed first. Call it on the whole batch: the result of a piece depends on the split.
    """
    squares = (masked(behaviour.detach(), mask) - masked(proximal.detach(), mask)).double()[mask] ** 2
    if not squares.numel():
        return mask
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, ordered.numel() + 1, device=ordered.device)
    stay = max(int((means < threshold).sum()), 1)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order[:stay]] = True
    keep = torch.zeros_like(mask)
    keep[mask] = kept
    return keep


def _divergence(gap: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return -gap
    return gap * gap / 2 if kind == "k2" else torch.expm1(gap) - gap


def _per_row(values: Tensor, mask: Tensor, sequences: Tensor, where: str) -> Tensor:
    """Return the sum, mean or maximum over the tokens of each row, `[S]`; 0 for a row without any."""
    if where == "seq_sum":
        return sequence_sums(values, mask, sequences)
    if where == "seq_mean":
        return sequence_means(values, mask, sequences)
    found = masked(values, mask)  # values are never negative: a 0 outside the mask does not change the maximum
    rows = int(sequences.max()) + 1 if sequences.numel() else 0
    return found.new_zeros(rows).scatter_reduce(0, sequences, found, "amax")


def _limits(option: str, threshold: Threshold) -> tuple[float, float]:
    if option not in OPTIONS:
        raise ConfigError("config.type", f"rejection option {option!r} is not known: one of {', '.join(OPTIONS)}")
    if option.endswith("k1"):
        low, high = (
            (1 / threshold, threshold)
            if isinstance(threshold, int | float) and threshold > 0
            else _pair(option, threshold)
        )
        if not 0 < low <= high:
            raise ConfigError(
                "config.type", f"threshold {threshold} of {option} must satisfy 0 < low <= high, as ratios around 1"
            )
        return math.log(low), math.log(high)
    if not isinstance(threshold, int | float):
        raise ConfigError(
            "config.type", f"threshold {threshold} of {option} must be one number, the largest value kept"
        )
    return -math.inf, float(threshold)


def _pair(option: str, threshold: Threshold) -> tuple[float, float]:
    if isinstance(threshold, int | float) or len(threshold) != 2:
        raise ConfigError("config.type", f"threshold {threshold} of {option} must be [low, high] or h for [1/h, h]")
    return threshold
