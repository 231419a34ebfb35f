"""Advantages of samples from the rewards of their group.

Called by `learners.batch`, once for the whole batch, before it is cut into ranks and micro-batches. Guarantees:
1. group statistics see the complete group; rows of a group need not be adjacent;
2. a group whose rewards are all equal gives exactly 0;
3. the standard deviation is the unbiased one, `epsilon` is added to it outside the root: `(R - mean) / (std + eps)`;
4. float64 numpy, no torch, no state.

Example: rewards 1, 0, 0.5 of one group give GRPO 0.999998, -0.999998, 0 and RLOO 0.75, -0.75, 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Advantage = Callable[[Floats, Ints], Floats]


def _group_sums(values: Floats, groups: Ints) -> tuple[Floats, Ints]:
    """Sum of the values and number of members of each sample's group, both `[S]`."""
    _, of, counts = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.bincount(of, weights=values, minlength=counts.size).astype(np.float64)
    return sums[of], counts[of].astype(np.int64)


def _centred(rewards: Floats, groups: Ints) -> tuple[Floats, Ints]:
    """Reward minus group mean (exactly 0 where all are equal) and group size, both `[S]`."""
    _, of = np.unique(groups, return_inverse=True)
    sums, counts = _group_sums(rewards, groups)
    low = np.full(of.max(initial=-1) + 1, np.inf)
    high = np.full_like(low, -np.inf)
    np.minimum.at(low, of, rewards)
    np.maximum.at(high, of, rewards)
    return np.where(low[of] == high[of], 0.0, rewards - sums / np.maximum(counts, 1)), counts


def grpo(
    rewards: Floats, groups: Ints, *, norm_by_std: bool = True, epsilon: float = 1e-6,
    singleton: Literal["zero", "score"] = "zero",
) -> Floats:  # fmt: skip
    """GRPO (arXiv 2402.03300), `[S]`. A group of one has no baseline: 0, or its own score with `singleton="score"`."""
    centred, counts = _centred(rewards, groups)
    if singleton == "score":
        centred = np.where(counts == 1, rewards, centred)
    if not norm_by_std:
        return centred
    squares, _ = _group_sums(np.where(counts == 1, 0.0, centred) ** 2, groups)
    std = np.where(counts == 1, 1.0, np.sqrt(squares / np.maximum(counts - 1, 1)))
    return centred / (std + epsilon)


def dr_grpo(rewards: Floats, groups: Ints) -> Floats:
    """Dr.GRPO (arXiv 2503.20783), `[S]`: GRPO without the division by the standard deviation."""
    return grpo(rewards, groups, norm_by_std=False)


def rloo(rewards: Floats, groups: Ints) -> Floats:
    """RLOO (arXiv 2402.14740), `[S]`: reward minus the mean of the others; a group of one keeps its reward."""
    centred, counts = _centred(rewards, groups)
    return np.where(counts == 1, rewards, centred * counts / np.maximum(counts - 1, 1))
