"""Transport `local`: shared memory on one host. One writer, any number of readers, no copy in between.

Members map the staging slots of the publisher read-only. Guarantees:
1. a reader never blocks the writer: an old slot may be overwritten while it is read, which a wrong bucket digest shows,
   or replaced, if the reader has locked it (`asyncrl.engine.SlotMapping`);
2. slots are never truncated in place, so a reader cannot be killed by SIGBUS;
3. a missing, foreign or too small file raises `TransportUnusable`: this member does not share the host;
4. a slot stays mapped from round to round (`Maps`), because page faults cost as much as two copies. Removed slots are
   unmapped when the next one is opened.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from asyncrl.runtime.shared_memory import PREFIX
from asyncrl.wire import Instruction
from weightsync.plan.buckets import bucket_starts
from weightsync.staging import MOST_SLOTS
from weightsync.transports.base import TransportUnusable


class Maps:
    """The slots that this process has mapped, at most as many as a publisher has. Used by one thread at a time."""

    def __init__(self, *, writable: bool = False) -> None:
        self._flags, self._access = (os.O_RDWR, mmap.ACCESS_WRITE) if writable else (os.O_RDONLY, mmap.ACCESS_READ)
        self._known: dict[tuple[int, int, int], tuple[Path, memoryview]] = {}  # by device, inode, size; oldest first

    def view(self, path: Path, needed: int) -> memoryview:
        """The first `needed` bytes of the file. Raises TransportUnusable."""
        try:
            descriptor = os.open(path, self._flags | os.O_NOFOLLOW)
        except OSError as error:
            raise TransportUnusable(f"local: {path} is not visible here: {error.strerror}") from None
        try:
            found = os.fstat(descriptor)
            if found.st_size < needed:
                raise TransportUnusable(f"local: {path} is smaller than the plan")
            key = (found.st_dev, found.st_ino, needed)
            self._forget()
            if key not in self._known:
                mapping = mmap.mmap(descriptor, needed, access=self._access)
                self._known[key] = (path, memoryview(mapping))
                while len(self._known) > MOST_SLOTS:
                    del self._known[next(iter(self._known))]
            return self._known[key][1]
        finally:
            os.close(descriptor)

    def _forget(self) -> None:
        """Unmap the slots that the publisher has removed."""
        for key, (path, _) in list(self._known.items()):
            try:
                there = os.stat(path, follow_symlinks=False)
            except OSError:
                there = None
            if there is None or (there.st_dev, there.st_ino) != key[:2]:
                del self._known[key]


class LocalInbox:
    """Maps the slot of the instruction; `maps` keeps it for later rounds."""

    def __init__(self, instruction: Instruction, maps: Maps | None = None) -> None:
        assert instruction.manifest is not None
        self.path = Path(instruction.address)
        self._sizes = instruction.manifest.bucket_bytes
        self._starts, self._needed = bucket_starts(self._sizes)
        self._maps = maps or Maps()
        self._view: memoryview | None = None

    def open(self) -> None:
        if not self.path.name.startswith(PREFIX):
            raise TransportUnusable(f"local: {self.path} is not a staging file")
        self._view = self._maps.view(self.path, self._needed)

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        """A view of the bucket in the mapping: the engine copies it once, so `into` would save nothing."""
        assert self._view is not None
        start = self._starts[number]
        return self._view[start : start + self._sizes[number]]

    def close(self) -> None:
        """Drop the view (a thread may still digest it)."""
        self._view = None
