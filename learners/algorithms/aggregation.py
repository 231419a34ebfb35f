"""From losses per token to one number, with global denominators.

Called by `learners.update`. A piece of a batch (a micro-batch of a rank) returns its numerator over the GLOBAL count of
tokens or sequences, so the sum over all pieces is the loss of the whole batch, however it was cut. Guarantees:
1. nothing outside the mask has an influence;
2. a piece without tokens gives 0, connected to the graph;
3. a sequence lies whole in one piece (the packer sees to it), so its own length is known here.

Example: two sequences with losses (1, 2) and (3): token-mean 2, seq-mean-token-mean 2.25, seq-mean-token-sum 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from learners.algorithms.corrections import masked

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


class Denominators(NamedTuple):
    """Of the whole mini-batch over all ranks: trained tokens, and sequences with at least one of them."""

    tokens: int
    sequences: int


def aggregate(loss: Tensor, mask: Tensor, sequences: Tensor, *, mode: str, denominators: Denominators) -> Tensor:
    """This piece's share of the loss, a scalar. `loss`, `mask` and `sequences` (a number per token) are `[N]`."""
    values = masked(loss, mask)
    if mode == "token-mean":
        return values.sum() / max(denominators.tokens, 1)
    if mode == "seq-mean-token-sum":
        return values.sum() / max(denominators.sequences, 1)
    if mode == "seq-mean-token-mean":
        return (values / _lengths(mask, sequences, values.dtype)).sum() / max(denominators.sequences, 1)
    raise ValueError(f"aggregation {mode!r} is not one of {', '.join(MODES)}")


def _lengths(mask: Tensor, sequences: Tensor, dtype: torch.dtype) -> Tensor:
    """For each token the number of trained tokens of its sequence, at least 1, `[N]`."""
    if sequences.numel() == 0:
        return torch.ones(0, dtype=dtype, device=mask.device)
    counts = torch.zeros(int(sequences.max()) + 1, dtype=dtype, device=mask.device)
    return counts.index_add_(0, sequences, mask.to(dtype)).clamp_(min=1)[sequences]
