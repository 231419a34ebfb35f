"""Losses of pairs: DPO and its variants, and the Bradley-Terry loss of reward models.

P pairs. A log-prob of an answer is the SUM over its trained tokens (`tensors.sequence_sums`). SPIN (arXiv
2401.01335) is `dpo` with the answer of the data as chosen, a sample of the previous policy as rejected and that policy
as reference. Guarantees:
1. one result per pair; the caller divides by the count of the whole mini-batch, so pieces add up;
2. only the trained policy's log-probs (or scores) get a gradient;
3. without pairs: an empty loss connected to the graph.

Example: chosen -3, rejected -5, reference -4 and -4, beta 0.1: implicit rewards 0.1 and -0.1, sigmoid loss -log
sigmoid(0.2) = 0.5981, hinge 0.8, ipo (2 - 5)^2 = 9.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import wide

DPOKind = Literal["sigmoid", "ipo", "hinge"]


class PairLoss(NamedTuple):
    """`loss` `[P]` with gradient; rewards of both answers (DPO: implicit ones) `[P]`; `correct` `[P]` bool: the chosen
    answer's is larger."""

    loss: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor
    correct: Tensor


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


def _log_ratio(policy: Tensor, reference: Tensor | None) -> Tensor:
    return wide(policy) if reference is None else wide(policy) - wide(reference.detach())
