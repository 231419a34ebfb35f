"""Payload files that producers on this host write, as the service reads them.

A producer appends records (`buffers.payloads.record_format`) to its own files in the run's segment folder
(`buffers.client.place_writer`) and names their places (`SamplesAt`). The number of such a file is `writer << 32 |
index`: the writer is random and stands for one life of one producer, the index counts its files. Guarantees:
1. nothing is trusted: the path follows from the number, only plain files are opened, sizes are limited, and bytes are
   copied before they are verified and validated (a mapped file could be truncated during the read);
2. a place that does not match is refused with `wire.place` and changes nothing: the producer sends the payload instead;
3. fsync as for the service's own files: always = before the index, everysec = by `sync`, never;
4. a file is removed when its last needed record was released and its writer uses another file, or writes no more (a new
   life of that producer, silence, a restart of the service). A living writer gets some of its files back to overwrite.
A change that a producer makes after its record was accepted is detected by the checksum.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import WireError
from asyncrl.wire import MAX_HEADER_BYTES, Place
from buffers.groups.records import Record
from buffers.payloads.record_format import GUEST, HEAD, MAGIC, SPARE_BYTES, checksum_of, segment_path

ROOM_BYTES = 4 << 20  # kept to copy records into; for a larger one more is made and forgotten
OPEN_FILES = 256
STRANGE_S = 60.0  # a younger file of an unknown writer may belong to one that is about to send
_NAME = re.compile(r"(\d{10,19})\.(seg|free)")


def segment_writer(segment: int) -> int:
    """The life of a producer that writes the file; 0: the service."""
    return segment // GUEST


def is_guest(segment: int) -> bool:
    """Whether a producer writes that file."""
    return segment >= GUEST


class Guests:
    """The files of producers. `live` are the records in them that the index knows."""

    def __init__(self, folder: Path, *, file_bytes: int, fsync: str, live: Iterable[Record] = ()) -> None:
        self._folder = folder
        self._fsync = fsync
        self._spares = max(2, SPARE_BYTES // file_bytes)
        self._live: Counter[int] = Counter(record.segment for record in live)
        self._writers: dict[str, int] = {}  # producer -> its present life
        self._newest: dict[int, int] = {}  # writer -> its newest file
        self._given: list[Path] = []  # free files that their writers may take back
        self._files: dict[int, int] = {}
        self._dirty: dict[int, None] = {}
        self._room = bytearray(ROOM_BYTES)
        self.adopted = False  # something since the last flush
        self._sweep(older_s=-1.0)

    # ------------------------------------------------------------ take

    def read(self, producer: str, place: Place, *, max_bytes: int) -> tuple[memoryview, memoryview]:
        """Header and payload at a place, verified; valid until the next call. Raises `wire.place`, `wire.size`."""
        sizes = min(place.offset, place.header_bytes, place.payload_bytes, place.checksum)
        if not GUEST <= place.segment < 1 << 63 or sizes < 0 or max(place.offset >> 62, place.checksum >> 64):
            raise WireError("wire.place", "that is no place in a file of a producer")
        if place.header_bytes > MAX_HEADER_BYTES or place.payload_bytes > max_bytes:
            raise WireError("wire.size", f"header {place.header_bytes} B, payload {place.payload_bytes} B")
        size = HEAD.size + place.header_bytes + place.payload_bytes
        try:
            file = self.open(place.segment)
            if size > ROOM_BYTES and os.fstat(file).st_size < place.offset + size:
                raise WireError("wire.place", f"file {place.segment} ends before {place.offset + size}")
            data = memoryview(self._room if size <= ROOM_BYTES else bytearray(size))[:size]
            count = os.preadv(file, [data], place.offset)
        except OSError as error:
            raise WireError("wire.place", f"file {place.segment} cannot be read: {error.strerror}") from None
        expected = HEAD.pack(MAGIC, place.segment % GUEST, place.header_bytes, place.payload_bytes, place.checksum)
        header, payload = data[HEAD.size : HEAD.size + place.header_bytes], data[HEAD.size + place.header_bytes :]
        if count != size or data[: HEAD.size] != expected or checksum_of(header, payload) != place.checksum:
            raise WireError("wire.place", f"file {place.segment} holds something else at {place.offset}")
        self._meet(producer, place.segment)
        return header, payload

    def open(self, segment: int) -> int:
        """A descriptor to read the file by. Raises OSError."""
        if segment not in self._files:
            # Without O_NONBLOCK a pipe of that name would stop the service.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(segment_path(self._folder, segment), flags)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise OSError(0, "it is no plain file")
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[segment] = file
        return self._files[segment]

    def adopt(self, place: Place) -> Record:
        """The record at a place that was read belongs to the index from now on."""
        self.adopted = True
        self._live[place.segment] += 1
        self._dirty[place.segment] = None
        return Record(place.segment, place.offset, place.header_bytes, place.payload_bytes, place.checksum)

    def flush(self) -> None:
        """What was adopted is on disk (always). Raises OSError."""
        self.adopted = False
        if self._fsync == "always":
            self._sync()

    def sync(self) -> None:
        """What was adopted before is on disk (everysec). May run on another thread."""
        if self._fsync == "everysec":
            self._sync()

    def _sync(self) -> None:
        while self._dirty:  # what is adopted meanwhile stands in it again
            try:
                segment, _ = self._dirty.popitem()
            except KeyError:  # freed since the look at it, on the service's thread
                return
            with suppress(FileNotFoundError):  # freed
                file = os.open(segment_path(self._folder, segment), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    os.fdatasync(file)
                finally:
                    os.close(file)

    # ------------------------------------------------------------ free

    def release(self, record: Record) -> None:
        """The record is free."""
        self._live[record.segment] -= 1
        self._settle(record.segment)

    def keep_only(self, producers: Collection[str]) -> None:
        """Other producers write no more: their files are removed when no record in them is needed."""
        for name in [name for name in self._writers if name not in producers]:
            self._leave(self._writers.pop(name))

    def _meet(self, producer: str, segment: int) -> None:
        """Record the writer of a file. A new writer under a name ends the one before."""
        writer = segment_writer(segment)
        before = self._writers.get(producer)
        if before != writer:
            self._writers[producer] = writer
            if before is not None:
                self._leave(before)
        last = self._newest.get(writer, 0)
        if segment > last:
            self._newest[writer] = segment
            if last:
                self._settle(last)
            else:
                self._sweep(older_s=STRANGE_S)

    def _leave(self, writer: int) -> None:
        last = self._newest.pop(writer, 0)
        if last:
            self._settle(last)
        for number, path in self._list_files():
            if segment_writer(number) == writer and self._live[number] <= 0:
                self._remove(number, path)

    def _sweep(self, *, older_s: float) -> None:
        """Remove files of unknown writers without needed records."""
        for number, path in self._list_files():
            if segment_writer(number) not in self._newest and self._live[number] <= 0:
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > older_s:
                        self._remove(number, path)

    def _list_files(self) -> Iterator[tuple[int, Path]]:
        for path in list(self._folder.iterdir()):
            found = _NAME.fullmatch(path.name)
            if found and is_guest(int(found[1])):
                yield int(found[1]), path

    def _settle(self, segment: int) -> None:
        """Free the file if no record in it is needed and its writer uses another."""
        newest = self._newest.get(segment_writer(segment))
        if self._live[segment] > 0 or newest == segment:
            return
        path = segment_path(self._folder, segment)
        self._given = [other for other in self._given if other.exists()]
        if newest is None or len(self._given) >= self._spares:
            self._remove(segment, path)
            return
        self._forget(segment)
        with suppress(FileNotFoundError):
            os.rename(path, path.with_suffix(".free"))
            self._given.append(path.with_suffix(".free"))

    def _remove(self, segment: int, path: Path) -> None:
        self._forget(segment)
        path.unlink(missing_ok=True)

    def _forget(self, segment: int) -> None:
        self._live.pop(segment, None)
        self._dirty.pop(segment, None)
        file = self._files.pop(segment, None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """Close the files and remove those without needed records."""
        for writer in list(self._newest):
            self._leave(writer)
        for file in self._files.values():
            os.close(file)
        self._files = {}
