"""PRIME: token rewards from a reward model that is trained only on outcomes (arXiv 2502.01456).

Guarantees:
1. the last trained token of a row has no process reward: it carries the outcome;
2. process and outcome have separate leave-one-out baselines, over the complete group;
3. a group of one has no baseline: its rewards do not change;
4. only the cross-entropy has a gradient, and only through `q`; NaN outside the mask has no effect.

Example: log-probs -1, -1 under the reward model and -2, -2 under its reference with beta 0.05 give q = 1, 1 and the
scores 0.05, 0 (without `batch_norm`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from learners.algorithms.tensors import (
    grouped,
    last_tokens,
    masked,
    masked_mean,
    masked_sum,
    masked_whiten,
    outcome_scores,
    required,
    scan_back,
    sequence_lengths,
    sequence_sums,
    spread,
)
from learners.algorithms.types import Estimate, Rollouts


class TokenScores(NamedTuple):
    """`scores` `[S, T]`: process rewards, no gradient; `q` `[S, T]`: log-ratio of the reward model to its reference."""

    scores: Tensor
    q: Tensor


def token_scores(
    model: Tensor, reference: Tensor, mask: Tensor, *, beta: float = 0.05, batch_norm: bool = True
) -> TokenScores:
    """Return implicit process rewards `beta (log phi - log ref)`, `[S, T]` (arXiv 2502.01456).

    `batch_norm` divides them by the largest absolute undiscounted return in the whole batch (plus 1e-6). `model`,
    `reference` `[S, T]`: log-probs of the tokens under the reward model and its frozen initial weights.
    """
    q = masked(model, mask) - masked(reference, mask)
    scores = masked(beta * q.detach(), mask & ~last_tokens(mask))
    if batch_norm and scores.numel():
        scores = scores / (scan_back(scores, 1.0, mask).abs().max() + 1e-6)
    return TokenScores(scores, q)


@torch.no_grad()
def prime(rollouts: Rollouts, *, coef_dpo: float = 5.0, coef_gt: float = 5.0) -> Estimate:
    """Advantages from process and outcome rewards together: their returns, whitened (arXiv 2502.01456).

    Process, at every token: `r n/(n-1) - sum over the group of its rows' mean r / (n-1)`, times `coef_dpo`; outcome, at
    the last token: `(R n - sum R) / (n-1)`, times `coef_gt`. Needs `Rollouts.process` `[S, T]` from `token_scores`.
    """
    mask = rollouts.mask
    process = masked(required(rollouts, "process", "prime"), mask)
    rows = grouped(rollouts.groups)
    sizes = rows.sizes[rows.of].to(process.dtype)
    scale, others = sizes / (sizes - 1).clamp(min=1), 1 / (sizes - 1).clamp(min=1)
    others = torch.where(rows.alone(), torch.zeros_like(others), others)
    outcomes = outcome_scores(rollouts.rewards, mask)
    mean_process = rows.sums(masked_mean(process, mask, -1))[rows.of]
    dense = process * scale[:, None] - spread(mean_process * others, mask)
    final = outcomes * scale - rows.sums(outcomes)[rows.of] * others
    rewards = coef_dpo * dense + coef_gt * spread(final, last_tokens(mask))
    returns = scan_back(rewards, 1.0, mask)
    return Estimate(masked_whiten(returns, mask), returns)


def ce_loss(q: Tensor, correct: Tensor, mask: Tensor, *, beta: float = 0.05) -> Tensor:
    """Binary cross-entropy of `sigmoid(beta sum q)` against the outcome, mean over the rows (arXiv 2502.01456).

    Returns a scalar with gradient, 0 without rows. `q` `[S, T]`; `correct` `[S]`: outcomes from 0 to 1.
    """
    losses = _cross_entropy(beta * masked_sum(q, mask, -1), correct)
    return losses.sum() / max(losses.numel(), 1)


class OutcomeLosses(NamedTuple):
    """Per sequence, `[S]`: `loss` with gradient, 0 if no token is trained; `logits`, which are `beta sum q`, without
    gradient; `counted` bool: the sequence has a trained token.
    """

    loss: Tensor
    logits: Tensor
    counted: Tensor


def outcome_losses(q: Tensor, correct: Tensor, mask: Tensor, sequences: Tensor, *, beta: float = 0.05) -> OutcomeLosses:
    """Return the terms of `ce_loss` per sequence, from flat tokens (arXiv 2502.01456); pieces add up.

    A piece holds whole sequences. `q`, `mask` and `sequences` (each token's sequence number) `[N]`; `correct` `[S]`:
    outcomes from 0 to 1.
    """
    logits = beta * sequence_sums(q, mask, sequences, correct.numel())
    counted = sequence_lengths(mask, sequences, correct.numel()) > 0
    return OutcomeLosses(masked(_cross_entropy(logits, correct), counted), logits.detach(), counted)


def _cross_entropy(logits: Tensor, correct: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, correct.to(logits.dtype), reduction="none")
