"""Losses of right answers: SFT, and the likelihood term of right answers in a policy loss.

Guarantees:
1. values outside the mask, NaN included, have no effect and no gradient;
2. denominators are those of the whole mini-batch, so pieces add up;
3. without tokens: 0, connected to the graph.

Example: log-probs -1, -3 of two trained tokens among 4 in the mini-batch: `sft` 1, 3, aggregated by token-mean 1.
"""

from __future__ import annotations

from torch import Tensor

from learners.algorithms.tensors import masked


def next_token_mask(mask: Tensor) -> Tensor:
    """Which predictions are trained, bool `[S, T - 1]`, from which TOKENS are `[S, T]`: t predicts token t + 1."""
    return mask[..., 1:].bool()


def sft(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood in nats per token, any shape; token-mean over the mini-batch is the loss of SFT."""
    return -masked(log_probs, mask)


def positive_lm(log_probs: Tensor, mask: Tensor, right: Tensor, *, tokens: int, coeff: float = 0.1) -> Tensor:
    """VAPO's likelihood term (arXiv 2504.05118): this piece's share, a scalar to add to the policy's loss.

    `coeff * -sum of log p over right answers / tokens`. `log_probs`, `mask`, `right` (bool: of a right answer) have one
    shape; `tokens`: trained tokens of right answers in the whole mini-batch. 0 without any.
    """
    return -coeff * masked(log_probs, mask & right).sum() / max(tokens, 1)
