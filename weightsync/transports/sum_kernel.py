"""The sums of `weightsync.plan.sum_digest` in one pass over the memory of a CUDA device: a kernel of Triton.

Imports triton. `weightsync.transports.device_digest` takes it where a device has Triton; its own operators read and
write every word a dozen times.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from weightsync.plan.sum_digest import CHUNK_WORDS

BLOCK = 4096  # words of one program; divides a chunk


@triton.jit  # type: ignore[untyped-decorator]
def _sum_block(  # noqa: PLR0917
    words: Any,
    tables: Any,
    factors: Any,
    sums: Any,
    first: Any,
    count: Any,
    most: Any,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    start = (first // block + tl.program_id(0).to(tl.int64)) * block
    place = start + tl.arange(0, block)
    inside = (place >= first) & (place < first + count)
    values = tl.load(words + (place - first), mask=inside, other=0).to(tl.int64)
    for which in tl.static_range(2):
        weights = tl.load(tables + which * chunk + place % chunk)
        total = tl.sum(values * weights) * tl.load(factors + which * most + start // chunk)
        tl.atomic_add(sums + which, total)


def add(words: Tensor, first: int, tables: Tensor, factors: Tensor, sums: Tensor) -> None:
    """Add words, int32 `[n]`, that begin at word `first` of their bucket, to the int64 sums `[2]` of the bucket.
    `tables`: int64 `[2, CHUNK_WORDS]`; `factors`: int64 `[2, chunks]`, of at least all chunks of the words."""
    count = words.numel()
    if count:
        blocks = (first + count - 1) // BLOCK - first // BLOCK + 1
        _sum_block[(blocks,)](
            words, tables, factors, sums, first, count, factors.shape[1], chunk=CHUNK_WORDS, block=BLOCK
        )
