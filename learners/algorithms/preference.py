"""Preference losses: DPO and its variants, SimPO, ORPO, KTO, SPPO, Bradley-Terry reward models, pairs of samples.

There are P pairs or S rows. The log-prob of an answer is the SUM over its trained tokens (`tensors.sequence_sums`).
SPIN (arXiv 2401.01335) is `dpo` with the answer of the data set as chosen, a sample of the previous policy as rejected
and that policy as reference (preset `spin`). Guarantees:
1. there is one result per pair or row; the caller divides by the count of the whole mini-batch, so pieces add up;
2. only the trained policy's log-probs (or scores) get a gradient;
3. without pairs the loss is empty but connected to the autograd graph.

Example: chosen -3, rejected -5, references -4 and -4 and beta 0.1 give implicit rewards 0.1 and -0.1; the sigmoid loss
is -log sigmoid(0.2) = 0.5981, hinge 0.8, ipo (2 - 5)^2 = 9.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import masked, sequence_lengths, sequence_sums, wide

DPOKind = Literal["sigmoid", "ipo", "hinge", "robust"]
NEARLY_CERTAIN = -1e-6  # log-prob above which odds are those of this one: they would be infinite


class PairLoss(NamedTuple):
    """`loss` `[P]` with gradient; rewards of both answers `[P]` (DPO: the implicit ones); `correct` `[P]` bool: the
    chosen answer has the larger reward.
    """

    loss: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor
    correct: Tensor


class RowLoss(NamedTuple):
    """`loss` `[S]` with gradient; `reward` `[S]`: the implicit ones."""

    loss: Tensor
    reward: Tensor


class Pairs(NamedTuple):
    """`chosen` `[2P]` bool: True at the chosen sample of each pair; `distinct` `[P]` bool: the two scores differ."""

    chosen: Tensor
    distinct: Tensor


def dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
) -> PairLoss:
    """DPO from the answers' log-probs `[P]`; h: the chosen log-ratio to the reference minus the rejected one.

    sigmoid: `-(1 - e) log s(beta h) - e log s(-beta h)`, e = `label_smoothing` (arXiv 2305.18290, equation 7); robust:
    `(-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)`, unbiased if a share e of the labels is wrong (arXiv
    2403.00409, equation 12); ipo: `(h - 1 / (2 beta))^2` (arXiv 2310.12036, equation 17); hinge: `max(0, 1 - beta h)`.
    Without references, log-ratios are the policy's own log-probs. Lengths (in tokens, both or none) divide the
    log-ratios for ipo; the implicit rewards `beta * log-ratio` are still those of the sums. Raises `config.type` for an
    unknown kind, beta <= 0 or a label smoothing outside 0..0.5 (robust: 0.5 too).
    """
    allowed = 0 <= label_smoothing <= 0.5 and not (kind == "robust" and label_smoothing == 0.5)
    if kind not in get_args(DPOKind) or beta <= 0 or not allowed:
        raise ConfigError(
            "config.type",
            f"dpo: kind {kind!r} (must be one of {', '.join(get_args(DPOKind))}), beta {beta} (must be above 0), "
            f"label_smoothing {label_smoothing} (must be 0 to 0.5, for robust below it)",
        )
    chosen, rejected = _log_ratio(policy_chosen, ref_chosen), _log_ratio(policy_rejected, ref_rejected)
    good, bad = chosen, rejected
    if kind == "ipo" and chosen_lengths is not None and rejected_lengths is not None:
        good, bad = chosen / chosen_lengths.clamp(min=1), rejected / rejected_lengths.clamp(min=1)
    apart = good - bad
    if kind == "ipo":
        loss = (apart - 1 / (2 * beta)) ** 2
    elif kind == "hinge":
        loss = torch.relu(1 - beta * apart)
    elif kind == "robust":
        right, wrong = -logsigmoid(beta * apart), -logsigmoid(-beta * apart)
        loss = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    else:
        loss = -(1 - label_smoothing) * logsigmoid(beta * apart) - label_smoothing * logsigmoid(-beta * apart)
    rewards = beta * chosen.detach(), beta * rejected.detach()
    return PairLoss(loss, *rewards, rewards[0] > rewards[1])


def simpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """SimPO (arXiv 2405.14734, equation 6): `-log s(beta (a_w - a_l) - gamma)`, all `[P]`; no reference.

    `a`: mean log-prob of an answer's trained tokens, from the sum and the number of tokens. `label_smoothing` as in
    `dpo`. The rewards are `beta a`.
    """
    good, bad = wide(policy_chosen) / chosen_lengths.clamp(min=1), wide(policy_rejected) / rejected_lengths.clamp(min=1)
    apart = beta * (good - bad) - gamma
    loss = -(1 - label_smoothing) * logsigmoid(apart) - label_smoothing * logsigmoid(-apart)
    return PairLoss(loss, beta * good.detach(), beta * bad.detach(), good > bad)


def orpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 0.1,
) -> PairLoss:
    """ORPO (arXiv 2403.07691, equations 6 and 7): `-a_w - beta log s(log odds(a_w) - log odds(a_l))`, all `[P]`.

    `a`: mean log-prob of an answer's trained tokens; `log odds(a) = a - log(1 - e^a)`. `beta` is the paper's lambda. No
    reference. The rewards are `beta a`.
    """
    good, bad = wide(policy_chosen) / chosen_lengths.clamp(min=1), wide(policy_rejected) / rejected_lengths.clamp(min=1)
    loss = -good - beta * logsigmoid(_log_odds(good) - _log_odds(bad))
    return PairLoss(loss, beta * good.detach(), beta * bad.detach(), good > bad)


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> RowLoss:
    """KTO (arXiv 2402.01306, equations 7 and 8): `w_d (1 - s(beta (r - z)))` of a desirable answer, `w_u (1 - s(beta
    (z - r)))` of an undesirable one, all `[S]`; r: log-ratio of the answer to the reference.

    `desirable` `[S]` bool. `kl`: mean log-ratio of answers to the prompts of other rows, a scalar; z is it, at least 0,
    without gradient. The paper's form lambda - v differs by a constant. The rewards are `beta r`.
    """
    ratio = _log_ratio(policy, reference)
    apart = beta * (ratio - wide(kl.detach()).clamp(min=0))
    good, bad = desirable_weight * torch.sigmoid(-apart), undesirable_weight * torch.sigmoid(apart)
    return RowLoss(torch.where(desirable, good, bad), beta * ratio.detach())


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center_coeff: float = 0.0
) -> PairLoss:
    """`-log s(r_chosen - r_rejected - margin) + center_coeff (r_chosen + r_rejected)^2`, all `[P]`.

    The scores are the head's outputs at the last token. Bradley-Terry: arXiv 1706.03741 (equation 1), margin: arXiv
    2307.09288 (equation 2), centring: arXiv 2312.09244.
    """
    good, bad = wide(chosen), wide(rejected)
    distance = good - bad if margin is None else good - bad - margin.detach()
    loss = -logsigmoid(distance) + center_coeff * (good + bad) ** 2
    return PairLoss(loss, good.detach(), bad.detach(), good > bad)


def online_pairs(scores: Tensor) -> Pairs:
    """Choose the better of each prompt's two samples from interleaved scores `[2P]`; the first of equal ones.

    Pairs with equal scores have no training signal: `distinct` marks the pairs to keep.
    """
    first, second = scores[0::2], scores[1::2]
    better = first >= second
    return Pairs(torch.stack((better, ~better), -1).flatten(), first != second)


def softmean(values: Tensor, *, beta: float = 1.0) -> Tensor:
    """Return `log(mean(e^(beta x))) / beta` over all values, a scalar between mean and maximum; the mean for beta 0."""
    found = wide(values)
    if beta == 0:
        return found.mean()
    return (torch.logsumexp(beta * found, 0) - math.log(max(found.numel(), 1))) / beta


def sppo_targets(
    scores: Tensor, *, target: Literal["zero_center", "softmean"] = "zero_center", softmean_beta: float = 1.0
) -> Tensor:
    """Return the targets of SPPO's log-ratios before the factor eta, `[S]`: win rates in 0..1 minus 1/2 (zero_center,
    arXiv 2405.00675), or outcome scores minus their softmean over the whole batch.
    """
    found = wide(scores.detach())
    return found - (0.5 if target == "zero_center" else softmean(found, beta=softmean_beta))


def sppo(
    current: Tensor, proximal: Tensor, mask: Tensor, sequences: Tensor, targets: Tensor, *, eta: float = 1.0
) -> Tensor:
    """SPPO (arXiv 2405.00675): `(sum of (current - proximal) - eta target)^2` of each row, `[S]`.

    Log-probs, mask and row numbers are flat, `[N]`; `targets` `[S]`. A row without a trained token gives 0; the loss is
    the sum over the rows that have one, divided by their number in the whole mini-batch.
    """
    rows = targets.numel()
    apart = masked(current, mask) - masked(proximal.detach(), mask)
    errors = sequence_sums(apart, mask, sequences, rows) - eta * targets.detach()
    return masked(errors * errors, sequence_lengths(mask, sequences, rows) > 0)


def _log_odds(log_prob: Tensor) -> Tensor:
    """Return `log(p / (1 - p))`, precise for p near 0 and near 1 (Maechler 2012, equation 7)."""
    found = log_prob.clamp(max=NEARLY_CERTAIN)
    near_one = found > -math.log(2)
    small, large = found.where(near_one, -1.0), found.where(~near_one, -1.0)  # no gradient of the other branch
    return found - torch.where(near_one, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))


def _log_ratio(policy: Tensor, reference: Tensor | None) -> Tensor:
    return wide(policy) if reference is None else wide(policy) - wide(reference.detach())
