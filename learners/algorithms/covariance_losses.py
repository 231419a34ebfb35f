"""Clip-Cov and KL-Cov (arXiv 2505.22617): restrain the few tokens that would cost most entropy.

The cost of a token is the covariance of its advantage and log-prob over the WHOLE mini-batch. The learner calls
`choose_<name>` once on the flat tokens of the mini-batch and passes each piece its part as `inputs.chosen`, so the
result does not depend on ranks and micro-batches. Without it (None) a loss chooses among the tokens that it sees.
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
    """`(A - mean A) (log p - mean log p)`, `[N]`, without gradient; 0 outside the mask. arXiv 2505.22617."""
    gained, logs = gain(inputs), masked(inputs.current.detach(), inputs.mask)
    parts = (values - masked_mean(values, inputs.mask) for values in (gained, logs))
    return masked(torch.mul(*parts), inputs.mask)


def choose_kl_cov(inputs: LossInputs, *, ratio: float = 2e-4) -> Tensor:
    """The `ratio` of the trained tokens (at least one) with the largest covariance, bool `[N]`; of equals the first."""
    _share("kl_cov", ratio)
    count = int(inputs.mask.sum())
    places = inputs.mask.nonzero()[:, 0]
    order = covariances(inputs)[places].argsort(descending=True, stable=True)
    return _marked(inputs.mask, places[order[: max(1, int(count * ratio))]])


def kl_cov(inputs: LossInputs, *, ratio: float = 2e-4, coeff: float = 0.1) -> TokenLoss:
    """KL-Cov (arXiv 2505.22617): `-A x`, unclipped, plus `coeff |current - proximal|` at the chosen tokens, `[N]`.

    Chosen are the `ratio` of tokens with the largest covariance, see `choose_kl_cov`. Log-ratios are clamped to +-20.
    `clipped`: chosen. Raises `config.type` for a ratio outside 0..1.
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
    """At most the `ratio` of the trained tokens (at least one), drawn from those eligible, bool `[N]`.

    Eligible: covariance between `lower` and `upper`, and PPO does not clip the token already. The draw depends on
    `seed` (the step, say) and on the order of the tokens.
    """
    _share("clip_cov", ratio)
    _, clipped = _surrogate(inputs, clip_low, clip_high)
    found = covariances(inputs)
    places = (inputs.mask & ~clipped & (found > lower) & (found < upper)).nonzero()[:, 0]
    wanted = max(1, int(int(inputs.mask.sum()) * ratio))
    drawn = torch.randperm(places.numel(), generator=torch.Generator().manual_seed(seed))[:wanted]
    return _marked(inputs.mask, places[drawn.to(places.device)])


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
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, 0 at the chosen tokens, `[N]`; they stay in the count.

    Chosen are some tokens of high covariance, see `choose_clip_cov`. `clipped`: by PPO, or chosen. Raises
    `config.type` for a ratio outside 0..1 and for clip bounds that exclude a ratio of 1.
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


def _marked(mask: Tensor, places: Tensor) -> Tensor:
    """True at these places."""
    return torch.zeros_like(mask).index_fill(0, places, True)


def _share(name: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        refuse(name, f"ratio = {ratio}: a share of the tokens, 0 to 1")
