"""Aggregates losses per token to one number, with global denominators.

A piece of a batch (a micro-batch of a rank) returns its numerator over the GLOBAL count of tokens or sequences, so the
sum over all pieces is the loss of the whole batch, however it was split. By `mode`, with m the mask, N trained tokens
and S sequences with one in the whole mini-batch, and L trained tokens of a sequence:

token-mean               sum(m x) / N                       every token counts the same (DAPO, arXiv 2503.14476)
token-sum                sum(m x)
seq-mean-token-mean      sum over rows (sum(m x) / L) / S    every row counts the same (GRPO, arXiv 2402.03300)
seq-mean-token-sum       sum(m x) / S
seq-mean-token-sum-norm  sum(m x) / (S loss_scale_factor)    a constant instead of the length (Dr.GRPO, 2503.20783)

Guarantees:
1. values outside the mask have no effect;
2. a piece without tokens gives 0, connected to the graph;
3. a sequence lies completely in one piece (by the packer), so its length is known here;
4. if a backend AVERAGES gradients over `ranks` ranks instead of adding them, each piece is multiplied by that number:
   the mean over ranks is again the loss of the whole batch.

The caller decides which tokens count: `mask` and `denominators` before or after a rejection.
Example: two sequences with losses (1, 2) and (3): token-mean 2, token-sum 6, seq-mean-token-mean 2.25,
seq-mean-token-sum 3, seq-mean-token-sum-norm with loss_scale_factor 4 0.75.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import masked, sequence_lengths

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


class Denominators(NamedTuple):
    """Counts of the whole mini-batch over all ranks: trained tokens, and sequences with at least one."""

    tokens: int
    sequences: int


def count(mask: Tensor, sequences: Tensor) -> Denominators:
    """Count these tokens only, mask and sequences `[N]`; counts of whole sequences add up."""
    return Denominators(int(mask.sum()), int((sequence_lengths(mask, sequences) > 0).sum()))


def aggregate(
    loss: Tensor,
    mask: Tensor,
    sequences: Tensor,
    *,
    mode: str,
    denominators: Denominators,
    loss_scale_factor: float | None = None,
    ranks: int = 1,
) -> Tensor:
    """This piece's share of the loss, a scalar. `loss`, `mask` and `sequences` (a number per token) are `[N]`.

    `loss_scale_factor` (seq-mean-token-sum-norm alone): tokens, the longest response say, above 0. `ranks`: those whose
    gradients the backend averages, 1 where it adds them. Raises `config.type` for an unknown mode, `config.missing`
    where seq-mean-token-sum-norm has no factor.
    """
    values = masked(loss, mask)
    if mode == "seq-mean-token-mean":
        values = values / sequence_lengths(mask, sequences).clamp(min=1)[sequences]
    return values.sum() * ranks / _denominator(mode, denominators, loss_scale_factor)


def _denominator(mode: str, counts: Denominators, factor: float | None) -> float:
    """What the sum over all pieces is divided by."""
    if mode == "token-sum":
        return 1.0
    if mode == "token-mean":
        return max(counts.tokens, 1)
    if mode not in MODES:
        raise ConfigError("config.type", f"aggregation {mode!r}: one of {', '.join(MODES)}")
    if mode != "seq-mean-token-sum-norm":
        return max(counts.sequences, 1)
    if factor is None or factor <= 0:
        raise ConfigError("config.missing", f"aggregation {mode!r} needs loss_scale_factor above 0, not {factor}")
    return max(counts.sequences, 1) * factor
