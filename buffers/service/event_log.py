"""history.jsonl: every transition once, in order, also over kills of the service.

The lines of a drain travel with the drain's rows into the store (row `hist`), and only then into
the file. Guarantees:
1. a line stands in the file exactly if its transition is in the store: on open, lines that a kill kept from the file
   are appended from the row. Lines after those of the row say that the store was restored to an earlier state;
2. lines are written whole; a last line cut by a loss of power is completed or removed on open;
3. a loss of power costs what it costs the store: nothing with `always`, about a second with `everysec`;
4. the writer knows the place of each line: a service that was stopped before it wrote the lines of its row, and goes on
   after its successor has, writes the same bytes to the same place;
5. every drain is sealed (`asyncrl.runtime.history_chain`). The row holds the sealed lines; a new service continues the
   chain after the last whole line of the file, whatever wrote it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import Unavailable
from asyncrl.runtime.history_chain import MARK, Chain, find_seal

LINE_BYTES = 1 << 20  # longer than a line
KEY = "hist"
_encode = msgspec.json.Encoder().encode_lines


def lines_of(events: Sequence[Any]) -> bytes:
    """The lines of some events."""
    return _encode(events)


class History:
    """The file. `last` is the row that the store held on open; `key` signs the seals (empty: none are signed)."""

    def __init__(self, path: Path, *, last: bytes = b"", fsync: str = "everysec", key: bytes = b"") -> None:
        self._fsync = fsync
        self._chain = Chain(key)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.found = os.fstat(self._file).st_size > 0  # written by services before this one
        self.went_back = False  # the store was restored to an earlier state: later transitions stand here
        self._complete(last)
        self._continue_chain()

    @property
    def head(self) -> str:
        """Of the chain: it covers every line up to the last drain."""
        return self._chain.head

    def seal(self, lines: bytes) -> bytes:
        """The lines of a drain, at least one, as they go into store and file."""
        return self._chain.seal(lines)

    def _complete(self, last: bytes) -> None:
        size = os.fstat(self._file).st_size
        looked = len(last) + LINE_BYTES
        tail = os.pread(self._file, looked, max(0, size - looked))
        torn = len(tail) - (tail.rfind(b"\n") + 1)
        if torn:
            os.ftruncate(self._file, size - torn)
            tail = tail[:-torn]
        self._end = size - torn
        if not last or tail.endswith(last):
            return
        self.went_back = self._holds(last)
        if not self.went_back:
            # After a torn line some lines of the row may be there already: append only what is missing.
            self._append(last[_count_present(tail, last) :])

    def _holds(self, lines: bytes) -> bool:
        """Whether the lines stand further up: the store came back as it was earlier, and must not repeat itself."""
        if not os.fstat(self._file).st_size:
            return False
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as whole:
            return whole.rfind(lines) >= 0

    def _continue_chain(self) -> None:
        """Take up the chain after the newest seal; lines after it belong to the next one."""
        if not os.fstat(self._file).st_size:
            return
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as whole:
            place = whole.rfind(MARK)
            while place >= 0:
                start, end = whole.rfind(b"\n", 0, place) + 1, whole.find(b"\n", place) + 1
                if end and (seal := find_seal(whole[start:end])) is not None:
                    self._chain.restart(seal)
                    break
                place = whole.rfind(MARK, 0, place)
            with memoryview(whole) as data:
                self._chain.add(data[end if place >= 0 else 0 :])

    def write(self, lines: bytes) -> None:
        if lines:
            self._append(lines)
            if self._fsync == "always":
                os.fdatasync(self._file)

    def _append(self, lines: bytes) -> None:
        os.lseek(self._file, self._end, os.SEEK_SET)
        write_all(self._file, lines)
        self._end += len(lines)

    def sync(self) -> None:
        """Called every second from a thread."""
        if self._fsync == "everysec":
            os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)


def _count_present(tail: bytes, lines: bytes) -> int:
    """How many bytes of the lines the tail ends with."""
    first = lines[: lines.find(b"\n") + 1]
    place = tail.rfind(first)
    while place >= 0:
        if lines.startswith(tail[place:]):
            return len(tail) - place
        place = tail.rfind(first, 0, place)
    return 0


def write_all(file: int, data: bytes) -> None:
    """Write the data; the kernel may write it in parts. Raises `disk.full` or `store.refused`: the service then ends
    and starts again."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError as error:
        code = "disk.full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "store.refused"
        raise Unavailable(code, f"log file: {error.strerror}") from None
