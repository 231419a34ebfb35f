"""Copying and digesting at once, on all cores: a few threads, each copies a piece and digests it from its cache.

`digest_all`: what they hold). Guarantees:
1. the digest is that of `weightsync.plan.digest`: of the source when weights are staged, so that a fault of the copy
   shows
   at whoever reads it, and of the target in an engine, which answers for what it holds;
2. pieces are taken in the order they were given; `settle` returns once every one is copied, and helps meanwhile;
3. after `close` no thread touches a source or a target any more, also where a piece failed.
Numpy's copy and blake3 run without the interpreter's lock. It does not bound what the caller keeps alive: `settle` with
a limit does.

Example: 1 GB on two cores: a thousand pieces of 1 MiB, each copied and digested 256 KiB at a time (both sides stay in
a core's second-level cache), half of them by the calling thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from weightsync.plan.digest import DIGEST_BYTES, PIECE_BYTES, join_pieces

STRIDE_BYTES = 256 << 10
MOST_THREADS = 16  # beyond these the memory is the limit
JOIN_S = 60.0
LENT_BYTES = 64 << 20  # tensors that were made for their digest (another dtype) and wait for it

Bytes = npt.NDArray[np.uint8]


def cores() -> int:
    """Threads that are worth it here."""
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)


class Pieces:
    """The digests of the pieces of one bucket, filled in any order."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []

    def add(self, count: int) -> int:
        """Room for so many pieces more; the number of the first."""
        first = len(self._digests)
        self._digests.extend([b""] * count)
        return first

    def set(self, number: int, digest: bytes) -> None:
        """The digest of one piece."""
        self._digests[number] = digest

    def hexdigest(self) -> str:
        """The digest of the bucket, once all are there."""
        return join_pieces(self._digests)


Work = tuple[Bytes | None, Bytes, Pieces, int]  # target, source, where the digest goes


class Crew:
    """Threads for one job; the calling thread is one of them. A context manager: leaving it ends them. Digests are of
    the source, with `held` of the target after the copy."""

    def __init__(self, threads: int | None = None, *, held: bool = False) -> None:
        self._held = held
        self._waiting: deque[Work] = deque()
        self._waiting_bytes = 0
        self._running = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        helpers = (cores() if threads is None else threads) - 1
        self._threads = [
            threading.Thread(target=self._help, name="weightsync-copy", daemon=True) for _ in range(helpers)
        ]
        for thread in self._threads:
            thread.start()

    def copy(self, target: Bytes | None, source: Bytes, pieces: Pieces) -> None:
        """Have `source` (contiguous) copied to `target` (None: nowhere) and its digests noted; both must stay until
        `settle`."""
        starts = range(0, source.nbytes, PIECE_BYTES)
        first = pieces.add(len(starts))
        with self._changed:
            for number, start in enumerate(starts, start=first):
                end = start + PIECE_BYTES
                part = target[start:end] if target is not None else None
                self._waiting.append((part, source[start:end], pieces, number))
            self._waiting_bytes += source.nbytes
            self._changed.notify(len(starts))

    def settle(self, at_most_bytes: int = 0) -> None:
        """Work until at most so many bytes wait; with 0 until all are copied. Raises what a piece raised."""
        while self._waiting_bytes > at_most_bytes and self._one():
            pass
        with self._changed:
            if not at_most_bytes:
                # bounded: pieces under way, each one copy of at most PIECE_BYTES
                self._changed.wait_for(lambda: not self._running)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Forget what waits; returns when no thread works any more."""
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

    def _help(self) -> None:
        while True:
            with self._changed:
                # bounded: the life of the job; close() ends it
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            while self._one():
                pass

    def _one(self) -> bool:
        """Do the next piece; False where none waits."""
        with self._changed:
            if not self._waiting:
                return False
            target, source, pieces, number = self._waiting.popleft()
            self._waiting_bytes -= source.nbytes
            self._running += 1
        try:
            pieces.set(number, _copy_piece(target, source, held=self._held))
        except BaseException as error:  # `settle` raises it on the thread that gave the piece
            with self._changed:
                self._error = error
        finally:
            with self._changed:
                self._running -= 1
                if not self._running:
                    self._changed.notify_all()
        return True


def _copy_piece(target: Bytes | None, source: Bytes, *, held: bool) -> bytes:
    digest = blake3()
    if target is None:
        return digest.update(source.data).digest(length=DIGEST_BYTES)
    for start in range(0, source.nbytes, STRIDE_BYTES):
        part, there = source[start : start + STRIDE_BYTES], target[start : start + STRIDE_BYTES]
        there[:] = part
        digest.update(there.data if held else part.data)
    return digest.digest(length=DIGEST_BYTES)


def copy_digest(pairs: Iterable[tuple[Bytes, Bytes]], *, threads: int | None = None) -> str:
    """Copy the tensors of one bucket, given as (target, source) bytes in plan order; the digest of the bucket, taken of
    the targets."""
    pieces = Pieces()
    with Crew(threads, held=True) as crew:
        for target, source in pairs:
            crew.copy(target, source, pieces)
        crew.settle()
    return pieces.hexdigest()


def digest_all(tensors: Iterable[Bytes], *, threads: int | None = None) -> str:
    """The digest of one bucket from the bytes of its tensors in plan order."""
    pieces = Pieces()
    with Crew(threads) as crew:
        for tensor in tensors:
            crew.copy(None, tensor, pieces)
            crew.settle(LENT_BYTES)
        crew.settle()
    return pieces.hexdigest()
