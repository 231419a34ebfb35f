"""Masked and grouped arithmetic for estimators, losses and corrections.

Guarantees:
1. `masked` selects before any arithmetic: NaN and infinities outside the mask have no effect and no gradient;
2. results are float32 or wider, whatever the input dtype;
3. the mean of no values is 0, and the whitening of fewer than two values is 0;
4. rows of a group need not be adjacent, and group numbers may be any integers;
5. functions are pure: no tensor is changed in place.

There are three layouts: any shape with a mask, whole batches `[S, T]` (S samples, T tokens), and flat tokens `[N]` with
the number of each token's sequence.
Example: values 1, NaN, 3 with mask 1, 0, 1 have the masked mean 2; whitening gives -0.707107, 0, 0.707107.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.types import Rollouts

# ---------------------------------------------------------------- any shape


def wide(values: Tensor) -> Tensor:
    """Return `values` in float32, or unchanged if they are float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` in float32 or wider, 0 outside the mask; a NaN there has no effect and no gradient."""
    found = wide(values)
    return torch.where(mask, found, torch.zeros((), dtype=found.dtype, device=found.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the mask: a scalar, or along `dim`."""
    found = masked(values, mask)
    return found.sum() if dim is None else found.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the mask, 0 if it is empty: a scalar, or along `dim`."""
    counts = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / counts.clamp(min=1)


def masked_variance(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance over the mask, a scalar; 0 for fewer than two values."""
    distances = masked(masked(values, mask) - masked_mean(values, mask), mask)
    return (distances * distances).sum() / (mask.sum() - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + epsilon)` with mean and unbiased variance over the mask of the WHOLE batch.

    Without `shift_mean` the mean is added back. The result is 0 outside the mask, and 0 (before that addition) for
    fewer than two values.
    """
    mean = masked_mean(values, mask)
    found = (masked(values, mask) - mean) * torch.rsqrt(masked_variance(values, mask) + epsilon)
    return masked(found if shift_mean else found + mean, mask)


# ---------------------------------------------------------------- flat tokens [N]


def sequence_sums(values: Tensor, mask: Tensor, sequences: Tensor, count: int | None = None) -> Tensor:
    """Sum over the trained tokens of each sequence, `[S]`, with gradient. `count`: S; None: the last number plus 1."""
    found = masked(values, mask)
    total = count if count is not None else int(sequences.max()) + 1 if sequences.numel() else 0
    return torch.zeros(total, dtype=found.dtype, device=found.device).index_add(0, sequences, found)


def sequence_lengths(mask: Tensor, sequences: Tensor, count: int | None = None) -> Tensor:
    """Trained tokens of each sequence, int64 `[S]`."""
    total = count if count is not None else int(sequences.max()) + 1 if sequences.numel() else 0
    return torch.zeros(total, dtype=torch.int64, device=mask.device).index_add(0, sequences, mask.long())


def sequence_means(values: Tensor, mask: Tensor, sequences: Tensor, count: int | None = None) -> Tensor:
    """Mean over the trained tokens of each sequence, `[S]`, 0 for a sequence without any; with gradient."""
    lengths = sequence_lengths(mask, sequences, count)
    return sequence_sums(values, mask, sequences, count) / lengths.clamp(min=1)


# ---------------------------------------------------------------- rows of a batch [S, T]


def outcome_scores(rewards: Tensor, mask: Tensor) -> Tensor:
    """Outcome score of each row, `[S]`: the sum of its token rewards inside the mask."""
    return masked_sum(rewards, mask, -1)


def spread(scores: Tensor, mask: Tensor) -> Tensor:
    """Repeat the score of each row at every token of its mask, `[S, T]`; 0 elsewhere."""
    return masked(scores[:, None].expand(mask.shape), mask)


def last_tokens(mask: Tensor) -> Tensor:
    """Mark the last token of the mask in each row, bool `[S, T]`; none in an empty row."""
    after = mask.long().flip(-1).cumsum(-1).flip(-1)  # number of mask tokens from here on
    return mask & (after == 1)


def place_outcomes(scores: Tensor, mask: Tensor) -> Tensor:
    """Place outcome scores `[S]` as token rewards `[S, T]` on the last token of the mask; 0 elsewhere."""
    return spread(scores, last_tokens(mask))


def following(values: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """Return the value at the next token of the mask in the same row, `[S, T]`; `last` `[S]` after the last one."""
    rows, columns = mask.shape
    places = torch.where(mask, torch.arange(columns, device=mask.device), columns)
    here = places.flip(-1).cummin(-1).values.flip(-1) if columns else places
    after = torch.cat((here[:, 1:], here.new_full((rows, min(columns, 1)), columns)), -1)
    return torch.cat((masked(values, mask), wide(last)[:, None]), -1).gather(-1, after)


def scan_back(values: Tensor, decay: Tensor | float, mask: Tensor) -> Tensor:
    """Return `y_t = x_t + decay_t * y_next` from the last token of the mask to the first, `[S, T]`; `y` starts at 0.

    Tokens outside the mask are skipped: they do not change the running value, and their result is 0.
    """
    found = masked(values, mask)
    rates = decay if isinstance(decay, Tensor) else torch.full((), decay, dtype=found.dtype)
    columns = zip(found.unbind(-1), rates.expand(mask.shape).unbind(-1), mask.unbind(-1), strict=True)
    carried = found.new_zeros(mask.shape[0])
    out = []
    for value, rate, valid in reversed(list(columns)):
        carried = torch.where(valid, value + rate * carried, carried)
        out.append(carried)
    return masked(torch.stack(out[::-1], -1), mask) if out else found


def required(rollouts: Rollouts, field: str, estimator: str) -> Tensor:
    """Return a field of the batch that the estimator needs; raise `config.conflict` if it is None."""
    found: Tensor | None = getattr(rollouts, field)
    if found is None:
        raise ConfigError("config.conflict", f"advantage {estimator!r} needs {field!r}, which this run does not have")
    return found


# ---------------------------------------------------------------- groups of rows [S]


class Groups(NamedTuple):
    """`of` `[S]`: the group of each row, 0..G-1; `sizes` `[G]`: rows of each group."""

    of: Tensor
    sizes: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Sum over each group, `[G]`."""
        return values.new_zeros(self.sizes.numel()).index_add(0, self.of, values)

    def means(self, values: Tensor) -> Tensor:
        """Mean over each group, `[G]`."""
        return self.sums(values) / self.sizes

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of each group, both `[G]`."""
        start = values.new_zeros(self.sizes.numel())
        low = start.scatter_reduce(0, self.of, values, "amin", include_self=False)
        high = start.scatter_reduce(0, self.of, values, "amax", include_self=False)
        return low, high

    def flat(self, values: Tensor) -> Tensor:
        """Mark groups whose values are all equal, bool `[G]`; compared exactly, not by a standard deviation."""
        low, high = self.extremes(values)
        return low == high

    def centred(self, values: Tensor) -> Tensor:
        """Value minus the mean of its group, `[S]`; exactly 0 if all values of the group are equal."""
        centred = values - self.means(values)[self.of]
        return torch.where(self.flat(values)[self.of], torch.zeros_like(values), centred)

    def deviations(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of each group, `[G]`; 0 for a group of one."""
        squares = self.centred(values) ** 2
        return (self.sums(squares) / (self.sizes - 1).clamp(min=1)).sqrt()

    def alone(self) -> Tensor:
        """Mark rows that are the only one of their group, bool `[S]`."""
        return (self.sizes == 1)[self.of]


def grouped(numbers: Tensor) -> Groups:
    """Group rows by their numbers `[S]`, which may be any integers."""
    _, of, sizes = torch.unique(numbers, return_inverse=True, return_counts=True)
    return Groups(of, sizes)
