"""The rows of the published weights that this rank holds, in the published dtype: nothing is gathered.

Guarantees:
1. the chunks of all ranks together are the bytes of `Gathering`, each byte once;
2. at most two chunks of `PART_BYTES` are converted at a time, on the device or in pinned memory;
3. other copies of the model (HSDP) have no chunks.

Only layouts that `gathering.fits` allows.
Example: ranks 0 and 1, a stacked parameter of three experts `[3, 4, 2]`: rank 0 has the tensors of experts 0 and 1,
rank 1 those of expert 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from learners.backends.base import tensor_bytes
from learners.backends.fsdp2.gathering import PART_BYTES, share_rows
from weightsync.transports.pinned_copies import PinnedCopies

Place = tuple[str, int]  # a published tensor, and the first of its bytes


class OwnRows:
    """`named`: the published tensors of every parameter, with their elements, in the order of its memory. `pin` makes
    room of `PART_BYTES` for tensors on a device."""

    def __init__(
        self,
        named: Sequence[tuple[Mapping[str, int], Any]],
        *,
        compute: torch.dtype,
        sent: torch.dtype,
        pin: Callable[[], PinnedCopies] | None,
    ) -> None:
        mesh = named[0][1].device_mesh
        group = mesh.get_group(mesh.ndim - 1)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self.writes = dist.get_global_rank(group, 0) == 0
        self._named = named
        self._compute, self._sent = compute, sent
        self._pin = pin
        self._lends = all(parameter.dtype == compute == sent for _, parameter in named)  # chunks are not converted

    @torch.no_grad()
    def run(self, settle: Callable[[], None]) -> Iterator[tuple[Place, npt.NDArray[np.uint8]]]:
        """Yield the bytes of each chunk and their place. They may change after `settle` returned, which this iterator
        calls before.
        """
        if self._pin is not None and self.writes:
            yield from self._pin().run(self.chunks(), settle)
            return
        for place, chunk in self.chunks():
            yield place, tensor_bytes(chunk, self._sent, lend=True) if self._lends else chunk.view(torch.uint8).numpy()

    @torch.no_grad()
    def chunks(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield each chunk where its parameter is. It lies in one published tensor and ends at its end, or at a
        multiple of `PART_BYTES` in it.
        """
        if not self.writes:
            return
        part = PART_BYTES // self._sent.itemsize
        for sizes, parameter in self._named:
            own = parameter.to_local().detach().reshape(-1)
            width = parameter.numel() // parameter.shape[0] if parameter.shape[0] else 0
            first = share_rows(parameter.shape[0], rank=self._rank, ranks=self._ranks)[0] * width
            start = 0  # of the published tensor, in the parameter
            for name, size in sizes.items():
                at, end = max(first, start), min(first + own.numel(), start + size)
                while at < end:
                    stop = min(end, at + part - (at - start) % part)
                    chunk = own[at - first : stop - first].to(self._compute).to(self._sent)
                    yield (name, (at - start) * self._sent.itemsize), chunk
                    at = stop
                start += size
