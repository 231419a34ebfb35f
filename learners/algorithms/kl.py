"""Estimates of the divergence from a reference policy, from log-probs of sampled tokens or from full distributions.

With `delta = log p - log p_ref` of the sampled token:

kind       value                 gradient in log p      note
k1         delta                 1                      unbiased value; its gradient is 0 in expectation
abs        |delta|               sign(delta)
k2         delta^2 / 2           delta                  biased value; unbiased gradient on on-policy tokens
k3         e^-delta + delta - 1  1 - e^-delta           unbiased value, never negative (arXiv 2402.03300, equation 4)
k1+, abs+, k2+, k3+              delta                  value of the kind, gradient of k2 (straight-through)

`kl`, `mse` and `low_var_kl` are aliases of k1, k2 and k3. Guarantees:
1. values outside the mask, NaN included, have no effect and no gradient; the result is 0 there;
2. the reference gets no gradient;
3. k3 does not overflow: delta is clamped to +-20 and the result to +-10, and the gradient is 0 where either clamp acts;
4. results are float32 or wider; k3 stays precise for a small delta, because it subtracts no numbers near 1.
Example: delta 3 gives k1 3, k2 4.5, k3 2.0498; delta -25 gives k3 10 with gradient 0.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import masked, wide

DELTA_LIMIT = 20.0
K3_LIMIT = 10.0
MOST = -1e-6  # largest log of a sum of probabilities: the rest keeps a little, so that its log is finite

Kind = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+"
]
KINDS: tuple[str, ...] = get_args(Kind)
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_estimate(log_probs: Tensor, reference: Tensor, mask: Tensor | None = None, *, kind: Kind = "k3") -> Tensor:
    """Estimate KL(policy || reference) in nats per token, from log-probs of the sampled token under both; any shape.

    `log_probs` may carry a gradient, `reference` is detached. Without a mask every token counts. Tokens must be samples
    of the policy itself; for tokens of an older policy use `kl_importance_weighted`. Raises `config.type` for an
    unknown kind. arXiv 2402.03300 (equation 4).
    """
    if kind not in KINDS:
        raise ConfigError("config.type", f"KL estimator {kind!r} is not known: one of {', '.join(KINDS)}")
    valid = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    delta = masked(log_probs, valid) - masked(reference.detach(), valid)
    name = kind.removesuffix("+")
    value = _value(delta, _ALIASES.get(name, name))
    if kind.endswith("+"):
        square = _value(delta, "k2")
        value = value.detach() + (square - square.detach())
    return masked(value, valid)


def kl_importance_weighted(current: Tensor, proximal: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """`k3 * e^(current - proximal)`: KL(current || reference) from tokens of the proximal policy, unbiased, any shape.

    The gradient flows through both factors, so it is the gradient of the divergence itself; nothing is clamped. arXiv
    2512.02556 (unbiased KL estimate).
    """
    new = masked(current, mask)
    delta = new - masked(reference.detach(), mask)
    ratio = (new - masked(proximal.detach(), mask)).exp()
    return masked((torch.expm1(-delta) + delta) * ratio, mask)


def kl_full(logits: Tensor, reference_logits: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`sum_v p log(p / p_ref)` over the vocabulary, in nats: logits `[..., V]`, mask and result `[...]`.

    Exact, but needs the full logits of both policies; the reference is detached.
    """
    valid = mask.unsqueeze(-1)
    policy = (masked(logits, valid) / temperature).log_softmax(-1)
    other = (masked(reference_logits.detach(), valid) / temperature).log_softmax(-1)
    # A token that the policy cannot sample (-inf) adds 0 instead of 0 * -inf.
    possible = policy > -torch.inf
    terms = masked(policy.exp() * (masked(policy, possible) - masked(other, possible)), possible)
    return masked(terms.sum(-1), mask)


def _value(delta: Tensor, name: str) -> Tensor:
    """Return the value of k1, abs, k2 or k3."""
    if name == "k1":
        return delta
    if name == "abs":
        return delta.abs()
    if name == "k2":
        return wide(delta) * delta / 2
    close = delta.clamp(-DELTA_LIMIT, DELTA_LIMIT)
    return (torch.expm1(-close) + close).clamp(-K3_LIMIT, K3_LIMIT)


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
