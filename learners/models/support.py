"""The supports of targets on the device: which ids each was drawn from (`asyncrl.wire.support`).

Example: three targets with the ids (1, 4), all, (0, 2, 3) have counts `[2, 0, 3]`, ids `[1, 4, 0, 2, 3]` and ends
`[0, 2, 2, 5]`; the part of the last two has rows `[1, 1, 1]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from learners.models.vocabulary import Vocabulary


class Part(NamedTuple):
    """The supports in a chunk of n targets: entries of its logits `[n, V]`."""

    rows: Tensor  # i8 [k]
    ids: Tensor  # i8 [k]
    counts: Tensor  # i8 [n]
    entries: slice  # their places among those of all targets
    every: bool  # every target has a support


class Supports(NamedTuple):
    """`counts` i8 `[N]`, 0: the whole vocabulary; `ids` i8 `[K]`; `ends` `[N + 1]` are places in `ids`, on the host."""

    counts: Tensor
    ids: Tensor
    ends: npt.NDArray[np.int64]

    @staticmethod
    def from_arrays(counts: npt.NDArray[Any], ids: npt.NDArray[Any], device: torch.device) -> Supports | None:
        """Return None without a support."""
        if not ids.size:
            return None
        ends = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        held, kept = (torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True) for array in (counts, ids))
        return Supports(held, kept, ends)

    def part(self, chunk: slice) -> Part | None:
        """Return the supports of some targets; None if they have none."""
        counts = self.counts[chunk]
        ends = self.ends[chunk.start : chunk.start + counts.numel() + 1]
        entries = slice(int(ends[0]), int(ends[-1]))
        if entries.start == entries.stop:
            return None
        places = torch.arange(counts.numel(), device=counts.device)
        rows = places.repeat_interleave(counts, output_size=entries.stop - entries.start)
        return Part(rows, self.ids[entries], counts, entries, bool(np.diff(ends).all()))

    def select(self, targets: Tensor) -> Supports | None:
        """Return the supports of these targets `[n]`."""
        chosen = targets.cpu().numpy()
        counts = np.diff(self.ends)[chosen]
        starts, ends = self.ends[chosen], np.cumsum(counts)
        entries = np.repeat(starts - (ends - counts), counts) + np.arange(counts.sum())
        kept = self.ids[torch.from_numpy(entries).to(self.ids.device)]
        return Supports(self.counts[targets], kept, np.concatenate(([0], ends))) if entries.size else None


def renormalise(
    logits: Tensor, part: Part | None, lse: Tensor, split: Vocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """Return the logsumexp of each row's support `[n]` (of a row without one: its `lse`), and the probabilities of the
    supports' ids `[k]`, 0 where another rank has them.
    """
    if part is None:
        return lse, lse[:0]
    rows, places = part.rows, part.ids
    if split is None:
        values = logits[rows, places]
    else:
        mine, places = split.own(places, logits.shape[1])
        values = logits[rows, places].masked_fill(~mine, -torch.inf)
    cut = part.counts > 0
    top = torch.full_like(lse, -torch.inf).scatter_reduce_(0, rows, values, "amax")
    top = torch.where(cut, top if split is None else split.sum(top, dist.ReduceOp.MAX), 0.0)
    weights = (values - top[rows]).exp_()
    total = torch.where(cut, sum_rows(weights, part, split), 1.0)
    return torch.where(cut, top + total.log(), lse), weights.div_(total[rows])


def sum_rows(values: Tensor, part: Part, split: Vocabulary | None = None) -> Tensor:
    """Return the sum of each row's entries; the order of the sum is fixed, unlike that of a scatter on a GPU."""
    total = torch.segment_reduce(values, "sum", lengths=part.counts, unsafe=True)
    return total if split is None else split.sum(total)


def add_support_gradient(
    grad: Tensor, part: Part | None, up: Tensor, shares: Tensor, split: Vocabulary | None = None
) -> None:
    """Add the gradient of the supports' logsumexps to that of the logits `[n, V]`."""
    if part is not None:
        places = part.ids if split is None else split.own(part.ids, grad.shape[1])[1]
        grad.index_put_((part.rows, places), -up[part.rows] * shares[part.entries], accumulate=True)


def mask_supported(up: Tensor, support: Supports | None) -> Tensor:
    """Return the gradients of log-probs over the whole vocabulary: 0 at targets with a support."""
    return up if support is None else torch.where(support.counts > 0, 0.0, up)
