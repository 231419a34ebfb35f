"""Forward and backward of a mini-batch where a loss that breaks on one rank is heard of by all.

Guarantees:
1. a loss that raises or is not finite ends no rank alone, and none waits in a collective for it: the others go on with
   a loss of zero until all have agreed on why;
2. too little memory is nobody's fault and is raised;
3. an error inside the model is told on one rank, and raised on several: they wait for each other in its collectives.

Example: the loss raises ValueError on rank 1 of 2: both get ({}, "loss: ValueError: ...").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from learners.backends.base import LossFunction, Micro
from learners.batch.bad_groups import describe_error
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang

#: Not the fault of a group: the machine has too little memory for the batch.
FATAL = (MemoryError, torch.OutOfMemoryError)

#: `Backend.train` or `Critic.train`.
Train = Callable[[Sequence[MicroBatch], LossFunction], dict[str, float]]


class Guard:
    """Keeps a loss that raises from ending one rank alone. `why` is empty while nothing was caught."""

    def __init__(self, loss: LossFunction) -> None:
        self.why = ""
        self._loss = loss

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro: Micro, number: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        try:
            return self._loss(logprobs, entropy, micro, number)
        except FATAL:
            raise
        except Exception as error:  # a plugin's loss may raise anything; what it was is told to every rank
            self.why = self.why or describe_error("loss", error)
            return (logprobs * 0).sum() + (entropy * 0).sum(), {}


def backward(
    train: Train, micro: Sequence[MicroBatch], loss: LossFunction, *, gang: Gang
) -> tuple[dict[str, float], str]:
    """Sums over ranks, and what broke on any of them. Collective."""
    guard = Guard(loss)
    try:
        sums = train(micro, guard)
    except FATAL:
        raise
    except Exception as error:  # a group may make the model raise anything (an id outside its embedding): it is told
        if gang.size > 1:  # the others wait in a collective of the model: only a restart of the gang helps
            raise
        return {}, guard.why or describe_error("model", error)
    why = next(filter(None, (text.decode() for text in gang.gather(guard.why.encode()))), "")
    if why:
        return {}, why
    sums = gang.total(sums)
    return sums, "" if math.isfinite(sums["loss"]) else f"loss: its value is {sums['loss']}"
