"""Writes a producer's payloads to files on the buffer's host, so that they cross no socket.

The producer writes a payload once and names its place; the service verifies and validates the bytes that it reads there
(`buffers.payloads.producer_files`). Guarantees:
1. a file has one writer and is new, or was freed by the service; records are only appended;
2. a record is complete before its place is named: a kill of either process loses nothing that was answered;
3. a payload that cannot be written (full disk, missing folder) travels as a frame instead;
4. after `FAILURES` refusals in a row the writer stops: the folder is not usable.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from contextlib import suppress
from pathlib import Path

from asyncrl.wire import Buffer, Place, Welcome
from buffers.payloads.record_format import GUEST, HEAD, MAGIC, checksum_of, reserve, same_folder, segment_path

FAILURES = 3


class PlaceWriter:
    """One per life of a producer; used on one thread."""

    def __init__(self, folder: Path, *, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._number = (1 + secrets.randbelow((1 << 31) - 1)) * GUEST  # of the newest file
        self._file = -1
        self._offset = self._allocated = 0
        self._full: deque[int] = deque(maxlen=64)  # files before, which the service may free
        self._failures = 0

    @classmethod
    def open(cls, welcome: Welcome) -> PlaceWriter | None:
        """A writer if this process sees the folder that the service names, else None."""
        folder = same_folder(welcome.segments, welcome.nonce)
        return None if folder is None else cls(folder, file_bytes=welcome.segment_bytes)

    def write(self, header: bytes, payload: Buffer) -> Place | None:
        """Write a record; its place, or None."""
        if self._failures >= FAILURES:
            return None
        payload_bytes = memoryview(payload).nbytes
        size = HEAD.size + len(header) + payload_bytes
        checksum = checksum_of(header, payload)
        try:
            if self._file < 0 or (self._offset and self._offset + size > self._file_bytes):
                self._begin()
            end, limit = self._offset + size, self._file_bytes
            self._allocated = reserve(
                self._file, written=self._offset, needed=end, allocated=self._allocated, limit=limit
            )
            head = HEAD.pack(MAGIC, self._number % GUEST, len(header), payload_bytes, checksum)
            if os.pwritev(self._file, [head, header, payload], self._offset) != size:
                raise OSError(0, "a short write")
        except OSError:
            self._give_up()
            return None
        place = Place(self._number, self._offset, len(header), payload_bytes, checksum)
        self._offset = end
        return place

    def confirm(self) -> None:
        """The service has read a record."""
        self._failures = 0

    def reject(self, place: Place) -> None:
        """The service cannot read the record: use a new file. All records in flight count as one refusal."""
        if place.segment == self._number and self._file >= 0:
            self._give_up()

    def _give_up(self) -> None:
        self._failures += 1
        self.close()

    def _begin(self) -> None:
        """Begin a new file; reuse one that the service has freed, because its pages are allocated."""
        self.close()
        number, self._allocated = self._number + 1, 0
        path = segment_path(self._folder, number)
        for old in list(self._full):
            with suppress(FileNotFoundError):  # not free yet, or removed
                os.rename(segment_path(self._folder, old).with_suffix(".free"), path)
                self._full.remove(old)
                break
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._number, self._offset = number, 0

    def close(self) -> None:
        """Close the file; the service frees it when none of its records is needed."""
        if self._file >= 0:
            os.close(self._file)
            self._full.append(self._number)
            self._file = -1
