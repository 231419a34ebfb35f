"""Divergences of the policy from a teacher, per token.

On sampled tokens the reverse KL is estimated by `learners.algorithms.kl` and becomes an advantage. On the teacher's
likeliest tokens `top_jsd` is exact up to the rest of the vocabulary, which counts as one token.
Example: two tokens of probability 0.5 and 0.25 under the teacher are compared, and the rest of 0.25.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learners.algorithms.tensors import wide

#: Largest log of a sum of probabilities: the rest keeps a little, so that its log is finite.
MOST = -1e-6


def top_jsd(policy: Tensor, teacher: Tensor, *, beta: float = 0.0) -> Tensor:
    """`beta KL(T || M) + (1 - beta) KL(S || M)` with `M = beta T + (1 - beta) S`, in nats `[N]`: generalised
    Jensen-Shannon divergence (GKD, arXiv 2306.13649, equation 1). At 0 it is KL(T || S), at 1 KL(S || T), as there.

    Args:
        policy: log-probs `[N, K]` of K different tokens under the policy S; carries the gradient.
        teacher: log-probs `[N, K]` of the same tokens under the teacher T.
        beta: weight of the teacher in the mixture, 0 to 1.
    """
    student, target = _add_rest(policy), _add_rest(teacher.detach())
    if beta == 0:
        return _kl(target, student)
    if beta == 1:
        return _kl(student, target)
    mixture = torch.logaddexp(student + math.log1p(-beta), target + math.log(beta))
    return beta * _kl(target, mixture) + (1 - beta) * _kl(student, mixture)


def _add_rest(logs: Tensor) -> Tensor:
    """`[N, K + 1]`: with the log of the probability that the K tokens leave."""
    logs = wide(logs)
    total = logs.logsumexp(-1, keepdim=True).clamp(max=MOST)
    return torch.cat((logs, (-torch.expm1(total)).log()), -1)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)
