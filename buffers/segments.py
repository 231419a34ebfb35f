"""Payloads on disk: append-only segment files, and a bounded cache of what was written last.

Called by the service. A record is `[magic 4s, segment u32, header bytes u32, payload bytes u64, xxh3_64 u64][header]
[payload]`, the checksum covering header and payload. Guarantees:
1. `append` gives the place at once, `flush` writes all that was appended with one gathering write, before the index;
2. a new file begins at `segment_bytes`; a file goes when its last live record was released;
3. `read` verifies the checksum: damaged bytes raise `store.corrupt`, they are never handed out;
4. on open, records that the index does not know are cut off the last file, and the cut is reported;
5. fsync as set: always = on every flush, everysec = by `sync`, never.
Space is allocated ahead and a free file is written over instead of made anew (measured: a third of the CPU of
appending);
the segment number in a record tells it from what an earlier use of the file left.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from asyncrl.errors import AsyncRLError, Unavailable
from asyncrl.wire import Buffer
from buffers.ledger import Record

MAGIC = b"ASEG"
HEAD = struct.Struct("<4sIIQQ")
AHEAD_BYTES = 8 << 20  # allocated ahead of the writing
SPARE_BYTES = 128 << 20  # of free files kept to be written over
IOV_LIMIT = 512
NONCE = "nonce"


def checksum_of(header: Buffer, payload: Buffer) -> int:
    """xxh3_64 over both."""
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return digest.intdigest()


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:08d}.seg"


class Segments:
    """See the module. `live` are the records that the index knows."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        cache_bytes: int,
        fsync: str = "everysec",
        live: Iterable[Record] = (),
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
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
        self._recover(list(live))
        self._number = max((number for number in self._numbers()), default=0) + 1
        self._offset = self._written = 0  # with and without what is queued
        self._file = self._create(self._number)

    # ------------------------------------------------------------ start

    def _path(self, number: int) -> Path:
        return segment_path(self._folder, number)

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.seg") if path.stem.isdigit())

    def _create(self, number: int) -> int:
        if self._spares:
            os.rename(self._spares.pop(), self._path(number))
        self._allocated = 0
        return os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o600)

    def _recover(self, live: list[Record]) -> None:
        """Files without live records go; what lies behind the last live record of the last file is cut."""
        numbers = self._numbers()
        sizes = {number: self._path(number).stat().st_size for number in numbers}
        for record in live:
            end = record.offset + HEAD.size + record.header_bytes + record.payload_bytes
            if end > sizes.get(record.segment, 0):
                self.damaged.append(record)
                continue
            self._live[record.segment] += 1
        for number in numbers:
            ends = [
                record.offset + HEAD.size + record.header_bytes + record.payload_bytes
                for record in live if record.segment == number and record not in self.damaged
            ]  # fmt: skip
            if not ends:
                self._path(number).unlink()
            elif number == numbers[-1]:
                self._cut(number, max(ends))
        last = [record for record in live if record.segment == numbers[-1]] if numbers else []
        self.damaged.extend(record for record in last if record not in self.damaged and not self._intact(record))

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

    def shown(self) -> tuple[str, str]:
        """The folder, and the content of its file `nonce`: a learner that finds it there reads records by place."""
        return str(self._folder.resolve()), self._nonce

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

    def _rotate(self) -> None:
        self.flush()
        self._finished.append(self._file)  # `sync` closes it, on its thread
        if self._fsync != "everysec":
            self._close_finished()
        finished, self._number, self._offset, self._written = self._number, self._number + 1, 0, 0
        self._file = self._create(self._number)
        self._unlink_if_free(finished)

    def flush(self) -> None:
        """Write what was appended. Raises `disk.full` (or `store.refused`): the service then ends and starts again."""
        if not self._queue:
            return
        queue, self._queue = self._queue, []
        try:
            self._allocate()
            for start in range(0, len(queue), IOV_LIMIT):
                self._write(queue[start : start + IOV_LIMIT])
            if self._fsync == "always":
                os.fdatasync(self._file)
        except OSError as error:
            code = "disk.full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "store.refused"
            raise Unavailable(code, f"segment file: {error.strerror}", where=str(self._path(self._number))) from None
        self._dirty = True
        for record, (header, payload, again) in self._unwritten.items():
            if again:
                self._remember(record, header, payload)
        self._unwritten = {}

    def _allocate(self) -> None:
        """Reserve the space of what is queued and some more; a file system that cannot is none the worse."""
        if self._offset <= self._allocated:
            return
        self._allocated = max(self._offset, min(self._segment_bytes, self._offset + AHEAD_BYTES))
        try:
            os.posix_fallocate(self._file, self._written, self._allocated - self._written)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

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
            if record.segment not in self._readers:
                self._readers[record.segment] = os.open(where, os.O_RDONLY)
            data = os.pread(self._readers[record.segment], size, record.offset)
        except OSError as error:
            raise AsyncRLError("store.corrupt", f"record cannot be read: {error.strerror}", where=where) from None
        header = data[HEAD.size : HEAD.size + record.header_bytes]
        payload = memoryview(data)[HEAD.size + record.header_bytes :]
        expected = HEAD.pack(MAGIC, record.segment, record.header_bytes, record.payload_bytes, record.checksum)
        if len(data) != size or data[: HEAD.size] != expected or checksum_of(header, payload) != record.checksum:
            raise AsyncRLError("store.corrupt", f"record at {record.offset} is damaged", where=where)
        return header, payload

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
            self._live[record.segment] -= 1
            self._unlink_if_free(record.segment)

    def _unlink_if_free(self, number: int) -> None:
        if number == self._number or self._live[number] > 0:
            return
        self._live.pop(number, None)
        reader = self._readers.pop(number, None)
        if reader is not None:
            os.close(reader)
        if len(self._spares) >= max(1, SPARE_BYTES // self._segment_bytes) or not self._path(number).exists():
            self._path(number).unlink(missing_ok=True)
            return
        self._spares.append(self._path(number).with_suffix(".spare"))
        os.replace(self._path(number), self._spares[-1])

    def close(self) -> None:
        """Write what is queued and close the files."""
        self.flush()
        self.sync()
        self._close_finished()
        os.ftruncate(self._file, self._written)
        os.close(self._file)
        for reader in self._readers.values():
            os.close(reader)
        for spare in self._spares:
            spare.unlink()
        if not self._live[self._number]:
            self._path(self._number).unlink(missing_ok=True)
