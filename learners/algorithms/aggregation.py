"""Aggregates per-token losses into one number, with global denominators.

Each piece of a batch (a micro-batch of one rank) divides its numerator by the GLOBAL count of tokens or sequences, so
the sum over all pieces is the loss of the whole batch, regardless of the split. In the modes below, m is the mask, the
whole mini-batch has N trained tokens and S samples with at least one, and a sample has L trained tokens in all its rows
(`learner.algorithm.sequence = "row"`: every row counts as a sample):

token-mean               sum(m x) / N                       all tokens have the same weight (DAPO, arXiv 2503.14476)
token-sum                sum(m x)
seq-mean-token-mean      sum over S of (sum(m x) / L) / S    all have the same weight (GRPO, arXiv 2402.03300)
seq-mean-token-sum       sum(m x) / S
seq-mean-token-sum-norm  sum(m x) / (S loss_scale_factor)    a constant instead of the length (Dr.GRPO, 2503.20783)

Guarantees:
1. values outside the mask have no effect;
2. a piece without tokens gives 0, connected to the autograd graph;
3. the packer keeps each row in one piece, so its length is known here; `siblings` counts the tokens of the other rows
of its sample, which may be in any piece;
4. if a backend AVERAGES gradients over `ranks` ranks instead of summing them, each piece is multiplied by `ranks`, so
the mean over ranks is again the loss of the whole batch.

The caller decides whether `mask` and `denominators` include rejected tokens.
Example: two sequences with losses (1, 2) and (3) give token-mean 2, token-sum 6, seq-mean-token-mean 2.25,
seq-mean-token-sum 3, and seq-mean-token-sum-norm 0.75 with loss_scale_factor 4.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import masked, sequence_lengths

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


class Denominators(NamedTuple):
    """Counts of the whole mini-batch over all ranks: trained tokens, and samples (or rows) with at least one."""

    tokens: int
    sequences: int


def count(mask: Tensor, sequences: Tensor) -> Denominators:
    """Count the tokens and sequences of one piece, `[N]`; counts of pieces with whole sequences add up."""
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
    siblings: Tensor | None = None,
) -> Tensor:
    """Return this piece's share of the loss, a scalar. `loss`, `mask` and `sequences` (each token's row) are `[N]`.

    `siblings`, int `[S]`: tokens of the mask in the other rows of each row's sample; None: every sample has one row.
    `loss_scale_factor` (only for seq-mean-token-sum-norm) is a number of tokens above 0, for example the longest
    response. `ranks` is the number of ranks whose gradients the backend averages, 1 if it sums them. Raises
    `config.type` for an unknown mode and `config.missing` if seq-mean-token-sum-norm has no factor.
    """
    values = masked(loss, mask)
    if mode == "seq-mean-token-mean":
        lengths = sequence_lengths(mask, sequences, None if siblings is None else siblings.numel())
        lengths = lengths if siblings is None else lengths + siblings
        values = values / lengths.clamp(min=1)[sequences]
    return values.sum() * ranks / _denominator(mode, denominators, loss_scale_factor)


def row_shares(mask: Tensor, sequences: Tensor, siblings: Tensor) -> Tensor:
    """Return the share of each row in the trained tokens of its sample, `[S]`; 0 for a row without any."""
    lengths = sequence_lengths(mask, sequences, siblings.numel())
    return lengths / (lengths + siblings).clamp(min=1)


def _denominator(mode: str, counts: Denominators, factor: float | None) -> float:
    """Return the divisor of the sum over all pieces."""
    if mode == "token-sum":
        return 1.0
    if mode == "token-mean":
        return max(counts.tokens, 1)
    if mode not in MODES:
        raise ConfigError("config.type", f"aggregation {mode!r} is not known: one of {', '.join(MODES)}")
    if mode != "seq-mean-token-sum-norm":
        return max(counts.sequences, 1)
    if factor is None or factor <= 0:
        raise ConfigError("config.missing", f"aggregation {mode!r} needs loss_scale_factor above 0, got {factor}")
    return max(counts.sequences, 1) * factor
