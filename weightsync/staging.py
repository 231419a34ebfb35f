"""The publisher's two staging slots: where a version waits for its readers.

Called by the publisher. A slot is a file under /dev/shm (where there is no room: in the run's scratch folder), mapped
by this process; the local transport lets members map it too, other transports send from it. Guarantees:
1. a slot that is being sent is not overwritten; of the others the one with the oldest content is;
2. room is reserved before it is mapped, so a full disk is `disk.full` and not a SIGBUS;
3. files carry run, pid and slot in their name, mode 0600; `close` removes them, `remove_stale` those of dead pids.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncrl.errors import Unavailable
from weightsync.digest import Digest
from weightsync.plan import Plan, bucket_starts

PREFIX = "asyncrl-"
SHARED_MEMORY = Path("/dev/shm")
SLOTS = 2

Chunks = Iterable[tuple[str, npt.NDArray[np.uint8]]]


class Slot:
    """One file, mapped. `order` grows with every fill; 0 while there is no whole version in it."""

    def __init__(self, path: Path, mapping: mmap.mmap, size: int) -> None:
        self.path = path
        self.size = size
        self.view = memoryview(mapping)
        self.order = 0
        self.senders = 0

    def buckets(self, sizes: Sequence[int]) -> list[memoryview]:
        """Views of the buckets."""
        starts, _ = bucket_starts(sizes)
        return [self.view[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class Staging:
    """The slots of one publisher. Filled by the training thread, sent from the sync thread."""

    def __init__(self, scratch: Path, *, folders: Sequence[Path] | None = None) -> None:
        self._folders = tuple(folders) if folders is not None else (SHARED_MEMORY, scratch)
        run = hashlib.blake2b(os.fsencode(scratch.resolve()), digest_size=6).hexdigest()
        self._stem = f"{PREFIX}{os.getuid()}-{run}-"
        self._slots: list[Slot] = []
        self._fills = 0
        self._files = 0
        self._lock = threading.Lock()

    def remove_stale(self) -> None:
        """Remove the slots that publishers of this run left behind when they were killed."""
        for folder in self._folders:
            for path in folder.glob(f"{self._stem}*"):
                pid = path.name.removeprefix(self._stem).partition("-")[0]
                if pid == str(os.getpid()) or not pid.isdigit() or not _alive(int(pid)):
                    path.unlink(missing_ok=True)

    def fill(self, plan: Plan, chunks: Chunks) -> tuple[Slot, tuple[str, ...]]:
        """Copy one version into a slot; the slot and the digests of its buckets.

        Raises:
            ValueError: the chunks are not the tensors of the plan, in its order.
            Unavailable: no room (`disk.full`).
        """
        slot = self._take(bucket_starts(plan.bucket_bytes)[1])
        digests = _copy(plan, chunks, slot.buckets(plan.bucket_bytes))
        with self._lock:
            self._fills += 1
            slot.order = self._fills
        return slot, digests

    def _take(self, size: int) -> Slot:
        """A slot to overwrite, made anew where its size does not fit."""
        with self._lock:
            free = [slot for slot in self._slots if not slot.senders]
            slot = min(free, key=lambda slot: slot.order) if len(self._slots) == SLOTS else None
            if slot is not None and slot.size != size:
                slot.path.unlink(missing_ok=True)  # readers keep their mapping of it
                self._slots.remove(slot)
                slot = None
            if slot is None:
                slot = self._make(size)
                self._slots.append(slot)
            slot.order = 0
            return slot

    def _make(self, size: int) -> Slot:
        problem = "no folder"
        for folder in self._folders:
            self._files += 1
            path = folder / f"{self._stem}{os.getpid()}-{self._files}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError as error:
                problem = f"{folder}: {error.strerror}"
                continue
            try:
                os.posix_fallocate(descriptor, 0, size)
                return Slot(path, mmap.mmap(descriptor, size), size)
            except OSError as error:
                problem = f"{folder}: {error.strerror}"
                path.unlink()
            finally:
                os.close(descriptor)
        raise Unavailable("disk.full", f"no room for {size} bytes of weights ({problem})", where="weightsync staging")

    @contextmanager
    def sending(self, slot: Slot, order: int) -> Iterator[bool]:
        """Keep the slot from being overwritten; False where it no longer holds what it held at `order`."""
        with self._lock:
            intact = slot.order == order
            slot.senders += intact
        try:
            yield intact
        finally:
            with self._lock:
                slot.senders -= intact

    def close(self) -> None:
        """Remove the files."""
        with self._lock:
            for slot in self._slots:
                slot.path.unlink(missing_ok=True)
            self._slots.clear()


def _copy(plan: Plan, chunks: Chunks, buckets: list[memoryview]) -> tuple[str, ...]:
    """Copy chunk by chunk; the digest is taken of the source, so that a fault of the copy shows at the reader."""
    targets = [np.frombuffer(bucket, dtype=np.uint8) for bucket in buckets]
    digests = [Digest() for _ in buckets]
    expected = iter(plan.tensors)
    for name, data in chunks:
        tensor = next(expected, None)
        if tensor is None or tensor.name != name or data.dtype != np.uint8 or data.shape != (tensor.nbytes,):
            raise ValueError(f"chunk {name} ({data.dtype} {data.shape}) where the plan has {tensor}")
        targets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = data
        digests[tensor.bucket].update(np.ascontiguousarray(data).data)
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"chunks end before {missing.name}")
    return tuple(digest.hexdigest() for digest in digests)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
