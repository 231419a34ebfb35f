"""The critic's part of a training step: its loss, its update beside the policy's, its metrics.

`learners.step.batch_passes` has computed
the values of all samples before the first update, and returns from them on the whole batch. Guarantees:
1. policy and critic are updated by the same mini-batches, both or neither: a loss or gradient of either that is not
   finite changes no weight of the two;
2. the clipped value loss compares with the values of the start of the step, however many mini-batches came before;
3. in the first `critic_warmup` steps of a run the critic alone is trained: the policy's gradients are computed, so that
   its metrics and its poison are seen, and forgotten (`lr` is 0). A step whose values explain `critic_warmup_until` of
   the variance of its returns is the last of them, for good: checkpoints know;
4. sums of tokens add up over micro-batches, mini-batches and ranks: no metric depends on the cut.

Example: returns 1, 1, 0, 0 and values 0.8, 0.8, 0.2, 0.2: explained variance 1 - 0.04 / 0.25 = 0.84.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asyncrl.config import CriticConfig, LearnerConfig
from asyncrl.errors import ConfigError
from learners.algorithms.aggregation import Denominators, aggregate
from learners.algorithms.tensors import masked
from learners.algorithms.values import explained_variance, value_loss
from learners.backends.base import Backend, Critic, LossFunction, Micro
from learners.batch.micro_batches import Minibatch
from learners.gang.gang import Gang
from learners.step.guarded_backward import backward

if TYPE_CHECKING:
    from learners.step.batch_passes import Pieces, Prepared


class CriticStep:
    """The critic during one step, on one rank. `lr` of this step; `alone`: the policy is not trained in it."""

    def __init__(
        self,
        critic: Critic,
        values: Pieces,
        returns: Pieces,
        *,
        gang: Gang,
        config: CriticConfig,
        lr: float,
        alone: bool = False,
    ) -> None:
        self.alone = alone
        self._critic = critic
        self._values = values
        self._returns = returns
        self._gang = gang
        self._config = config
        self._lr = lr
        self._norm = 0.0
        self._found: dict[str, float] = {}  # of the mini-batch under way
        self._totals: dict[str, float] = {}  # of those that were applied
        self._norms: list[float] = []

    def gradients(self, part: Minibatch, place: int) -> str:
        """Forward and backward of mini-batch `place`, clipped; what broke on any rank. Collective."""
        loss = loss_function(
            self._values[place], self._returns[place], Denominators(part.tokens, part.sequences), self._config
        )
        self._found, why = backward(self._critic.train, part.micro, loss, gang=self._gang)
        if why:
            return f"critic: {why}"
        self._norm = self._critic.clip(self._config.max_grad_norm)
        return "" if math.isfinite(self._norm) else f"critic: loss: the norm of the gradient is {self._norm}"

    def end(self, *, keep: bool) -> None:
        """Update with the gradients of the mini-batch, or forget them."""
        if not keep:
            self._critic.discard()
            return
        self._critic.apply(self._lr)
        for name, value in self._found.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
        self._norms.append(self._norm)

    def metrics(self) -> dict[str, float]:
        """Of the updates so far, by catalogue name; empty without any."""
        if not self._norms:
            return {}
        sums = self._totals
        return {
            "value_loss": sums["loss"] / len(self._norms),
            "value_clip_share": sums["clipped_sum"] / max(sums["tokens_sum"], 1.0),
            "value_mean": sums["value_sum"] / max(sums["tokens_sum"], 1.0),
            "return_mean": sums["return_sum"] / max(sums["tokens_sum"], 1.0),
            "explained_variance": explained_variance(sums),
            "critic_grad_norm": max(self._norms),
            "critic_lr": self._lr,
            "critic_alone": float(self.alone),
        }


def critic_step(
    ready: Prepared, *, backend: Backend, gang: Gang, config: LearnerConfig, lr: float, step: int, warm: bool = False
) -> CriticStep | None:
    """The critic's part of this step; None where the estimator needs no values. `warm`: its warm-up has ended early.

    Raises:
        ConfigError: the estimator took values and gave no returns; the critic would never learn.
    """
    if ready.values is None or backend.critic is None:
        return None
    if ready.returns is None:
        name = config.algorithm.advantage
        raise ConfigError(
            "config.type",
            f"advantage {name!r} needs a critic and gives no targets for it: set Estimate.returns",
            where="learner.algorithm.advantage",
        )
    alone = step <= config.critic.critic_warmup and not warm
    return CriticStep(backend.critic, ready.values, ready.returns, gang=gang, config=config.critic, lr=lr, alone=alone)


def is_warm(metrics: Mapping[str, float], config: CriticConfig) -> bool:
    """Whether a step with these metrics ends the warm-up early (VC-PPO, arXiv 2503.01491, waits for a high explained
    variance). Those of a step are equal on every rank.

    >>> is_warm({"critic_alone": 1.0, "explained_variance": 0.4}, CriticConfig(critic_warmup_until=0.3))
    True
    """
    until = config.critic_warmup_until
    return bool(until and metrics.get("critic_alone") and metrics["explained_variance"] >= until)


def loss_function(
    values: Sequence[Tensor], returns: Sequence[Tensor], denominators: Denominators, config: CriticConfig
) -> LossFunction:
    """The clipped value loss of a micro-batch as `Critic.train` wants it; `values` are those of the step's start."""
    cliprange = None if config.value_clip == "off" else float(config.value_clip)

    def loss(predictions: Tensor, zeros: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        old, targets = values[number], returns[number]
        found = value_loss(predictions, old, targets, micro.mask, cliprange=cliprange)
        value = aggregate(found.loss, micro.mask, micro.sequences, mode=config.aggregation, denominators=denominators)
        return value, _sums(old, targets, found.clipped, micro.mask)

    return loss


@torch.no_grad()
def _sums(old: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Over the trained tokens, float64: what `explained` and the means need."""
    value, target = masked(old, mask).double(), masked(returns, mask).double()
    left = target - value
    return {
        "tokens_sum": mask.sum(),
        "clipped_sum": clipped.sum(),
        "value_sum": value.sum(),
        "return_sum": target.sum(),
        "return_square_sum": target.square().sum(),
        "left_sum": left.sum(),
        "left_square_sum": left.square().sum(),
    }
