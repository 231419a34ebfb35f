"""Payloads on disk: append-only segment files, and a bounded cache of the newest records.

Records have the form of `buffers.payloads.record_format`. Producers on this host write records into files of their own,
the `guests`; they are read and released here, too. Guarantees:
1. `append` returns the place at once; `flush` writes all appended records with one gathering write, before the index;
2. a new file begins at `segment_bytes`; a file is removed when its last needed record was released;
3. `read` verifies the checksum: damaged bytes raise `store.corrupt` and are never handed out;
4. on open, records that the index does not know are cut off the last file, and the cut is reported;
5. with `apart` (a run with a stand-by) a service begins at the next multiple of `APART`, writes to no file of a service
   before it and removes none of one after it: what one that is fenced still does reaches no record of this one;
6. fsync as configured: always = on every flush, everysec = by `sync`, never. Space is allocated ahead, and a freed
   file is overwritten instead of a new one being created (measured: a third of the CPU of appending). The segment
   number in a record distinguishes it from the earlier content of the file.
"""

from __future__ import annotations

import errno
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from asyncrl.errors import AsyncRLError, Unavailable
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Buffer, Place
from buffers.groups.records import Record
from buffers.payloads.producer_files import Guests, is_guest, segment_writer
from buffers.payloads.record_format import (
    GUEST,
    GUEST_BYTES,
    HEAD,
    MAGIC,
    NONCE,
    SPARE_BYTES,
    checksum_of,
    reserve,
    segment_path,
)

IOV_LIMIT = 512
APART = 1 << 16  # numbers that a service keeps clear of: more files than one drain fills


def round_up(number: int) -> int:
    """The next multiple of `APART`."""
    return number + -number % APART


class Segments:
    """The segment files of a run. `live` are the records that the index knows."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        cache_bytes: int,
        fsync: str = "everysec",
        live: Iterable[Record] = (),
        apart: bool = False,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self._nonce = os.urandom(16).hex()
        (folder / NONCE).write_text(self._nonce)
        self._segment_bytes = segment_bytes
        self._cache_bytes = cache_bytes
        self._fsync = fsync
        self._cache: OrderedDict[Record, tuple[Buffer, Buffer]] = OrderedDict()
        self._cached = 0
        self._queue: list[Buffer] = []
        self._unwritten: dict[Record, tuple[Buffer, Buffer, bool]] = {}
        self._readers: dict[int, int] = {}
        self._live: Counter[int] = Counter()
        self._dirty = False
        self._finished: list[int] = []  # descriptors of full files that are not synced yet
        self._spares: list[Path] = []  # free files to write over
        for left in folder.glob("*.spare"):
            left.unlink()
        self._allocated = 0
        self.report: list[str] = []
        self.damaged: list[Record] = []
        records = list(live)
        named = [record.segment for record in records if not is_guest(record.segment)]
        after = round_up(max(named, default=0) + 1) if apart else GUEST  # where a service after this one may write
        self._recover([record for record in records if not is_guest(record.segment)], self._numbers(below=after))
        self._recover_guests([record for record in records if is_guest(record.segment)])
        # Above every number that a record names, also one whose file is gone: two files would share a count.
        self._number = max([*self._numbers(), *named], default=0) + 1
        if apart:
            self._number = round_up(self._number)
        self._reused_from = self._number if apart else 0
        self._offset = self._written = 0  # with and without what is queued
        self._file = self._create(self._number)

    # ------------------------------------------------------------ start

    def _path(self, number: int) -> Path:
        return segment_path(self._folder, number)

    def _numbers(self, *, below: int = GUEST) -> list[int]:
        numbers = (int(path.stem) for path in self._folder.glob("*.seg") if path.stem.isdigit())
        return sorted(number for number in numbers if number < below)

    def _create(self, number: int) -> int:
        if self._spares:
            os.rename(self._spares.pop(), self._path(number))
        self._allocated = 0
        return os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o600)

    def _recover(self, live: list[Record], numbers: list[int]) -> None:
        """Files without live records go; what lies behind the last live record of the last file is cut."""
        sizes = {number: self._path(number).stat().st_size for number in numbers}
        for record in live:
            self._live[record.segment] += 1  # a damaged one too: it is released like any other
            if not self._whole(record, sizes):
                self.damaged.append(record)
        for number in numbers:
            ends = [
                record.offset + HEAD.size + record.header_bytes + record.payload_bytes
                for record in live
                if record.segment == number and record not in self.damaged
            ]
            if not ends:
                self._path(number).unlink()
            elif number == numbers[-1]:
                self._cut(number, max(ends))
        last = [record for record in live if record.segment == numbers[-1]] if numbers else []
        self.damaged.extend(record for record in last if record not in self.damaged and not self._intact(record))

    def _recover_guests(self, live: list[Record]) -> None:
        """The newest file of each writer may be torn by a loss of power; the rest of what it held is not needed."""
        newest: dict[int, int] = {}
        for record in live:
            writer = segment_writer(record.segment)
            newest[writer] = max(newest.get(writer, 0), record.segment)
        sizes = {n: p.stat().st_size for n in {r.segment for r in live} if (p := self._path(n)).exists()}
        torn = [record for record in live if not self._whole(record, sizes)]
        self.guests = Guests(
            self._folder, file_bytes=min(self._segment_bytes, GUEST_BYTES), fsync=self._fsync, live=live
        )
        self.damaged += torn
        last = [record for record in live if record.segment == newest[segment_writer(record.segment)]]
        self.damaged += [record for record in last if record not in torn and not self._intact(record)]

    @staticmethod
    def _whole(record: Record, sizes: Mapping[int, int]) -> bool:
        return record.offset + HEAD.size + record.header_bytes + record.payload_bytes <= sizes.get(record.segment, 0)

    def _cut(self, number: int, end: int) -> None:
        """Cut what lies behind `end`; a record of this segment there was written and never indexed: say so."""
        path = self._path(number)
        with path.open("r+b") as file:
            file.seek(end)
            head = file.read(HEAD.size)
            if len(head) == HEAD.size and HEAD.unpack(head)[:2] == (MAGIC, number):
                self.report.append(f"records without an index entry were cut off {path.name} at {end}")
            file.truncate(end)

    def _intact(self, record: Record) -> bool:
        try:
            self.read(record)
        except AsyncRLError:
            return False
        return True

    def location(self) -> tuple[str, str]:
        """The folder, and the content of its file `nonce`: a learner that finds it reads records by place."""
        return str(self._folder), self._nonce

    # ------------------------------------------------------------ write

    def append(self, header: Buffer, payload: Buffer, checksum: int, *, again: bool = True) -> Record:
        """Queue a record for the next `flush`; where it will lie. `again`: it will be read here, so cache it."""
        header_bytes, payload_bytes = memoryview(header).nbytes, memoryview(payload).nbytes
        size = HEAD.size + header_bytes + payload_bytes
        if self._offset and self._offset + size > self._segment_bytes:
            self._rotate()
        record = Record(self._number, self._offset, header_bytes, payload_bytes, checksum)
        self._queue += [HEAD.pack(MAGIC, self._number, header_bytes, payload_bytes, checksum), header, payload]
        self._offset += size
        self._live[record.segment] += 1
        self._unwritten[record] = (header, payload, again)
        return record

    def adopt(self, place: Place, header: Buffer, payload: Buffer, *, again: bool = True) -> Record:
        """The record that a producer wrote at this place (`guests.read` has verified it) belongs to the index."""
        record = self.guests.adopt(place)
        if again:
            self._remember(record, bytes(header), bytes(payload))
        return record

    def _rotate(self) -> None:
        self.flush()
        failpoint("buffer.rotate")
        self._finished.append(self._file)  # `sync` closes it, on its thread
        if self._fsync != "everysec":
            self._close_finished()
        finished, self._number, self._offset, self._written = self._number, self._number + 1, 0, 0
        self._file = self._create(self._number)
        self._unlink_if_free(finished)

    def flush(self) -> None:
        """Write what was appended. Raises `disk.full` (or `store.refused`): the service then ends and starts again."""
        if not self._queue and not self.guests.adopted:
            return
        queue, self._queue = self._queue, []
        failpoint("buffer.before_segments")
        try:
            self.guests.flush()
            if queue:
                self._allocate()
            for start in range(0, len(queue), IOV_LIMIT):
                self._write(queue[start : start + IOV_LIMIT])
            if self._fsync == "always" and queue:
                os.fdatasync(self._file)
        except OSError as error:
            code = "disk.full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "store.refused"
            raise Unavailable(code, f"segment file: {error.strerror}", where=str(self._path(self._number))) from None
        failpoint("buffer.after_segments")
        self._dirty = self._dirty or bool(queue)
        for record, (header, payload, again) in self._unwritten.items():
            if again:
                self._remember(record, header, payload)
        self._unwritten = {}

    def _allocate(self) -> None:
        """Reserve the space of what is queued and some more."""
        self._allocated = reserve(
            self._file, written=self._written, needed=self._offset, allocated=self._allocated, limit=self._segment_bytes
        )

    def _write(self, parts: Sequence[Buffer]) -> None:
        wanted = sum(memoryview(part).nbytes for part in parts)
        written = os.pwritev(self._file, parts, self._written)
        if written < wanted:  # a short write: the rest in one piece
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                count = os.pwrite(self._file, rest, self._written + written)
                written, rest = written + count, rest[count:]
        self._written += wanted

    def sync(self) -> None:
        """Flush what was written since the last call to the disk (everysec). May run on another thread."""
        self.guests.sync()
        if self._fsync != "everysec" or not (self._dirty or self._finished):
            return
        self._dirty = False
        while self._finished:  # the writer only appends
            os.fdatasync(self._finished[0])
            os.close(self._finished.pop(0))
        current = os.dup(self._file)  # the writer may rotate meanwhile
        try:
            os.fdatasync(current)
        finally:
            os.close(current)

    def _close_finished(self) -> None:
        while self._finished:
            os.close(self._finished.pop())

    # ------------------------------------------------------------ read

    def read(self, record: Record) -> tuple[Buffer, Buffer]:
        """Header and payload of a record. Raises `store.corrupt` where the bytes are not those that were written."""
        found = self._cache.get(record) or self._unwritten.get(record)
        if found is not None:
            return found[0], found[1]
        header, payload = self._read_file(record)
        self._remember(record, header, payload)
        return header, payload

    def _read_file(self, record: Record) -> tuple[bytes, memoryview]:
        where = str(self._path(record.segment))
        size = HEAD.size + record.header_bytes + record.payload_bytes
        try:
            data = os.pread(self._reader(record.segment), size, record.offset)
        except OSError as error:
            raise AsyncRLError("store.corrupt", f"record cannot be read: {error.strerror}", where=where) from None
        header = data[HEAD.size : HEAD.size + record.header_bytes]
        payload = memoryview(data)[HEAD.size + record.header_bytes :]
        expected = HEAD.pack(MAGIC, record.segment % GUEST, record.header_bytes, record.payload_bytes, record.checksum)
        if len(data) != size or data[: HEAD.size] != expected or checksum_of(header, payload) != record.checksum:
            raise AsyncRLError("store.corrupt", f"record at {record.offset} is damaged", where=where)
        return header, payload

    def _reader(self, number: int) -> int:
        if is_guest(number):
            return self.guests.open(number)
        if number not in self._readers:
            self._readers[number] = os.open(self._path(number), os.O_RDONLY)
        return self._readers[number]

    def _remember(self, record: Record, header: Buffer, payload: Buffer) -> None:
        if record.payload_bytes > self._cache_bytes or record in self._cache:
            return
        self._cache[record] = (header, payload)
        self._cached += record.payload_bytes + record.header_bytes
        while self._cached > self._cache_bytes:
            old, _ = self._cache.popitem(last=False)
            self._cached -= old.payload_bytes + old.header_bytes

    # ------------------------------------------------------------ release

    def release(self, records: Iterable[Record]) -> None:
        """These records are free; a file whose last live record goes is unlinked."""
        for record in records:
            if self._cache.pop(record, None) is not None:
                self._cached -= record.payload_bytes + record.header_bytes
            if is_guest(record.segment):
                self.guests.release(record)
                continue
            self._live[record.segment] -= 1
            self._unlink_if_free(record.segment)

    def _unlink_if_free(self, number: int) -> None:
        if number == self._number or self._live[number] > 0:
            return
        self._live.pop(number, None)
        reader = self._readers.pop(number, None)
        if reader is not None:
            os.close(reader)
        enough = len(self._spares) >= max(1, SPARE_BYTES // self._segment_bytes)
        if enough or number < self._reused_from or not self._path(number).exists():
            self._path(number).unlink(missing_ok=True)
            return
        self._spares.append(self._path(number).with_suffix(".spare"))
        os.replace(self._path(number), self._spares[-1])

    def close(self) -> None:
        """Write what is queued and close the files."""
        self.flush()
        self.sync()
        self.guests.close()
        self._close_finished()
        os.ftruncate(self._file, self._written)
        os.close(self._file)
        for reader in self._readers.values():
            os.close(reader)
        for spare in self._spares:
            spare.unlink()
        if not self._live[self._number]:
            self._path(self._number).unlink(missing_ok=True)
