"""Policy losses per token; to be minimised after aggregation.

Called by `learners.update` through `registry`; all take the same arguments and return a `TokenLoss`. Guarantees:
1. the loss and its gradient are 0 outside the mask, whatever NaN the inputs hold there;
2. advantages, weights, proximal and behaviour log-probs carry no gradient;
3. no tokens at all: an empty loss that is still connected to the graph, so that every rank runs its collectives.
All tensors are flat over the trained tokens, `[N]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from learners.algorithms.corrections import is_weights, log_ratio, masked


class TokenLoss(NamedTuple):
    """`loss` `[N]` with gradient and `clipped` `[N]` bool: the clipped branch was strictly larger."""

    loss: Tensor
    clipped: Tensor


class LossInputs(NamedTuple):
    """What a loss sees, all `[N]`: log-probs of the sampled token under three policies, advantage, bool mask."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor


class LossSettings(NamedTuple):
    """`clip_low`, `clip_high`: the ratio is clipped to [1 - low, 1 + high]; `dual_clip` bounds negative advantages
    (None: off); `cap` truncates importance weights (None: off)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    cap: float | None = 2.0


def clipped_surrogate(current: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, s: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347) against `old`, with clip-higher and the optional dual clip."""
    ratio = log_ratio(current, old.detach(), mask).exp()
    gain = masked(advantages.detach(), mask)
    plain = -gain * ratio
    clipped = -gain * ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    loss = torch.maximum(plain, clipped)
    if s.dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, -gain * s.dual_clip), loss)
    return TokenLoss(masked(loss, mask), (clipped > plain) & mask)


def decoupled_ppo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """Decoupled PPO (arXiv 2505.24298): PPO against the proximal policy, times the truncated weight of the proximal
    policy over the behaviour policy. Tokens whose weight is truncated stay in the denominator."""
    current, proximal, behaviour, advantages, mask = inputs
    weights = is_weights(proximal, behaviour, mask, upper=settings.cap)
    surrogate = clipped_surrogate(current, proximal, advantages, mask, settings)
    return TokenLoss(surrogate.loss * weights, surrogate.clipped)


def ppo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """PPO against the behaviour policy (bypass): the ratio itself corrects, so no weight is multiplied on top."""
    return clipped_surrogate(inputs.current, inputs.behaviour, inputs.advantages, inputs.mask, settings)


def reinforce(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """`-A * log p`, times the truncated weight of the proximal policy over the behaviour policy."""
    current, proximal, behaviour, advantages, mask = inputs
    weights = is_weights(proximal, behaviour, mask, upper=settings.cap)
    loss = -masked(advantages.detach(), mask) * masked(current, mask) * weights
    return TokenLoss(loss, torch.zeros_like(mask))
