"""What this process keeps of freed memory, for glibc's allocator; without effect on others."""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20  # freed memory that a process with `keep_memory` keeps
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_memory(*, mapped_bytes: int = KEPT_BYTES // 8) -> None:
    """Let this process keep freed memory instead of returning every payload's pages at once (glibc; else no effect).
    Blocks of `mapped_bytes` and more are returned when they are freed.

    Payloads of about 100 KB come and go at the top of the heap. Returning their pages and faulting them in again costs
    more than copying them (measured: a third of a producer's CPU time per group).
    """
    _set_malloc({_M_TRIM_THRESHOLD: KEPT_BYTES, _M_MMAP_THRESHOLD: mapped_bytes})


def keep_tensors() -> None:
    """Let this process keep what the tensors of a CPU's steps leave, up to 1 GiB, for all its threads (glibc).

    Without it glibc maps large tensors, and all that do not fit a thread's heap of 64 MiB, and faults in their pages at
    every step: more than half of a decode step over a vocabulary of 152k (benchmarks/bench_heap.py).
    """
    _set_malloc({_M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: 1 << 30, _M_MMAP_THRESHOLD: 256 << 20})


def _set_malloc(options: dict[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for option, value in options.items():
        if not mallopt(option, value) and option == _M_MMAP_THRESHOLD:
            mallopt(option, 32 << 20)  # the most that older versions take
