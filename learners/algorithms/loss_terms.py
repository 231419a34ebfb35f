"""Terms shared by policy losses: ratio, advantage, clipped surrogate, and the last step of a loss.

Guarantees:
1. every term is masked before any arithmetic, in float32 or wider;
2. only `inputs.current` gets a gradient;
3. `finished` multiplies the loss by the weights of the correction, so every loss uses them.

Example: current -1.0 and proximal -1.5 give the ratio e^0.5 = 1.6487.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.corrections import log_ratio
from learners.algorithms.tensors import masked, sequence_means
from learners.algorithms.types import LossInputs, TokenLoss


def trained_logprobs(inputs: LossInputs) -> Tensor:
    """Return the current log-probs, `[N]`, with gradient; 0 outside the mask."""
    return masked(inputs.current, inputs.mask)


def gain(inputs: LossInputs) -> Tensor:
    """Return the advantages, `[N]`, without gradient; 0 outside the mask."""
    return masked(inputs.advantages.detach(), inputs.mask)


def plain_gap(inputs: LossInputs) -> Tensor:
    """Return current - proximal, `[N]`, not clamped, with the gradient of current; 0 outside the mask."""
    return trained_logprobs(inputs) - masked(inputs.proximal.detach(), inputs.mask)


def gap(inputs: LossInputs) -> Tensor:
    """Return current - proximal, `[N]`, clamped to +-20, with gradient inside the clamp; 0 outside the mask."""
    return log_ratio(inputs.current, inputs.proximal.detach(), inputs.mask)


def ratios(inputs: LossInputs) -> Tensor:
    """Return exp of `gap`, `[N]`; 1 outside the mask."""
    return gap(inputs).exp()


def approx_kl(inputs: LossInputs) -> Tensor:
    """Return proximal - current, `[N]`, without gradient: its masked mean estimates KL(proximal || current)."""
    return -gap(inputs).detach()


def either(condition: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    """Return `one` where the condition holds, else `other`, `[N]`, in the dtype of `like` instead of float32."""
    return torch.where(condition, like.new_tensor(one), like.new_tensor(other))


def clipped_surrogate(
    found: Tensor, gained: Tensor, *, clip_low: float, clip_high: float, delta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's maximum of the plain and the clipped term, and where the clipped term is strictly larger."""
    plain = -gained * (found if delta is None else found.clamp(max=delta))
    clipped = -gained * found.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def measure_from_behaviour(inputs: LossInputs, *, rows: bool = False) -> LossInputs:
    """Return inputs with which a loss limits the distance of current from the BEHAVIOUR policy.

    Its ratio becomes current / behaviour. The weights are divided by proximal / behaviour, of each token or, for losses
    with one ratio per row, of the row's geometric mean: so a token that the limit leaves alone has the same gradient as
    before, and the correction still bounds it.
    """
    apart = log_ratio(inputs.proximal.detach(), inputs.behaviour, inputs.mask)
    if rows:
        apart = masked(sequence_means(apart, inputs.mask, inputs.sequences)[inputs.sequences], inputs.mask)
    weights = torch.ones_like(apart) if inputs.weights is None else masked(inputs.weights.detach(), inputs.mask)
    return inputs._replace(proximal=inputs.behaviour, weights=weights * (-apart).exp())


#: A smooth weight that differs from 1 by more than this counts as acting.
GATE_EPSILON = 0.01


def acting(inputs: LossInputs, weight: Tensor) -> Tensor:
    """Return where a smooth weight `[N]` changes the gradient by more than 1 %, bool `[N]`."""
    return ((weight.detach() - 1).abs() > GATE_EPSILON) & inputs.mask


def finished(inputs: LossInputs, loss: Tensor, clipped: Tensor) -> TokenLoss:
    """Multiply the loss by the weights of the correction; it is 0 outside the mask."""
    if inputs.weights is not None:
        loss = loss * masked(inputs.weights.detach(), inputs.mask)
    return TokenLoss(masked(loss, inputs.mask), clipped & inputs.mask)


def bounds(name: str, low: float, high: float) -> None:
    """Raise `config.type` if [1 - low, 1 + high] is not an interval around a ratio of 1."""
    if not (0 <= low <= 1 and high >= 0):
        refuse(name, f"clip_low = {low}, clip_high = {high}: they must satisfy 0 <= clip_low <= 1 and clip_high >= 0")


def refuse(name: str, why: str) -> NoReturn:
    """Raise `config.type` for an invalid option."""
    raise ConfigError("config.type", f"loss {name!r}: {why}")
