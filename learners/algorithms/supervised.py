"""Likelihood losses: SFT, and the likelihood term of correct answers in a policy loss.

Guarantees:
1. values outside the mask, NaN included, have no effect and no gradient;
2. denominators are those of the whole mini-batch, so pieces add up;
3. without tokens the loss is 0, connected to the autograd graph.

Example: for log-probs -1, -3 of two trained tokens among 4 in the mini-batch, `sft` gives 1, 3, and token-mean gives 1.
"""

from __future__ import annotations

from torch import Tensor

from learners.algorithms.tensors import masked


def next_token_mask(mask: Tensor) -> Tensor:
    """Return the trained predictions, bool `[S, T - 1]`, for trained TOKENS `[S, T]`: place t predicts token t + 1."""
    return mask[..., 1:].bool()


def sft(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood in nats per token, any shape; its token-mean over the mini-batch is the loss of SFT."""
    return -masked(log_probs, mask)


def positive_lm(log_probs: Tensor, mask: Tensor, right: Tensor, *, tokens: int, coeff: float = 0.1) -> Tensor:
    """Return this piece's share of VAPO's likelihood term (arXiv 2504.05118), a scalar to add to the policy's loss.

    `coeff * -sum of log p over correct answers / tokens`. `log_probs`, `mask`, `right` (bool: of a correct answer) have
    the same shape; `tokens`: trained tokens of correct answers in the whole mini-batch. 0 if there are none.
    """
    return -coeff * masked(log_probs, mask & right).sum() / max(tokens, 1)
