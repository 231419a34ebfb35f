"""Advantages without a critic, from the rewards of a prompt's group or of the whole batch.

Guarantees:
1. a group with equal rewards gets exactly 0 (before any whitening), except a group of one that keeps its score;
2. the standard deviation of a group is unbiased, and `epsilon` is added outside the square root;
3. rows of a group need not be adjacent, and a mask may have holes; results are 0 outside the mask;
4. no gradient flows; NaN outside the mask has no effect.

The score `R` of a row is the sum of its token rewards inside the mask.
Example: for one group with the scores 1, 0, 0.5, GRPO gives 0.999998, -0.999998, 0 and RLOO gives 0.75, -0.75, 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.passk import passk_advantages
from learners.algorithms.preference import sppo_targets
from learners.algorithms.tensors import (
    Groups,
    grouped,
    masked,
    masked_whiten,
    outcome_scores,
    required,
    scan_back,
    spread,
)
from learners.algorithms.types import Estimate, Rollouts

Advantage = Callable[..., Estimate]
Singleton = Literal["zero", "score"]

LOG_RATIO_LIMIT = 20.0


# ---------------------------------------------------------------- one number per row, from its group


@torch.no_grad()
def grpo(
    rollouts: Rollouts, *, norm_by_std: bool = True, epsilon: float = 1e-6, singleton: Singleton = "zero"
) -> Estimate:
    """GRPO (arXiv 2402.03300, section 4.1.2): `(R - mean) / (std + epsilon)`.

    A group of one has no baseline: it gets 0, or with `singleton="score"` its own score (mean 0, std 1).
    """
    scores = outcome_scores(rollouts.rewards, rollouts.mask)
    found = _normalise(scores, grouped(rollouts.groups), norm_by_std=norm_by_std, epsilon=epsilon, singleton=singleton)
    return Estimate(spread(found, rollouts.mask))


@torch.no_grad()
def dr_grpo(rollouts: Rollouts, *, singleton: Singleton = "zero") -> Estimate:
    """Dr.GRPO (arXiv 2503.20783): GRPO without the standard deviation; aggregate with `seq-mean-token-sum-norm`."""
    return grpo(rollouts, norm_by_std=False, singleton=singleton)


@torch.no_grad()
def rloo(rollouts: Rollouts) -> Estimate:
    """RLOO (arXiv 2402.14740): score minus the mean score of the group's other rows; a group of one keeps its score."""
    scores, rows = outcome_scores(rollouts.rewards, rollouts.mask), grouped(rollouts.groups)
    sizes = rows.sizes[rows.of]
    found = rows.centred(scores) * sizes / (sizes - 1).clamp(min=1)
    return Estimate(spread(torch.where(rows.alone(), scores, found), rollouts.mask))


@torch.no_grad()
def opo(rollouts: Rollouts) -> Estimate:
    """OPO (arXiv 2505.23585): the baseline is the group's mean score, weighted by the number of trained tokens.

    The baseline is 0 for a group of one and for a group without trained tokens.
    """
    scores, rows = outcome_scores(rollouts.rewards, rollouts.mask), grouped(rollouts.groups)
    lengths = rollouts.mask.sum(-1).to(scores.dtype)
    tokens = rows.sums(lengths)
    baseline = rows.sums(lengths * scores) / tokens.clamp(min=1)
    equal = rows.flat(scores) & (tokens > 0)
    found = torch.where(equal[rows.of], torch.zeros_like(scores), scores - baseline[rows.of])
    return Estimate(spread(torch.where(rows.alone(), scores, found), rollouts.mask))


@torch.no_grad()
def gpg(rollouts: Rollouts, *, f_norm: float = 1.0) -> Estimate:
    """GPG (arXiv 2504.02546): `alpha (R - mean) / f_norm`, alpha = rows of the batch / rows with a nonzero score.

    A group of one keeps its score. Use it with the loss `reinforce`.
    """
    scores, rows = outcome_scores(rollouts.rewards, rollouts.mask), grouped(rollouts.groups)
    alpha = scores.numel() / max(int((scores != 0).sum()), 1)
    centred = torch.where(rows.alone(), scores, rows.centred(scores))
    return Estimate(spread(alpha * centred / f_norm, rollouts.mask))


@torch.no_grad()
def grpo_passk(
    rollouts: Rollouts,
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
    singleton: Literal["error", "zero"] = "error",
) -> Estimate:
    """Best minus second best (arXiv 2503.19595): the best row of a group gets the margin, all others 0.

    The margin is divided by `std + epsilon` if `norm_by_std`, and is 0 for a tie. A group of one raises
    `config.conflict`, or gets 0 with `singleton="zero"`.
    """
    scores, rows = outcome_scores(rollouts.rewards, rollouts.mask), grouped(rollouts.groups)
    if singleton == "error" and bool((rows.sizes < 2).any()):
        raise ConfigError(
            "config.conflict",
            "advantage 'grpo_passk': a group of one has no second best sample",
            remedy="set advantage_options.singleton = 'zero' or use more samples per prompt",
        )
    _, high = rows.extremes(scores)
    best = scores == high[rows.of]
    second = rows.extremes(torch.where(best, -torch.inf, scores))[1]
    lone_best = rows.sums(best.to(scores.dtype)) == 1
    margin = torch.where(lone_best & (rows.sizes > 1), high - second, torch.zeros_like(high))
    if norm_by_std:
        margin = margin / (rows.deviations(scores) + epsilon)
    return Estimate(spread(torch.where(best, margin[rows.of], torch.zeros_like(scores)), rollouts.mask))


@torch.no_grad()
def win_rate(rollouts: Rollouts, *, scale: float | None = None) -> Estimate:
    """Win rate against the samples of the group, minus 1/2 (SPPO, arXiv 2405.00675, section 4), in -1/2..1/2.

    The mean over the samples k of the group, the row itself too, of P(row beats k): 1, or 1/2 for equal scores, or 0;
    with `scale` the logistic of `scale (R - R_k)`, as in a Bradley-Terry model of the scores.
    """
    scores = outcome_scores(rollouts.rewards, rollouts.mask)
    together = rollouts.groups[:, None] == rollouts.groups[None, :]
    apart = scores[:, None] - scores[None, :]
    wins = (apart.sign() + 1) / 2 if scale is None else torch.sigmoid(scale * apart)
    rates = (wins * together).sum(-1) / together.sum(-1)
    return Estimate(spread(sppo_targets(rates), rollouts.mask))


@torch.no_grad()
def passk_training(rollouts: Rollouts, *, k: int = 4, correct_above: float = 0.5) -> Estimate:
    """Analytic advantages of pass@k training (arXiv 2508.10751).

    A sample is correct if its score is above `correct_above`. If a group has fewer than k samples (some failed), k is
    the group's size.
    """
    scores = outcome_scores(rollouts.rewards, rollouts.mask)
    found = passk_advantages(scores > correct_above, rollouts.groups, k=k)
    return Estimate(spread(found.to(scores.dtype), rollouts.mask))


# ---------------------------------------------------------------- with statistics of the whole batch


@torch.no_grad()
def softmean(rollouts: Rollouts, *, beta: float = 1.0) -> Estimate:
    """Score minus `log(mean(e^(beta R))) / beta` of the batch, as in verl's recipe of SPPO (arXiv 2405.00675).

    It lies between the mean (beta 0) and the maximum of the scores: only rows near the best get a positive advantage.
    """
    scores = outcome_scores(rollouts.rewards, rollouts.mask)
    return Estimate(spread(sppo_targets(scores, target="softmean", softmean_beta=beta), rollouts.mask))


@torch.no_grad()
def reinforce_plus_plus(rollouts: Rollouts, *, gamma: float = 1.0) -> Estimate:
    """REINFORCE++ (arXiv 2501.03262): discounted returns `G_t = r_t + gamma G_next`, whitened over the batch.

    Tokens outside the mask are skipped. Usually combined with a KL penalty in the reward.
    """
    returns = scan_back(rollouts.rewards, gamma, rollouts.mask)
    return Estimate(masked_whiten(returns, rollouts.mask), returns)


@torch.no_grad()
def reinforce_plus_plus_baseline(rollouts: Rollouts) -> Estimate:
    """REINFORCE++ with a baseline (arXiv 2501.03262): score minus group mean, whitened over the tokens of the batch.

    A group of one keeps its score.
    """
    scores, rows = outcome_scores(rollouts.rewards, rollouts.mask), grouped(rollouts.groups)
    centred = torch.where(rows.alone(), scores, rows.centred(scores))
    return Estimate(masked_whiten(spread(centred, rollouts.mask), rollouts.mask))


@torch.no_grad()
def gdpo(
    rollouts: Rollouts,
    *,
    weights: Sequence[float] | None = None,
    epsilon: float = 1e-6,
    norm_by_std: bool = True,
    singleton: Singleton = "zero",
) -> Estimate:
    """GDPO (arXiv 2601.05242): weighted sum of the GRPO advantages of each reward component, whitened over the batch.

    Needs `Rollouts.parts` `[D, S]`, in a run the rewards in the order of their names; a reward that a sample does not
    have is 0. `weights` has one value per component, in the same order; None: all are 1.
    """
    parts = required(rollouts, "parts", "gdpo")
    shares = [1.0] * len(parts) if weights is None else list(weights)
    if len(shares) != len(parts):
        raise ConfigError("config.conflict", f"advantage 'gdpo': {len(shares)} weights for {len(parts)} components")
    rows = grouped(rollouts.groups)
    found = parts.new_zeros(parts.shape[1])
    for part, share in zip(parts, shares, strict=True):
        found = found + share * _normalise(part, rows, norm_by_std=norm_by_std, epsilon=epsilon, singleton=singleton)
    return Estimate(masked_whiten(spread(found, rollouts.mask), rollouts.mask))


# ---------------------------------------------------------------- one number per token


@torch.no_grad()
def remax(rollouts: Rollouts) -> Estimate:
    """ReMax (arXiv 2310.10505): undiscounted return minus the score of the greedy response.

    Needs `Rollouts.baselines` `[S]`: one extra greedy rollout per prompt.
    """
    baselines = required(rollouts, "baselines", "remax")
    returns = scan_back(rollouts.rewards, 1.0, rollouts.mask)
    return Estimate(masked(returns - baselines[:, None], rollouts.mask), returns)


@torch.no_grad()
def optimal_token_baseline(
    rollouts: Rollouts, *, handle_zero_tail: bool = True, epsilon: float = 1e-8, off_policy: bool = False
) -> Estimate:
    """Minimum-variance baseline for each token position: `A = G - b` with the undiscounted return G.

    `b_k = sum_i G W / (sum_i W + epsilon)` over the rows of a group that have a k-th trained token. W is the running
    sum of `w = 1 - 2 pi + sum over the vocabulary of pi^2`, the squared norm of the score function of a softmax.
    `handle_zero_tail` sets the baseline to 0 where only the single longest row of a group has tokens left. `off_policy`
    multiplies w by the squared ratio of proximal to behaviour policy (arXiv 2602.17616). A group of one has the
    baseline 0. Needs `Rollouts.proximal` and `square_sums`; `off_policy` also needs `behaviour`.
    """
    mask = rollouts.mask
    name = "optimal_token_baseline"
    proximal = masked(required(rollouts, "proximal", name), mask)
    weights = 1 - 2 * proximal.exp() + masked(required(rollouts, "square_sums", name), mask)
    if off_policy:
        gap = proximal - masked(required(rollouts, "behaviour", name), mask)
        weights = weights * (2 * gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp()
    returns = scan_back(rollouts.rewards, 1.0, mask)
    rows = grouped(rollouts.groups)
    baselines = _place_baseline(returns, masked(weights, mask).cumsum(-1), mask, rows, epsilon)
    if handle_zero_tail:
        baselines = torch.where(_alone_at_the_end(mask, rows), torch.zeros_like(baselines), baselines)
    baselines = torch.where(rows.alone()[:, None], torch.zeros_like(baselines), baselines)
    return Estimate(masked(returns - baselines, mask), returns)


# ---------------------------------------------------------------- helpers


def _normalise(scores: Tensor, rows: Groups, *, norm_by_std: bool, epsilon: float, singleton: Singleton) -> Tensor:
    """Return GRPO's advantage of each row, `[S]`."""
    alone = rows.alone()
    centred = rows.centred(scores)
    if singleton == "score":
        centred = torch.where(alone, scores, centred)
    if not norm_by_std:
        return centred
    deviations = torch.where(alone, torch.ones_like(scores), rows.deviations(scores)[rows.of])
    return centred / (deviations + epsilon)


def _place_baseline(returns: Tensor, weights: Tensor, mask: Tensor, rows: Groups, epsilon: float) -> Tensor:
    """Return the group's weighted mean return at the k-th trained token, for every such token of a row, `[S, T]`."""
    places = (mask.long().cumsum(-1) - 1).clamp(min=0)
    slots = rows.of[:, None] * mask.shape[1] + places
    start = returns.new_zeros(rows.sizes.numel() * mask.shape[1])
    upper = start.index_add(0, slots[mask], (returns * weights)[mask])
    lower = start.index_add(0, slots[mask], weights[mask])
    return (upper / (lower + epsilon))[slots] if slots.numel() else returns


def _alone_at_the_end(mask: Tensor, rows: Groups) -> Tensor:
    """Mark tokens of a group's single longest row beyond the length of its second longest, bool `[S, T]`."""
    lengths = mask.sum(-1)
    longest = rows.extremes(lengths)[1][rows.of]
    ties = rows.sums((lengths == longest).long())[rows.of]
    second = rows.extremes(torch.where(lengths == longest, 0, lengths))[1][rows.of]
    leads = (lengths == longest) & (ties == 1)
    return leads[:, None] & (mask.long().cumsum(-1) > second[:, None])
