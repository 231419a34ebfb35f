"""Copies and digests tensors in parallel, piece by piece: each thread digests a piece while it is in its cache.

Guarantees:
1. the digest is that of `weightsync.plan.digest`: of the source when weights are staged, so that every reader notices a
   fault of the copy; of the target in an engine, which answers for what it holds;
2. pieces are taken in the order they were given; `settle` returns once every one is copied, and helps meanwhile;
3. after `close` no thread touches a source or a target any more, also if a piece failed.
Numpy's copy and blake3 run without the interpreter's lock. `settle` with a limit bounds the memory that waits.

Example: 1 GB on two cores: a thousand pieces of 1 MiB, each copied and digested 256 KiB at a time (both sides stay in
a core's second-level cache), half of them by the calling thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightsync.plan.digest import DIGEST_BYTES, PIECE_BYTES, join_pieces

STRIDE_BYTES = 256 << 10
MOST_THREADS = 16  # beyond these the memory is the limit
JOIN_S = 60.0
LENT_BYTES = 64 << 20  # tensors that were converted for their digest and wait for it

Bytes = npt.NDArray[np.uint8]


def cores(processes: int = 1) -> int:
    """Threads to use here, in each of that many processes."""
    return min(max(len(os.sched_getaffinity(0)) // processes, 1), MOST_THREADS)


class Pieces:
    """The digests of the pieces of one bucket, filled in any order."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def reserve(self, count: int) -> int:
        """Add places for `count` pieces; the number of the first."""
        first = len(self.digests)
        self.digests.extend([b""] * count)
        return first

    def put(self, number: int, digest: bytes) -> None:
        self.digests[number] = digest

    def hexdigest(self) -> str:
        """The digest of the bucket, once all are there."""
        return join_pieces(self.digests)


Work = tuple[Bytes | None, Bytes, Pieces, int]  # target, source, where the digest goes


class Crew:
    """Threads for one job; the calling thread is one of them. A context manager: leaving it ends them. Digests are of
    the source, or with `of_target` of the target after the copy."""

    def __init__(self, threads: int | None = None, *, of_target: bool = False) -> None:
        self._of_target = of_target
        self._waiting: deque[Work] = deque()
        self._waiting_bytes = 0
        self._running = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        helpers = (cores() if threads is None else threads) - 1
        self._threads = [
            threading.Thread(target=self._work, name="weightsync-copy", daemon=True) for _ in range(helpers)
        ]
        for thread in self._threads:
            thread.start()

    def copy(self, target: Bytes | None, source: Bytes, pieces: Pieces) -> None:
        """Queue the copy of `source` (contiguous) to `target` (None: digest it only); both must stay until `settle`."""
        starts = range(0, source.nbytes, PIECE_BYTES)
        first = pieces.reserve(len(starts))
        with self._changed:
            for number, start in enumerate(starts, start=first):
                end = start + PIECE_BYTES
                part = target[start:end] if target is not None else None
                self._waiting.append((part, source[start:end], pieces, number))
            self._waiting_bytes += source.nbytes
            self._changed.notify(len(starts))

    def settle(self, at_most_bytes: int = 0) -> None:
        """Work until at most this many bytes wait; with 0 until all are copied. Raises the error of a piece."""
        while self._waiting_bytes > at_most_bytes and self._run_piece():
            pass
        with self._changed:
            if not at_most_bytes:
                # bounded: pieces under way, each one copy of at most PIECE_BYTES
                self._changed.wait_for(lambda: not self._running)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Drop waiting pieces; returns when no thread works any more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)  # a piece takes milliseconds

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                # bounded: the life of the job; close() ends it
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            while self._run_piece():
                pass

    def _run_piece(self) -> bool:
        """Run the next piece; False if none waits."""
        with self._changed:
            if not self._waiting:
                return False
            target, source, pieces, number = self._waiting.popleft()
            self._waiting_bytes -= source.nbytes
            self._running += 1
        try:
            pieces.put(number, _copy_piece(target, source, of_target=self._of_target))
        except BaseException as error:  # `settle` raises it on the thread that gave the piece
            with self._changed:
                self._error = error
        finally:
            with self._changed:
                self._running -= 1
                if not self._running:
                    self._changed.notify_all()
        return True


def _copy_piece(target: Bytes | None, source: Bytes, *, of_target: bool) -> bytes:
    digest = blake3()
    if target is None:
        return digest.update(source.data).digest(length=DIGEST_BYTES)
    for start in range(0, source.nbytes, STRIDE_BYTES):
        part, there = source[start : start + STRIDE_BYTES], target[start : start + STRIDE_BYTES]
        there[:] = part
        digest.update(there.data if of_target else part.data)
    return digest.digest(length=DIGEST_BYTES)


def copy_digest(pairs: Iterable[tuple[Bytes, Bytes]], *, threads: int | None = None) -> str:
    """Copy the tensors of one bucket, given as (target, source) bytes in plan order; the digest of the targets."""
    pieces = Pieces()
    with Crew(threads, of_target=True) as crew:
        for target, source in pairs:
            crew.copy(target, source, pieces)
        crew.settle()
    return pieces.hexdigest()


def digest_all(tensors: Iterable[Bytes], *, threads: int | None = None) -> str:
    """The digest of one bucket from the bytes of its tensors in plan order."""
    return digest_lent(lambda _: tensors, threads=threads)


def digest_lent(lend: Callable[[Callable[[], None]], Iterable[Bytes]], *, threads: int | None = None) -> str:
    """The same for an iterator that uses the memory of its tensors again: it gets a function that returns when all that
    it yielded is digested."""
    pieces = Pieces()
    with Crew(threads) as crew:
        for tensor in lend(crew.settle):
            crew.copy(None, tensor, pieces)
            crew.settle(LENT_BYTES)
        crew.settle()
    return pieces.hexdigest()
