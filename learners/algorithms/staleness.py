"""The age of rows, the weight of old rows, and the number of rollouts that may start.

A version is the number of learner steps completed when the weights were published; a row that was interrupted by a
weight update has tokens of several versions. Guarantees:
1. the age of a row counts only its trained tokens; a row without any has age 0;
2. weights have no gradient and are positive;
3. dividing by the batch mean mixes rows: call it once on the whole batch, before the split.

The buffer decides on admission with the same bound (`buffers.groups.schedule`).
Example: tokens of versions 1, 2, 6 in a step that starts from version 8: newest 2, oldest 7, span 5, mean 5.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from learners.algorithms.tensors import sequence_lengths, sequence_means

Decay = Literal["exp", "power"]


class Staleness(NamedTuple):
    """Ages of rows in learner steps, all `[S]`; `newest`, `oldest` and `span` int64, `mean` float64."""

    newest: Tensor  # current version minus that of the newest token
    oldest: Tensor  # current version minus that of the oldest token; bounded by admission
    span: Tensor  # oldest - newest: number of weight updates within the response
    mean: Tensor  # over the trained tokens


def staleness(
    versions: Tensor, mask: Tensor, sequences: Tensor, *, current_version: int, count: int | None = None
) -> Staleness:
    """Return the ages of rows from the version of every token: `versions` int64, `mask` bool, `sequences`, all `[N]`.

    `current_version` is the version that the training step starts from. `count` is the number of rows, if the last ones
    may have no token.
    """
    lengths = sequence_lengths(mask, sequences, count)
    lags = torch.where(mask, current_version - versions, 0)
    start = torch.zeros_like(lengths)
    low, high = torch.where(mask, lags, _FAR), torch.where(mask, lags, -_FAR)
    newest = torch.full_like(start, _FAR).scatter_reduce(0, sequences, low, "amin")
    oldest = torch.full_like(start, -_FAR).scatter_reduce(0, sequences, high, "amax")
    newest, oldest = (torch.where(lengths > 0, found, start) for found in (newest, oldest))
    return Staleness(newest, oldest, oldest - newest, sequence_means(lags.double(), mask, sequences, count))


def staleness_weights(
    lags: Tensor, *, kind: Decay = "exp", tau: float = 4.0, kappa: float = 0.5, normalize: bool = True
) -> Tensor:
    """Return the weight of each row, float64 `[S]`: `e^(-lag / tau)` (exp) or `(1 + lag)^-kappa` (power).

    `lags` `[S]` in steps: the mean or the oldest of `staleness`. `normalize` divides by the mean over ALL rows of the
    batch, which preserves the size of the step. The weights multiply the loss like those of a correction. Raises
    `config.type` for an unknown kind or a `tau` that is not positive. An extension of asyncrl, not from a paper.
    """
    if kind == "exp" and tau > 0:
        weights = torch.exp(-lags.detach().double() / tau)
    elif kind == "power":
        weights = (1 + lags.detach().double()) ** -kappa
    else:
        raise ConfigError("config.type", f"staleness weight {kind!r} with tau {tau} must be exp (tau > 0) or power")
    return weights / weights.mean() if normalize and weights.numel() else weights


def capacity(
    *, max_staleness: int, version: int, batch_size: int, max_concurrent: int, accepted: int, running: int
) -> int:
    """Return how many rollouts may start now; 0 or less: none. arXiv 2505.24298 (staleness-aware admission).

    It is the minimum of the free slots and `(max_staleness + version + 1) * batch_size - (accepted + running)`. Each
    version consumes `batch_size` rollouts; `accepted` were accepted since the start of the run. `max_staleness` 0 is
    synchronous training.
    """
    quota = (max_staleness + version + 1) * batch_size - (accepted + running)
    return min(max_concurrent - running, quota)


_FAR = 2**62
