"""The critic in a training step: loss, update and metrics. `learners.step.batch_passes` computes values and returns.

Guarantees:
1. the clipped value loss compares with the values at the start of the step, also in later mini-batches;
2. in the first `critic_warmup` steps only the critic is trained (`lr` is 0): the policy's gradients are computed, for
   metrics and to find bad groups, and discarded. A step whose values explain `critic_warmup_until` of the variance of
   its returns ends the warm-up for good; checkpoints record it.

Example: returns 1, 1, 0, 0 and values 0.8, 0.8, 0.2, 0.2: explained variance 1 - 0.04 / 0.25 = 0.84.
"""

from __future__ import annotations

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
from learners.step.companions import CompanionStep

if TYPE_CHECKING:
    from learners.step.batch_passes import Pieces, Prepared


class CriticStep(CompanionStep):
    """The critic during one step, on one rank. `alone`: the policy is not trained in it."""

    kind = "critic"

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
        super().__init__(critic, gang=gang, max_norm=config.max_grad_norm, lr=lr)
        self.alone = alone
        self._values = values
        self._returns = returns
        self._config = config

    def loss(self, part: Minibatch, place: int) -> LossFunction:
        counts = Denominators(part.tokens, part.sequences)
        return loss_function(self._values[place], self._returns[place], counts, self._config)

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        tokens = max(sums["tokens_sum"], 1.0)
        return {
            "value_loss": sums["loss"] / len(self._norms),
            "value_clip_share": sums["clipped_sum"] / tokens,
            "value_mean": sums["value_sum"] / tokens,
            "return_mean": sums["return_sum"] / tokens,
            "explained_variance": explained_variance(sums),
            "critic_grad_norm": max(self._norms),
            "critic_lr": self._lr,
            "critic_alone": float(self.alone),
        }


def critic_step(
    ready: Prepared, *, backend: Backend, gang: Gang, config: LearnerConfig, lr: float, step: int, warm: bool = False
) -> CriticStep | None:
    """Return the critic's part of this step; None if the estimator needs no values. `warm`: its warm-up ended early.

    Raises:
        ConfigError: the estimator returned no targets, so the critic would never learn.
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
    """Whether these metrics end the warm-up early (VC-PPO, arXiv 2503.01491, waits for a high explained variance).

    >>> is_warm({"critic_alone": 1.0, "explained_variance": 0.4}, CriticConfig(critic_warmup_until=0.3))
    True
    """
    until = config.critic_warmup_until
    return bool(until and metrics.get("critic_alone") and metrics["explained_variance"] >= until)


def loss_function(
    values: Sequence[Tensor], returns: Sequence[Tensor], denominators: Denominators, config: CriticConfig
) -> LossFunction:
    """Return the clipped value loss for `Critic.train`; `values` are those of the start of the step."""
    cliprange = None if config.value_clip == "off" else float(config.value_clip)

    def loss(predictions: Tensor, zeros: Tensor, micro: Micro, number: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        old, targets = values[number], returns[number]
        found = value_loss(predictions, old, targets, micro.mask, cliprange=cliprange)
        value = aggregate(
            found.loss,
            micro.mask,
            micro.sequences,
            mode=config.aggregation,
            denominators=denominators,
            siblings=micro.siblings,
        )
        return value, _sums(old, targets, found.clipped, micro.mask)

    return loss


@torch.no_grad()
def _sums(old: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens in float64, for means and explained variance."""
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
