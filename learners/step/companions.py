"""The models that train beside the policy in a step (critic, process reward model), as one.

Guarantees:
1. policy and companions are updated by the same mini-batches, all or none: a loss or gradient of any of them that is
   not finite changes no weight;
2. where one of them is to be trained alone (the critic's warm-up), the policy's gradients are computed and forgotten.

Example: the process reward model's loss raises: `gradients` gives "process reward: loss: ValueError ...", `update`
keeps policy, critic and process reward model as they were.
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
    """One model beside the policy during one step, on one rank."""

    @property
    def alone(self) -> bool:
        """Whether the policy is not trained in this step."""

    def gradients(self, part: Minibatch, place: int) -> str:
        """Forward and backward of mini-batch `place`, clipped; what broke on any rank. Collective."""

    def end(self, *, keep: bool) -> None:
        """Update with the gradients of the mini-batch, or forget them."""

    def metrics(self) -> dict[str, float]:
        """Of the updates so far, by catalogue name."""


class Companions:
    """All of them; none where the estimator in force needs none."""

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        self._parts = parts
        self.alone = any(part.alone for part in parts)

    def gradients(self, part: Minibatch, place: int) -> str:
        """Those of every model, up to the first that breaks on any rank. Collective."""
        why = ""
        for model in self._parts:
            why = why or model.gradients(part, place)
        return why

    def end(self, *, keep: bool) -> None:
        """Update all, or forget all."""
        for model in self._parts:
            model.end(keep=keep)

    def metrics(self) -> dict[str, float]:
        """Of all of them."""
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
    """Those of this step. `lr` of the critic; `critic_warm`: its warm-up has ended early. Raises as `critic_step`."""
    critic = critic_step(ready, backend=backend, gang=gang, config=config, lr=lr, step=step, warm=critic_warm)
    return Companions([part for part in (critic, ready.process) if part is not None])


def update(why: str, *, backend: Backend, companions: Companions, lr: float, max_norm: float) -> UpdateInfo:
    """The policy's update and that of the models beside it, all or none; `why`: what broke before. Collective."""
    if why:
        info = UpdateInfo(backend.discard(), True)
    elif companions.alone:
        norm = backend.discard()
        info = UpdateInfo(norm, not math.isfinite(norm))
    else:
        info = backend.step(lr=lr, max_norm=max_norm)
    companions.end(keep=not info.skipped)
    return info
