"""Trains the models next to the policy (critic, process reward model) in the same step.

Guarantees:
1. policy and companions are updated with the same mini-batches, all or none: a non-finite loss or gradient of any of
   them changes no weight;
2. if a companion trains alone (the critic's warm-up), the policy's gradients are computed and discarded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from asyncrl.config import LearnerConfig
from learners.backends.base import Backend, UpdateInfo
from learners.batch.micro_batches import Minibatch
from learners.gang.gang import Gang
from learners.step.batch_passes import Prepared
from learners.step.critic import critic_step


class Part(Protocol):
    """One companion during one step, on one rank."""

    @property
    def alone(self) -> bool:
        """Whether the policy is not trained in this step."""

    def gradients(self, part: Minibatch, place: int) -> str:
        """Compute and clip the gradients of mini-batch `place`. Return the failure on any rank. Collective."""

    def end(self, *, keep: bool) -> None:
        """Update with the gradients of the mini-batch, or discard them."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the updates so far, by catalogue name."""


class Companions:
    """The companions of a step as one."""

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        self._parts = parts
        self.alone = any(part.alone for part in parts)

    def gradients(self, part: Minibatch, place: int) -> str:
        """Compute the gradients of every model up to the first failure. Collective."""
        why = ""
        for model in self._parts:
            why = why or model.gradients(part, place)
        return why

    def end(self, *, keep: bool) -> None:
        """Update all, or discard all."""
        for model in self._parts:
            model.end(keep=keep)

    def metrics(self) -> dict[str, float]:
        return {name: value for model in self._parts for name, value in model.metrics().items()}


def make_companions(
    ready: Prepared,
    *,
    backend: Backend,
    gang: Gang,
    config: LearnerConfig,
    lr: float,
    step: int,
    critic_warm: bool = False,
) -> Companions:
    """Return the companions of this step. `lr`: of the critic; `critic_warm`: its warm-up ended early."""
    critic = critic_step(ready, backend=backend, gang=gang, config=config, lr=lr, step=step, warm=critic_warm)
    return Companions([part for part in (critic, ready.process) if part is not None])


def update(why: str, *, backend: Backend, companions: Companions, lr: float, max_norm: float) -> UpdateInfo:
    """Update policy and companions, all or none. `why`: an earlier failure. Collective."""
    if why:
        info = UpdateInfo(backend.discard(), True)
    elif companions.alone:
        norm = backend.discard()
        info = UpdateInfo(norm, not math.isfinite(norm))
    else:
        info = backend.step(lr=lr, max_norm=max_norm)
    companions.end(keep=not info.skipped)
    return info
