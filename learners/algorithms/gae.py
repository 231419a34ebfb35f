"""Advantages from a critic: GAE, its decoupled and length-adaptive forms, and V-trace.

Guarantees:
1. the recursion from right to left skips tokens outside the mask;
2. `Rollouts.bootstrap` is the value after the last token of a truncated response; if it is None, that value is 0;
3. returns are the critic's targets and are never whitened;
4. no gradient flows; NaN outside the mask has no effect.

All of them need `Rollouts.values`; V-trace also needs `proximal` and `behaviour`.
Example: rewards 0, 1 and values 0.5, 0.5 with gamma = lam = 1 give advantages 0.5, 0.5 and returns 1, 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learners.algorithms.tensors import following, masked, masked_whiten, required, scan_back, wide
from learners.algorithms.types import Estimate, Rollouts

LOG_RATIO_LIMIT = 20.0


@torch.no_grad()
def gae(rollouts: Rollouts, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> Estimate:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16).

    `delta_t = r_t + gamma V_next - V_t`, `A_t = delta_t + gamma lam A_next`; returns are `A + V` before whitening.
    """
    return gae_decoupled(rollouts, gamma=gamma, lam_actor=lam, lam_critic=lam, whiten=whiten)


@torch.no_grad()
def gae_decoupled(
    rollouts: Rollouts, *, gamma: float = 1.0, lam_actor: float = 0.95, lam_critic: float = 1.0, whiten: bool = True
) -> Estimate:
    """GAE with separate lambdas for the advantages and for the critic's targets (VC-PPO, arXiv 2503.01491)."""
    actor = torch.full((rollouts.mask.shape[0],), lam_actor, dtype=wide(rollouts.rewards).dtype)
    return _two_lambdas(rollouts, actor, gamma=gamma, lam_critic=lam_critic, whiten=whiten, name="gae")


@torch.no_grad()
def gae_length_adaptive(
    rollouts: Rollouts, *, gamma: float = 1.0, alpha: float = 0.05, lam_critic: float = 1.0, whiten: bool = True
) -> Estimate:
    """GAE whose lambda grows with the length of the response (VAPO, arXiv 2504.05118).

    Responses of at most `1 / alpha` trained tokens have lambda 0.
    """
    actor = adaptive_lambdas(rollouts.mask, alpha=alpha).to(wide(rollouts.rewards).dtype)
    return _two_lambdas(rollouts, actor, gamma=gamma, lam_critic=lam_critic, whiten=whiten, name="gae_length_adaptive")


def adaptive_lambdas(mask: Tensor, *, alpha: float) -> Tensor:
    """Return `clip(1 - 1 / (alpha L), 0, 1)` for each row with L trained tokens, float64 `[S]`; 0 for an empty row."""
    lengths = mask.sum(-1).double()
    return torch.where(lengths > 0, (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(0, 1), 0.0)


@torch.no_grad()
def vtrace(
    rollouts: Rollouts,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
) -> Estimate:
    """V-trace (IMPALA, arXiv 1802.01561, eq. 1) with the ratio of proximal to behaviour policy.

    The advantages already contain the truncated importance weight: use the loss `reinforce` without a correction.
    """
    rewards, mask = rollouts.rewards, rollouts.mask
    values = required(rollouts, "values", "vtrace")
    proximal, behaviour = required(rollouts, "proximal", "vtrace"), required(rollouts, "behaviour", "vtrace")
    last = _bootstrap(rollouts)
    gap = masked(proximal, mask) - masked(behaviour, mask)
    ratio = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    reward, value = masked(rewards, mask), masked(values, mask)
    delta = ratio.clamp(max=rho_bar) * (reward + gamma * following(values, mask, last) - value)
    target = value + scan_back(delta, gamma * lam * ratio.clamp(max=c_bar), mask)
    ahead = reward + gamma * following(target, mask, last) - value
    return Estimate(masked(ratio.clamp(max=pg_rho_bar) * ahead, mask), masked(target, mask))


def _bootstrap(rollouts: Rollouts) -> Tensor:
    rewards = wide(rollouts.rewards)
    return rewards.new_zeros(rewards.shape[0]) if rollouts.bootstrap is None else wide(rollouts.bootstrap)


def _two_lambdas(
    rollouts: Rollouts, actor: Tensor, *, gamma: float, lam_critic: float, whiten: bool, name: str
) -> Estimate:
    """Compute GAE with each row's lambda `actor` `[S]` for the advantages and with `lam_critic` for the returns."""
    mask = rollouts.mask
    values = required(rollouts, "values", name)
    value = masked(values, mask)
    ahead = following(values, mask, _bootstrap(rollouts))
    delta = masked(rollouts.rewards, mask) + gamma * ahead - value
    advantages = scan_back(delta, gamma * actor[:, None], mask)
    critic = scan_back(delta, gamma * lam_critic, mask)
    return Estimate(masked_whiten(advantages, mask) if whiten else advantages, masked(critic + value, mask))
