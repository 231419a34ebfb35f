"""Policy losses with one term per token: the clipped ratio of PPO and its variants.

With `d = current - proximal` (clamped to +-20 before `exp`), ratio `x = e^d` and advantage A, the losses per token are:

name        loss                                                        gradient in current
ppo         max(-A x, -A clip(x, 1 - low, 1 + high))                    -A x, 0 where clipped
reinforce   -A current                                                  -A
cispo       -sg(clip(x, 1 - low, 1 + high)) A current                   -A clip(x), also for clipped tokens
aipo        -sg(min(e^(current - behaviour), rho)) A current            -A min(..)
sapo        -A 4/tau sigmoid(tau (x - 1))                               a soft gate around x = 1
dppo_tv/kl  -sg(min(x, cap)) A current, 0 outside the trust region      as cispo, 0 outside
dro         -(A current - beta/2 (current - proximal)^2)                -A + beta d

sg: stop-gradient. Guarantees: those of `losses`. Example: A = 2, x = 1.5 and clip_high 0.2: ppo gives -2.4 with
gradient 0, cispo has the gradient -2.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learners.algorithms.loss_terms import (
    acting,
    bounds,
    clipped_surrogate,
    either,
    finished,
    gain,
    plain_gap,
    ratios,
    refuse,
    trained_logprobs,
)
from learners.algorithms.tensors import masked
from learners.algorithms.types import LossInputs, TokenLoss


def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) of current / proximal, `[N]`.

    A larger `clip_high` is DAPO's clip-higher (arXiv 2503.14476). `dual_clip` > 1 bounds the loss of a negative
    advantage to `-A dual_clip` (arXiv 1912.09729); `delta` > 1 + clip_high does the same with an upper limit on the
    ratio itself (arXiv 2505.07291, two-sided clipping). With the weights of a correction it is decoupled PPO (arXiv
    2110.00641, 2505.24298); with proximal = behaviour it is plain PPO.
    `clipped`: the clipped term is strictly larger; `dual_clipped`: the dual clip took effect. Raises `config.type` for
    bounds that exclude a ratio of 1.
    """
    bounds("ppo", clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        refuse("ppo", f"dual_clip = {dual_clip}: it must be above 1")
    if delta is not None and delta <= 1 + clip_high:
        refuse("ppo", f"delta = {delta}: it must be above 1 + clip_high = {1 + clip_high:g}")
    gained = gain(inputs)
    loss, clipped = clipped_surrogate(ratios(inputs), gained, clip_low=clip_low, clip_high=clip_high, delta=delta)
    if dual_clip is None:
        return finished(inputs, loss, clipped)
    ceiling = -gained * dual_clip
    hit = (gained < 0) & (loss > ceiling) & inputs.mask
    return finished(inputs, torch.where(hit, ceiling, loss), clipped)._replace(dual_clipped=hit)


def reinforce(inputs: LossInputs) -> TokenLoss:
    """`-A log p`, `[N]`, without a ratio: REINFORCE, and the loss of GPG (arXiv 2504.02546) and V-trace."""
    return finished(inputs, -gain(inputs) * trained_logprobs(inputs), torch.zeros_like(inputs.mask))


def cispo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """CISPO (arXiv 2506.13585, equation 4): `-A log p` weighted by the clipped ratio, so every token is trained, `[N]`.

    `clip_low` >= 1: no lower bound. `clipped`: the ratio is outside its bounds.
    """
    if clip_low < 0 or clip_high < 0:
        refuse("cispo", f"clip_low = {clip_low}, clip_high = {clip_high}: they must not be below 0")
    found = ratios(inputs).detach()
    kept = found.clamp(1 - clip_low, 1 + clip_high)
    return finished(inputs, -kept * gain(inputs) * trained_logprobs(inputs), found != kept)


def aipo(inputs: LossInputs, *, rho: float = 5.0) -> TokenLoss:
    """AIPO (LlamaRL, arXiv 2505.24034): `-A log p` weighted by min(current / behaviour, rho), `[N]`; `rho` 2 to 10.

    The ratio to the BEHAVIOUR policy is already the correction: do not add importance weights.
    """
    if rho <= 0:
        refuse("aipo", f"rho = {rho}: it must be above 0")
    found = ratios(inputs._replace(proximal=inputs.behaviour)).detach()
    return finished(inputs, -found.clamp(max=rho) * gain(inputs) * trained_logprobs(inputs), found > rho)


def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """SAPO (arXiv 2511.20347): a sigmoid gate instead of the clip, `[N]`; only for seq-mean-token-mean.

    `tau_pos` is for advantages above 0, `tau_neg` for the others: the larger it is, the faster the gradient vanishes as
    the ratio moves away from 1. Nothing is clipped.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        refuse("sapo", f"tau_pos = {tau_pos}, tau_neg = {tau_neg}: they must be above 0")
    gained, found = gain(inputs), ratios(inputs)
    tau = either(gained > 0, tau_pos, tau_neg, found)
    gate = torch.sigmoid(tau * (found - 1))
    slope = 4 * gate * (1 - gate)  # of the loss, relative to that of -A x
    result = finished(inputs, -gained * (4 / tau) * gate, torch.zeros_like(inputs.mask))
    return result._replace(gated=acting(inputs, slope))


def dppo_tv(
    inputs: LossInputs, *, clip_low: float = 0.15, clip_high: float = 0.15, ratio_cap: float = 20.0
) -> TokenLoss:
    """DPPO with the total-variation trust region (arXiv 2602.04879), `[N]`.

    p and q are the probabilities of the sampled token under current and proximal policy. A token is left out if it
    moved too far in the direction of its advantage: p - q > clip_high (A > 0), p - q < -clip_low (else). Other tokens
    have the weight min(p / q, `ratio_cap`) without gradient. `clipped`: left out.
    """
    new, old = _probabilities(inputs)
    kept = torch.where(gain(inputs) > 0, new - old <= clip_high, new - old >= -clip_low)
    return _trust_region_loss(inputs, kept, ratio_cap)


def dppo_kl(
    inputs: LossInputs, *, clip_low: float = 0.05, clip_high: float = 0.05, ratio_cap: float = 20.0
) -> TokenLoss:
    """DPPO with the trust region of the binary KL divergence (arXiv 2602.04879), `[N]`.

    Like `dppo_tv`, but a token is left out if KL(proximal || current) of the binary event "this token or another" is
    above clip_high (A > 0 and p > q) or clip_low (A <= 0 and p < q).
    """
    new, old = _probabilities(inputs)
    tiny = 1e-8
    moved = old * -plain_gap(inputs).detach()
    other = (1 - old) * ((1 - old + tiny) / (1 - new + tiny)).log()
    kl = moved + other
    kept = torch.where(gain(inputs) > 0, (kl <= clip_high) | (new <= old), (kl <= clip_low) | (new >= old))
    return _trust_region_loss(inputs, kept, ratio_cap)


def dro(inputs: LossInputs, *, beta: float) -> TokenLoss:
    """DRO (arXiv 2405.19107): `-(A log p - beta/2 (current - proximal)^2)`, `[N]`; `beta` > 0 limits the distance."""
    if beta <= 0:
        refuse("dro", f"beta = {beta}: it must be above 0")
    distance = plain_gap(inputs)
    loss = -(gain(inputs) * trained_logprobs(inputs) - beta / 2 * distance * distance)
    return finished(inputs, loss, torch.zeros_like(inputs.mask))


def _probabilities(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return current and proximal probabilities of the sampled token, at most 1, detached; 1 outside the mask."""
    new, old = masked(inputs.current.detach(), inputs.mask), masked(inputs.proximal.detach(), inputs.mask)
    return new.exp().clamp(max=1), old.exp().clamp(max=1)


def _trust_region_loss(inputs: LossInputs, kept: Tensor, ratio_cap: float) -> TokenLoss:
    """Return `-min(x, cap) A log p` where `kept`, else 0, without gradient through the ratio."""
    weight = ratios(inputs).detach().clamp(max=ratio_cap)
    return finished(inputs, -weight * gain(inputs) * masked(trained_logprobs(inputs), kept), ~kept)
