"""What teachers add to the loss of a micro-batch (`[learner.distillation]`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.sections.teacher import DistillationConfig
from learners.algorithms.kl import kl_estimate, kl_importance_weighted, top_jsd
from learners.algorithms.tensors import masked
from learners.backends.base import Micro


class Taught(NamedTuple):
    """What teachers add to a micro-batch: to advantages and to the loss, `[N]` each, and to the metrics."""

    advantages: Tensor
    loss: Tensor
    sums: dict[str, Tensor]


def read_teacher(
    settings: DistillationConfig, micro: Micro, current: Tensor, proximal: Tensor, weights: Tensor | None = None
) -> Taught | None:
    """Return what teachers add; None without one. `weights`: of the correction for old samples; None: 1.

    The reverse KL is minimized by policy gradient on the sampled tokens. With k1, the gap of the log-probs is the
    advantage of the token, negated, so that the correction for old samples and the clip of the loss apply. k3 depends
    on the policy, too, and is a term of the loss with the same correction, whose gradient is that of the divergence.
    `jsd` is differentiated as it is, on the policy's samples (GKD).
    """
    if micro.teacher is None:
        return None
    known = micro.mask & ~micro.teacher.isnan()
    teacher, coeff = micro.teacher.nan_to_num(), settings.coeff
    zero = torch.zeros_like(teacher)
    gap = kl_estimate(current.detach(), teacher, known, kind="k1")
    sums = {"teacher_kl_sum": gap.sum(), "teacher_tokens": known.sum()}
    if settings.loss == "reverse_kl":
        if settings.estimator == "k3":
            divergence = coeff * kl_importance_weighted(current, proximal, teacher, known)
            return Taught(zero, divergence if weights is None else divergence * weights, sums)
        return Taught(-coeff * kl_estimate(proximal, teacher, known, kind="k1"), zero, sums)
    if micro.top_current is None or micro.top_logprobs is None:
        return Taught(zero, zero, sums)
    divergence = masked(top_jsd(micro.top_current, micro.top_logprobs.nan_to_num(), beta=settings.beta), known)
    return Taught(zero, coeff * divergence, sums | {"teacher_jsd_sum": divergence.detach().sum()})
