"""Selects groups, rows and tokens of a batch to train: dynamic sampling, accuracy band, overlong rows, resampling.

Guarantees:
1. a decision about a group holds for all its rows;
2. groups with equal values are found by comparing minimum and maximum exactly, never by a rounded standard deviation;
3. a draw depends only on the seed, the step and the probabilities.

Example: of groups with accuracies 1, 1, 1 and 1, 0, 0, `group_std` and `accuracy_band` (0.2 to 0.8) keep the second.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import grouped, wide


def group_std(metric: Tensor, groups: Tensor, *, keep_singletons: bool = True) -> Tensor:
    """Mark rows whose group has different values of the metric, bool `[S]` (DAPO's dynamic sampling, arXiv 2503.14476).

    `metric` `[S]`: accuracy, score or reward. A group of one is kept unless `keep_singletons` is false.
    """
    rows = grouped(groups)
    keep = ~rows.flat(wide(metric))
    if keep_singletons:
        keep = keep | (rows.sizes == 1)
    return keep[rows.of]


def accuracy_band(metric: Tensor, groups: Tensor, *, low: float = 0.2, high: float = 0.8) -> Tensor:
    """Mark rows whose group's mean is from `low` to `high`, both included, bool `[S]` (PRIME, arXiv 2502.01456)."""
    rows = grouped(groups)
    means = rows.means(wide(metric))
    return ((means >= low) & (means <= high))[rows.of]


def overlong_mask(mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask without rows cut by the length limit, bool `[S, T]` (overlong filtering, arXiv 2503.14476).

    Use it only for the loss: estimators get the original mask, so that these rows count in their group's statistics.
    """
    return mask & ~truncated.bool()[:, None]


def pf_ppo_probs(
    scores: Tensor, *, method: Literal["pow", "max_min", "max_random"] = "pow", power: float = 2.0
) -> Tensor:
    """Return the probabilities with which PF-PPO draws the rows of a batch, `[S]` (arXiv 2409.06957).

    `pow`: proportional to `|R|^power`; `max_min`: the best and worst rows equally, others almost never; `max_random`:
    weight 0.4 for the best, 0.1 for every other row. 1e-8 is added to each weight before normalization.
    """
    found = wide(scores)
    if found.numel() == 0:
        return found
    best, worst = found == found.max(), found == found.min()
    if method == "pow":
        weights = found.abs() ** power
    elif method == "max_min":
        weights = (best | worst).to(found.dtype)
    elif method == "max_random":
        weights = torch.where(best, 0.4, 0.1).to(found.dtype)
    else:
        raise ConfigError("config.type", f"method {method!r} is not known: one of pow, max_min, max_random")
    weights = (weights + 1e-8).clamp(min=1e-8)
    return weights / weights.sum()


def pf_ppo_draw(probabilities: Tensor, *, seed: int, step: int, count: int | None = None) -> Tensor:
    """Draw row numbers with replacement, int64 `[count]`; by default as many as there are rows.

    It is used after advantage estimation: a row drawn twice is trained twice, and group statistics do not change.
    """
    rows = probabilities.numel() if count is None else count
    if rows == 0 or probabilities.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))
    return torch.multinomial(wide(probabilities), rows, replacement=True, generator=generator)
