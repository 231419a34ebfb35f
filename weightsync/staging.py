"""The publisher's staging slots: memory in which a version waits for its readers.

A slot is a file in /dev/shm (without room there: in the run's scratch folder), mapped by this process; the local
transport lets members map it too, other transports send from it. Guarantees:
1. the newest version is never overwritten, nor one that is being sent or encoded; of the others the oldest one is; a
   pinned one (the base of adapters) stays, and does not count in the numbers below;
2. two slots; while those are held, up to `limit` (copies of the weights, freed by `close`); while all of these are
   held, or without room for one more, the oldest one that is held is overwritten: its readers see wrong digests, and
   `hold` reports that it is not intact. A slot that another process has locked (`asyncrl.file_locks.try_lock`,
   shared) is never overwritten: another one takes its place, and its memory lasts as long as its readers;
3. `fill` never waits for a reader. It copies and digests on all cores while it asks for the next chunks; the chunks
   that wait to be copied are at most as large as the largest bucket. Creating a slot takes ten times as long as filling
   one, so `prepare` creates later ones outside of the training thread;
4. room is reserved before it is mapped, so a full disk is `disk.full` and not a SIGBUS;
5. files have run, pid and slot in their name, mode 0600; `close` removes them, `remove_stale` those of dead pids.

Example: v1 and v2 are in slots 1 and 2. v1 is sent while v3 comes: slot 3. v1 to v2 is encoded as well while v4 comes:
slot 4. v5 overwrites v3 in slot 3, because v4 is the newest. Once v1 is no longer held, v6 goes to slot 1.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncrl.errors import Unavailable
from asyncrl.file_locks import try_lock, unlock
from asyncrl.runtime.shared_memory import SHARED_MEMORY, remove_stale_slots, slot_prefix
from weightsync.copy_digest import Crew, Pieces
from weightsync.mapped_file import map_new
from weightsync.plan.buckets import Plan, bucket_starts

SLOTS = 2  # while nothing is held
MOST_SLOTS = 4  # the pair that a delta is made of, the newest, and the next

Chunks = Iterable[tuple[str, npt.NDArray[np.uint8]]]


class Slot:
    """One mapped file. `order` grows with every fill; 0 while it holds no whole version. `readers` counts its
    holders."""

    def __init__(self, path: Path, mapping: mmap.mmap, size: int) -> None:
        self.path = path
        self.size = size
        self.view = memoryview(mapping)
        self.order = 0
        self.readers = 0
        self.pinned = False

        self._descriptor = os.open(path, os.O_RDONLY)

    def lock(self) -> bool:
        """Keep other processes from reading it; False if one does."""
        try:
            return try_lock(self._descriptor, shared=False)
        except OSError:  # a file system without locks: readers have none either
            return True

    def unlock(self) -> None:
        with suppress(OSError):
            unlock(self._descriptor)

    def remove(self) -> None:
        """Remove the file; readers keep their mapping of it."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def buckets(self, sizes: Sequence[int]) -> list[memoryview]:
        starts, _ = bucket_starts(sizes)
        return [self.view[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class Staging:
    """The slots of one publisher. The training thread fills them, the sync thread sends from them."""

    def __init__(self, scratch: Path, *, folders: Sequence[Path] | None = None, limit: int = MOST_SLOTS) -> None:
        self._folders = tuple(folders) if folders is not None else (SHARED_MEMORY, scratch)
        self._scratch = scratch
        self._stem = slot_prefix(scratch)
        self._limit = limit
        self._slots: list[Slot] = []
        self._fills = 0
        self._files = 0
        self._crew: Crew | None = None  # while a version is copied
        self._lock = threading.Lock()

    def remove_stale(self) -> None:
        """Remove the slots that publishers of this run left behind when they were killed."""
        remove_stale_slots(self._scratch, self._folders)

    def fill(self, plan: Plan, chunks: Chunks) -> tuple[Slot, tuple[str, ...]]:
        """Copy one version into a slot; the slot and the digests of its buckets.

        `chunks` is iterated on this thread. A chunk must not change until it is copied: never if it owns its bytes,
        else until `settle` returned, which the iterator calls before it reuses the bytes.

        Raises:
            ValueError: the chunks are not the tensors of the plan, in its order.
            Unavailable: no room (`disk.full`).
        """
        slot = self.take(plan)
        try:
            with Crew() as self._crew:
                digests = _copy(plan, chunks, slot.buckets(plan.bucket_bytes), self._crew)
        finally:
            self._crew = None
        self.complete(slot)
        return slot, digests

    def complete(self, slot: Slot) -> None:
        """A slot from `take` holds a whole version now."""
        with self._lock:
            self._fills += 1
            slot.order = self._fills
        slot.unlock()

    def settle(self) -> None:
        """Copy every chunk that `fill` got so far. For the iterator of the chunks; else without effect."""
        if self._crew is not None:
            self._crew.settle()

    def prepare(self, size: int, count: int) -> None:
        """Create slots of that size until there are `count`, outside of the training thread: the first use of memory is
        slow. Without room nothing happens: `fill` raises the error."""
        while True:
            with self._lock:
                if len(self._unpinned_slots()) >= min(count, self._limit):
                    return
            try:
                slot = self._make(size)
            except Unavailable:
                return
            with self._lock:
                self._slots.append(slot)

    def take(self, plan: Plan) -> Slot:
        """A slot to overwrite; a new one if its size does not fit. Until `complete` it is of no version."""
        size = bucket_starts(plan.bucket_bytes)[1]
        with self._lock:
            slot = self._victim(size)
            if slot is not None and slot.size != size:
                self._remove(slot)
                slot = None
            if slot is None:
                slot = self._add(size)
            slot.order = 0
            return slot

    def _victim(self, size: int) -> Slot | None:
        """The slot to overwrite, locked; None to add one. The caller holds `_lock`."""
        slots = self._unpinned_slots()
        if len(slots) < SLOTS:
            return None
        others = sorted(slots, key=lambda slot: slot.order)[:-1]  # the newest stays
        if (free := next((slot for slot in others if not slot.readers and slot.lock()), None)) is not None:
            return free
        if len(slots) < self._limit:
            with suppress(Unavailable):
                return self._add(size)
        if (held := next((slot for slot in others if slot.lock()), None)) is None:
            self._remove(others[0])
        return held

    def _add(self, size: int) -> Slot:
        slot = self._make(size)
        slot.lock()
        self._slots.append(slot)
        return slot

    def _remove(self, slot: Slot) -> None:
        slot.remove()
        self._slots.remove(slot)

    def _unpinned_slots(self) -> list[Slot]:
        return [slot for slot in self._slots if not slot.pinned]

    def pin(self, slot: Slot, order: int) -> bool:
        """Keep the slot's content until `unpin`; False if it is no longer that of `order`."""
        with self._lock:
            slot.pinned = slot.order == order
            return slot.pinned

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            slot.pinned = False

    def _make(self, size: int) -> Slot:
        self._files += 1
        name = f"{self._stem}{os.getpid()}-{self._files}"
        path, mapping = map_new(size, [folder / name for folder in self._folders], where="weightsync staging")
        return Slot(path, mapping, size)

    @contextmanager
    def hold(self, slot: Slot | None, order: int) -> Iterator[bool]:
        """Keep the slot from being overwritten; False if its content is no longer that of `order`, or without a slot.

        Call `is_intact` at the end if the bytes are not checked by digests elsewhere.
        """
        with self._lock:
            held = slot if slot is not None and slot.order == order else None
            if held is not None:
                held.readers += 1
        try:
            yield held is not None
        finally:
            with self._lock:
                if held is not None:
                    held.readers -= 1

    def is_intact(self, slot: Slot | None, order: int) -> bool:
        """Whether the slot's content is that of `order`."""
        with self._lock:
            return slot is not None and slot.order == order

    def close(self) -> None:
        with self._lock:
            for slot in list(self._slots):
                self._remove(slot)


#: Another way to put a version into a slot: the slot, complete, and the digests of its buckets.
Fill = Callable[[Staging], tuple[Slot, tuple[str, ...]]]


def _copy(plan: Plan, chunks: Chunks, buckets: list[memoryview], crew: Crew) -> tuple[str, ...]:
    """Copy and digest chunk by chunk, behind the iterator."""
    targets = [np.frombuffer(bucket, dtype=np.uint8) for bucket in buckets]
    pieces = [Pieces() for _ in buckets]
    most = max(plan.bucket_bytes)
    expected = iter(plan.tensors)
    for name, data in chunks:
        tensor = next(expected, None)
        if tensor is None or tensor.name != name or data.dtype != np.uint8 or data.shape != (tensor.nbytes,):
            raise ValueError(f"chunk {name} ({data.dtype} {data.shape}) where the plan has {tensor}")
        target = targets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes]
        crew.copy(target, np.ascontiguousarray(data), pieces[tensor.bucket])
        crew.settle(most)
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"chunks end before {missing.name}")
    crew.settle()
    return tuple(bucket.hexdigest() for bucket in pieces)
