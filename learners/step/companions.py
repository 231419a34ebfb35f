"""Models that train next to the policy in the same step: the critic, the process reward model.

Guarantees:
1. policy and companions are updated with the same mini-batches, all or none: a non-finite loss or gradient of any of
   them changes no weight;
2. sums over tokens add up over micro-batches, mini-batches and ranks: no metric depends on the split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from learners.backends.base import Companion, LossFunction
from learners.batch.micro_batches import Minibatch
from learners.gang.gang import Gang
from learners.step.guarded_backward import backward


class CompanionStep:
    """One companion during one step, on one rank. Subclasses give its loss and its metrics."""

    kind = ""  # in messages
    alone = False  # the policy is not trained in this step

    def __init__(self, model: Companion, *, gang: Gang, max_norm: float, lr: float) -> None:
        """`lr`: of this step; `max_norm`: its gradients are clipped to it."""
        self._companion = model
        self._gang = gang
        self._max_norm = max_norm
        self._lr = lr
        self._norm = 0.0
        self._found: dict[str, float] = {}  # sums of the current mini-batch
        self._totals: dict[str, float] = {}  # sums of applied mini-batches
        self._norms: list[float] = []

    def loss(self, part: Minibatch, place: int) -> LossFunction:
        """Return the loss of mini-batch `place`."""
        raise NotImplementedError

    def gradients(self, part: Minibatch, place: int) -> str:
        """Compute and clip the gradients of mini-batch `place`. Return the failure on any rank. Collective."""
        self._found, why = backward(self._companion.train, part.micro, self.loss(part, place), gang=self._gang)
        if why:
            return f"{self.kind}: {why}"
        self._norm = self._companion.clip(self._max_norm)
        return "" if math.isfinite(self._norm) else f"{self.kind}: loss: the norm of the gradient is {self._norm}"

    def end(self, *, keep: bool) -> None:
        """Update with the gradients of the mini-batch, or discard them."""
        if not keep or not self._found:
            self._companion.discard()
            return
        self._companion.apply(self._lr)
        for name, value in self._found.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
        self._norms.append(self._norm)
        self._found = {}

    def metrics(self) -> dict[str, float]:
        """Return metrics of the updates so far, by catalogue name; empty without an update."""
        return self._means(self._totals) if self._norms else {}

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        raise NotImplementedError


class Companions:
    """The companions of a step as one."""

    def __init__(self, parts: Sequence[CompanionStep] = ()) -> None:
        self._parts = parts
        self.alone = any(part.alone for part in parts)

    def gradients(self, part: Minibatch, place: int) -> str:
        """Compute the gradients of every model up to the first failure. Collective."""
        return next(filter(None, (model.gradients(part, place) for model in self._parts)), "")

    def end(self, *, keep: bool) -> None:
        """Update all, or discard all."""
        for model in self._parts:
            model.end(keep=keep)

    def metrics(self) -> dict[str, float]:
        return {name: value for model in self._parts for name, value in model.metrics().items()}
