"""pass@k from counts in a group: the metric, the reward transform and the analytic advantage.

Guarantees:
1. exact: binomial coefficients are integers, with one division at the end;
2. a group smaller than k (members may have failed) is treated as if k were its size;
3. in a group that is all correct or all incorrect, transformed rewards are equal and advantages are exactly 0.

Example: one correct of 4, k = 2: pass@2 is 0.5; rewards 0.5 (correct) and 1/6 (incorrect); advantages 1 and -1/3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.evaluation.statistics import pass_at_k as pass_at_k  # noqa: PLC0414
from learners.algorithms.tensors import grouped


def pass_at_means(correct: Tensor, groups: Tensor) -> dict[int, float]:
    """Return k = 2, 4, 8 .. -> mean pass@k over groups of at least k samples; `correct` bool `[S]`, `groups` `[S]`.

    >>> import torch
    >>> pass_at_means(torch.tensor([True, False, False, False, True, True]), torch.tensor([0, 0, 0, 0, 1, 1]))
    {2: 0.75, 4: 1.0}
    """
    rights: dict[int, list[bool]] = {}
    for right, group in zip(correct.tolist(), groups.tolist(), strict=True):
        rights.setdefault(group, []).append(bool(right))
    counts = [(len(found), sum(found)) for found in rights.values()]
    largest = max((n for n, _ in counts), default=0)
    means = {}
    for k in (2**power for power in range(1, largest.bit_length())):
        every = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        means[k] = sum(every) / len(every)
    return means


def pkpo_binary(correct: Tensor, groups: Tensor, *, k: int) -> Tensor:
    """Return rewards whose policy gradient raises pass@k (PKPO, arXiv 2505.15201), float64 `[S]`.

    For n samples with c correct: `k / n` if correct, else `k / n (1 - C(n-1-c, k-1) / C(n-1, k-1))`. `correct` `[S]`
    bool or 0 and 1.
    """
    return _outcome_values(correct, groups, k, _pkpo)


def passk_advantages(correct: Tensor, groups: Tensor, *, k: int) -> Tensor:
    """Return each sample's mean standardised reward over the k-subsets that contain it (arXiv 2508.10751).

    Float64 `[S]`; exactly 0 if no subset, or every one, contains a correct sample. `correct` `[S]` bool or 0 and 1.
    """
    return _outcome_values(correct, groups, k, _standardise)


def _pkpo(n: int, c: int, k: int) -> tuple[float, float]:
    wrong = 1 - math.comb(n - 1 - c, k - 1) / math.comb(n - 1, k - 1) if c < n else 0.0
    return k / n, k / n * wrong


def _standardise(n: int, c: int, k: int) -> tuple[float, float]:
    mean = 1 - math.comb(n - c, k) / math.comb(n, k)
    spread = math.sqrt(mean * (1 - mean))
    if spread == 0:
        return 0.0, 0.0
    return (1 - mean) / spread, (1 - mean - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)) / spread


def _outcome_values(
    correct: Tensor, groups: Tensor, k: int, values: Callable[[int, int, int], tuple[float, float]]
) -> Tensor:
    """Return a value per sample; `values(n, c, k)` gives those of correct and incorrect samples of a group."""
    if k < 1:
        raise ConfigError("config.type", f"k = {k}: it must be at least 1")
    right = correct > 0
    rows = grouped(groups)
    counts = rows.sums(right.double())
    pairs = [values(n, int(c), min(k, n)) for n, c in zip(rows.sizes.tolist(), counts.tolist(), strict=True)]
    table = counts.new_tensor(pairs).reshape(-1, 2)  # [G, 2]: correct, incorrect
    return table[rows.of, (~right).long()]
