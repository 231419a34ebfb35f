"""Changes rewards before the advantages are estimated: penalties for length and for distance from the reference.

Guarantees:
1. an outcome score is on the last trained token of its row, wherever padding or tool output ends;
2. no gradient flows; NaN outside the mask has no effect, and the result is 0 there;
3. the controller is a pure function: its state is the coefficient, which the caller stores in the checkpoint.

Example: with max_len 100 and buffer_len 20, the lengths 80, 81, 90, 100 get 0, -0.05, -0.5, -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.kl import Kind, kl_estimate
from learners.algorithms.tensors import masked, masked_mean

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


class Penalised(NamedTuple):
    """`rewards` `[S, T]` after the penalty; `kl`: mean over all rows of their mean over tokens, a scalar."""

    rewards: Tensor
    kl: Tensor


def overlong_penalty(lengths: Tensor, *, max_len: int, buffer_len: int, factor: float = 1.0) -> Tensor:
    """Return a soft length penalty, float64 `[S]`, at most 0, to add to the score (DAPO, arXiv 2503.14476, eq. 13).

    `min(-(L - (max_len - buffer_len)) / buffer_len * factor, 0)`: 0 up to `max_len - buffer_len`, then linear to
    `-factor` at `max_len`. `lengths` `[S]`: all tokens of the response, tool output included. Raises `config.conflict`
    unless 0 < buffer_len <= max_len.
    """
    if not 0 < buffer_len <= max_len:
        raise ConfigError(
            "config.conflict",
            f"overlong penalty: buffer_len {buffer_len} must be above 0 and at most max_len {max_len}",
        )
    over = lengths.double() - (max_len - buffer_len)
    return (-over / buffer_len * factor).clamp(max=0)


def kl_penalty(
    rewards: Tensor, proximal: Tensor, reference: Tensor, mask: Tensor, *, coeff: float, kind: Kind | Divergence = "k1"
) -> Penalised:
    """KL penalty in the reward (arXiv 1909.08593, eq. 2): `r - coeff k(proximal - reference)` at trained tokens.

    All tensors are `[S, T]`; `kind`: an estimator of `learners.algorithms.kl`, or a function of both log-probs and the
    mask. Pass the result's `kl` to
    `next_kl_coeff`.
    """
    given = (proximal.detach(), reference.detach(), mask)
    found = kind(*given) if callable(kind) else kl_estimate(*given, kind=kind)
    current = masked_mean(found, mask, -1)
    shaped = masked(masked(rewards.detach(), mask) - coeff * found, mask)
    return Penalised(shaped, current.sum() / max(current.numel(), 1))


def next_kl_coeff(
    coeff: float, measured: float, sequences: int, *, target: float = 0.1, horizon: float = 10000
) -> float:
    """Return the adaptive coefficient after a step (arXiv 1909.08593, section 2.2): `coeff (1 + e n / horizon)`.

    `e = clip(measured / target - 1, -0.2, 0.2)`; n is the number of sequences in the step. Call it after the penalty
    was applied. Raises `config.type` unless target and horizon are above 0.
    """
    if target <= 0 or horizon <= 0:
        raise ConfigError("config.type", f"KL controller: target {target} and horizon {horizon} must be above 0")
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coeff * (1 + error * sequences / horizon)
