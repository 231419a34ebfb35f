"""Forward and backward of a mini-batch, with failures of the loss shared between all ranks.

Guarantees:
1. a loss that raises or is not finite leaves no rank waiting: the others continue with a loss of zero until all agree
   on the failure;
2. out-of-memory errors are raised, since no group causes them;
3. an error inside the model is returned on a single rank. With several ranks it is raised, because the others wait in
   its collectives.

Example: the loss raises ValueError on rank 1 of 2: both ranks get ({}, "loss: ValueError: ...").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from learners.backends.base import LossFunction, Micro
from learners.batch.bad_groups import describe_error
from learners.batch.micro_batches import MicroBatch
from learners.gang.gang import Gang

#: Errors that no group causes: the machine has too little memory for the batch.
FATAL = (MemoryError, torch.OutOfMemoryError)

#: `Backend.train` or `Critic.train`.
Train = Callable[[Sequence[MicroBatch], LossFunction], dict[str, float]]


class Guard:
    """A loss that never raises: `why` holds its first error."""

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
        except Exception as error:  # a plugin may raise anything; every rank gets the reason
            self.why = self.why or describe_error("loss", error)
            return (logprobs * 0).sum() + (entropy * 0).sum(), {}


def backward(
    train: Train, micro: Sequence[MicroBatch], loss: LossFunction, *, gang: Gang
) -> tuple[dict[str, float], str]:
    """Return sums over ranks, and the failure on any rank. Collective."""
    guard = Guard(loss)
    try:
        sums = train(micro, guard)
    except FATAL:
        raise
    except Exception as error:  # a group may make the model raise anything, such as an invalid token id
        if gang.size > 1:  # the others wait in a collective: only a restart of the gang helps
            raise
        return {}, guard.why or describe_error("model", error)
    every = [
        msgspec.msgpack.decode(text, type=list[str]) for text in gang.gather(msgspec.msgpack.encode([guard.why, *sums]))
    ]
    why = next(filter(None, (first for first, *_ in every)), "")
    if why:
        return {}, why
    # A rank lacks sums that others have if none of its rows has a teacher.
    missing = {name: -math.inf if name.endswith("_max") else 0.0 for _, *names in every for name in names}
    sums = gang.total(missing | sums)
    return sums, "" if math.isfinite(sums["loss"]) else f"loss: its value is {sums['loss']}"
