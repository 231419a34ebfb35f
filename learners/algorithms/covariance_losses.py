"""Clip-Cov and KL-Cov (arXiv 2505.22617): restrict the update of the few tokens that reduce entropy most.

These are tokens with a high covariance of advantage and log-prob over the WHOLE mini-batch. The learner calls
`choose_<name>` once on the flat tokens of the mini-batch and passes each piece its part as `inputs.chosen`, so the
result does not depend on ranks and micro-batches. If it is None, a loss chooses among the tokens that it receives.
Guarantees: those of `losses`; a choice lies inside the mask, has no gradient and depends only on inputs, options and
seed.

Example: advantages 1, -1, 0 and log-probs -1, -3, -2 have the covariances 1, 1, 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learners.algorithms.loss_terms import bounds, clipped_surrogate, finished, gain, gap, ratios, refuse
from learners.algorithms.tensors import masked, masked_mean
from learners.algorithms.types import LossInputs, TokenLoss


def covariances(inputs: LossInputs) -> Tensor:
    """Return `(A - mean A) (log p - mean log p)` (arXiv 2505.22617), `[N]`, without gradient; 0 outside the mask."""
    gained, logs = gain(inputs), masked(inputs.current.detach(), inputs.mask)
    parts = (values - masked_mean(values, inputs.mask) for values in (gained, logs))
    return masked(torch.mul(*parts), inputs.mask)


def choose_kl_cov(inputs: LossInputs, *, ratio: float = 2e-4) -> Tensor:
    """Mark the share `ratio` of trained tokens (at least 1) with the largest covariance, bool `[N]`; first of ties."""
    _share("kl_cov", ratio)
    count = int(inputs.mask.sum())
    places = inputs.mask.nonzero()[:, 0]
    order = covariances(inputs)[places].argsort(descending=True, stable=True)
    return _mark(inputs.mask, places[order[: max(1, int(count * ratio))]])


def kl_cov(inputs: LossInputs, *, ratio: float = 2e-4, coeff: float = 0.1) -> TokenLoss:
    """KL-Cov (arXiv 2505.22617): `-A x`, unclipped, plus `coeff |current - proximal|` at the chosen tokens, `[N]`.

    x is current / proximal, its log clamped to +-20. `choose_kl_cov` chooses the share `ratio` of tokens with the
    largest covariance; `clipped` marks them. Raises `config.type` for a ratio outside 0..1.
    """
    chosen = choose_kl_cov(inputs, ratio=ratio) if inputs.chosen is None else inputs.chosen & inputs.mask
    apart = gap(inputs)
    return finished(inputs, -gain(inputs) * apart.exp() + coeff * masked(apart.abs(), chosen), chosen)


def choose_clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """Draw at most the share `ratio` of the trained tokens (at least one) from the eligible ones, bool `[N]`.

    A token is eligible if its covariance is between `lower` and `upper` and PPO does not already clip it. The draw
    depends on `seed` (for example the step) and on the order of the tokens.
    """
    _share("clip_cov", ratio)
    _, clipped = _surrogate(inputs, clip_low, clip_high)
    found = covariances(inputs)
    places = (inputs.mask & ~clipped & (found > lower) & (found < upper)).nonzero()[:, 0]
    wanted = max(1, int(int(inputs.mask.sum()) * ratio))
    drawn = torch.randperm(places.numel(), generator=torch.Generator().manual_seed(seed))[:wanted]
    return _mark(inputs.mask, places[drawn.to(places.device)])


def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    seed: int = 0,
) -> TokenLoss:
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, `[N]`, 0 at the chosen tokens; they still count.

    `choose_clip_cov` chooses some tokens of high covariance. `clipped` marks these and the tokens that PPO clips.
    Raises `config.type` for a ratio outside 0..1 and for clip bounds that exclude a ratio of 1.
    """
    bounds("clip_cov", clip_low, clip_high)
    chosen = inputs.chosen
    if chosen is None:
        chosen = choose_clip_cov(
            inputs, clip_low=clip_low, clip_high=clip_high, ratio=ratio, lower=lower, upper=upper, seed=seed
        )
    loss, clipped = _surrogate(inputs, clip_low, clip_high)
    return finished(inputs, masked(loss, ~chosen), clipped | chosen)


def _surrogate(inputs: LossInputs, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    return clipped_surrogate(ratios(inputs), gain(inputs), clip_low=clip_low, clip_high=clip_high)


def _mark(mask: Tensor, places: Tensor) -> Tensor:
    """Return a mask that is True at these places."""
    return torch.zeros_like(mask).index_fill(0, places, True)


def _share(name: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        refuse(name, f"ratio = {ratio}: it must be a share of the tokens, 0 to 1")
