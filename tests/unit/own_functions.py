"""A user's own aggregation and KL, named by this file's place."""

from __future__ import annotations

from torch import Tensor

from learners.algorithms.aggregation import Denominators


def root_length(mask: Tensor, sequences: Tensor, lengths: Tensor, denominators: Denominators) -> Tensor:
    return 1 / (lengths.clamp(min=1).sqrt()[sequences] * denominators.sequences)


def huber(log_probs: Tensor, reference: Tensor) -> Tensor:
    delta = (log_probs - reference).abs()
    return (delta**2 / 2).where(delta < 1, delta - 0.5)
