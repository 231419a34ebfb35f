"""Transport `local`: shared memory on one host. One writer, any number of readers, no copy in between.

The staging slots of the publisher are files that the members map read-only. Guarantees:
1. a reader never blocks the writer: an old slot may be overwritten while it is read, which a wrong bucket digest shows;
2. slots are never truncated in place, so a reader cannot be killed by SIGBUS;
3. a file that is not there, not ours or too small raises `TransportUnusable`: this member does not share the host.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from asyncrl.wire import Instruction
from weightsync.plan import bucket_starts
from weightsync.staging import PREFIX
from weightsync.transports.base import TransportUnusable


class LocalInbox:
    """Maps the slot that the instruction names."""

    def __init__(self, instruction: Instruction) -> None:
        assert instruction.manifest is not None
        self._path = Path(instruction.address)
        self._sizes = instruction.manifest.bucket_bytes
        self._starts, self._needed = bucket_starts(self._sizes)
        self._view: memoryview | None = None

    def open(self) -> None:
        """Map the file."""
        if not self._path.name.startswith(PREFIX):
            raise TransportUnusable(f"local: {self._path} is not a staging file")
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise TransportUnusable(f"local: {self._path} is not visible here: {error.strerror}") from None
        try:
            if os.fstat(descriptor).st_size < self._needed:
                raise TransportUnusable(f"local: {self._path} is smaller than the plan")
            self._view = memoryview(mmap.mmap(descriptor, self._needed, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)

    def read(self, number: int) -> memoryview:
        """A view of the bucket in the mapping."""
        assert self._view is not None
        start = self._starts[number]
        return self._view[start : start + self._sizes[number]]

    def close(self) -> None:
        """Forget the mapping; it goes with the last view of it (a digest may still be running in its thread)."""
        self._view = None
