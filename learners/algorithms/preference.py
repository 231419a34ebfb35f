"""Losses of pairs and of wins: DPO and its relatives, SPPO, Bradley-Terry reward models, pairs from generated samples.

P pairs, S rows. A log-prob of an answer is the SUM over its trained tokens (`tensors.sequence_sums`). SPIN (arXiv
2401.01335) is `dpo` with the answer of the data as chosen, a sample of the previous policy as rejected and that policy
as reference. Guarantees:
1. a result per pair or row; the caller divides by the count of the whole mini-batch, so pieces add up;
2. only the trained policy's log-probs (or scores) get a gradient;
3. without pairs: an empty loss connected to the graph.

Example: chosen -3, rejected -5, reference -4 and -4, beta 0.1: implicit rewards 0.1 and -0.1, sigmoid loss -log
sigmoid(0.2) = 0.5981, hinge 0.8, ipo (2 - 5)^2 = 9.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import masked, sequence_lengths, sequence_sums, wide

DPOKind = Literal["sigmoid", "ipo", "hinge"]


class PairLoss(NamedTuple):
    """`loss` `[P]` with gradient; rewards of both answers (DPO: implicit ones) `[P]`; `correct` `[P]` bool: the chosen
    answer's is larger."""

    loss: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor
    correct: Tensor


class Pairs(NamedTuple):
    """`chosen` `[2P]` bool: one sample of each pair; `distinct` `[P]` bool: the two scores differ."""

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
    """DPO of answers' log-probs `[P]`; h: the chosen one's log-ratio to the reference less the rejected one's.

    sigmoid: `-(1 - e) log s(beta h) - e log s(-beta h)`, e = `label_smoothing` (arXiv 2305.18290, equation 7); ipo:
    `(h - 1 / (2 beta))^2` (arXiv 2310.12036, equation 17); hinge: `max(0, 1 - beta h)`. Without references the policy's
    own log-probs are the log-ratios. Lengths (tokens, both or none) divide the log-ratios of ipo before anything else;
    the implicit rewards `beta * log-ratio` stay those of sums. Raises `config.type` for an unknown kind, beta <= 0 or a
    label smoothing outside 0..0.5.
    """
    if kind not in ("sigmoid", "ipo", "hinge") or beta <= 0 or not 0 <= label_smoothing <= 0.5:
        raise ConfigError(
            "config.type",
            f"dpo: kind {kind!r} (sigmoid, ipo, hinge), beta {beta} (above 0), "
            f"label_smoothing {label_smoothing} (0 to 0.5)",
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
    else:
        loss = -(1 - label_smoothing) * logsigmoid(beta * apart) - label_smoothing * logsigmoid(-beta * apart)
    rewards = beta * chosen.detach(), beta * rejected.detach()
    return PairLoss(loss, *rewards, rewards[0] > rewards[1])


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
    """The better of two samples of each prompt from interleaved scores `[2P]`; of equals the first is chosen.

    Pairs with equal scores teach nothing: `distinct` says which to keep.
    """
    first, second = scores[0::2], scores[1::2]
    better = first >= second
    return Pairs(torch.stack((better, ~better), -1).flatten(), first != second)


def softmean(values: Tensor, *, beta: float = 1.0) -> Tensor:
    """`log(mean(e^(beta x))) / beta` over all values, a scalar; beta 0 is the mean. Between mean and maximum."""
    found = wide(values)
    if beta == 0:
        return found.mean()
    return (torch.logsumexp(beta * found, 0) - math.log(found.numel())) / beta


def sppo_targets(
    scores: Tensor, *, target: Literal["zero_center", "softmean"] = "zero_center", softmean_beta: float = 1.0
) -> Tensor:
    """What SPPO's log-ratios should be, up to eta, `[S]`: scores are win rates in 0..1 and 1/2 is taken off
    (zero_center, arXiv 2405.00675), or outcome scores less their softmean over the whole batch."""
    found = wide(scores.detach())
    return found - (0.5 if target == "zero_center" else softmean(found, beta=softmean_beta))


def sppo(
    current: Tensor, proximal: Tensor, mask: Tensor, sequences: Tensor, targets: Tensor, *, eta: float = 1.0
) -> Tensor:
    """SPPO (arXiv 2405.00675): `(sum of (current - proximal) - eta target)^2` of each row, `[S]`.

    Log-probs, mask and row numbers are flat, `[N]`; `targets` `[S]`. A row without a trained token gives 0; the loss is
    the sum over the rows that have one, over their number in the whole mini-batch.
    """
    rows = targets.numel()
    apart = masked(current, mask) - masked(proximal.detach(), mask)
    errors = sequence_sums(apart, mask, sequences, rows) - eta * targets.detach()
    return masked(errors * errors, sequence_lengths(mask, sequences, rows) > 0)


def _log_ratio(policy: Tensor, reference: Tensor | None) -> Tensor:
    return wide(policy) if reference is None else wide(policy) - wide(reference.detach())
