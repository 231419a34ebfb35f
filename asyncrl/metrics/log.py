"""The JSONL files that metrics are written to, and how they are read.

Guarantees:
1. writing a name that is not in `CATALOGUE` raises an error, so names cannot drift;
2. a line is one `write` call of an append-only file and carries the wall time; after one that a kill cut, the next
   begins on a line of its own;
3. values are finite numbers; other values are left out and listed in `skipped`;
4. `JsonTail` never raises because of the file: after damaged lines, rotation, truncation or a missing folder it returns
   the readable lines, and the next call continues.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE
from asyncrl.metrics.catalogue import CATALOGUE, NUMBERS, OPEN, is_series


def open_lines(path: Path) -> FileIO:
    """Open a file to append lines, on a new line: a kill may have cut the last one in the middle of its `write`."""
    file = path.open("a+b", buffering=0)
    if size := file.seek(0, os.SEEK_END):
        file.seek(size - 1)
        if file.read(1) != b"\n":
            with suppress(OSError):  # a full disk: what is written next says so
                file.write(b"\n")
    return file


def report_loss(what: str, error: OSError) -> None:
    """Say that something could not be written; the output may stand on the same full disk."""
    with suppress(OSError):
        print(f"ERROR: {what}: {error}", flush=True)


class MetricsLog:
    """Appends lines of metrics to one JSONL file. Text fields go through `labels`, not through the catalogue.

    With `most_bytes` a longer file is renamed to `NAME.jsonl.1`, in place of an earlier one, and a new one begins.
    """

    def __init__(self, path: Path, *, most_bytes: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._most_bytes = most_bytes
        self._file = open_lines(path)
        self._torn = b""
        self.lost = 0  # lines that `try_write` could not write
        self._loses = False

    def write(self, values: Mapping[str, float], **labels: Any) -> None:
        """One line: `t` (seconds since the epoch), the labels, the values. Raises KeyError on an unknown name."""
        line: dict[str, Any] = {"t": round(time.time(), 4), **labels}
        skipped = []
        for name, value in values.items():
            if name not in CATALOGUE and not name.startswith(OPEN):
                raise KeyError(f"metric {name!r} is not in asyncrl.metrics.CATALOGUE")
            if math.isfinite(value):
                line[name] = value
            else:
                skipped.append(name)
        if skipped:
            line["skipped"] = skipped
        text = self._torn + msgspec.json.encode(line) + b"\n"
        self._torn = b"\n"  # if a full disk cuts this write, the next line starts on a new line
        if self._file.write(text) == len(text):
            self._torn = b""
        if self._most_bytes and self._file.tell() > self._most_bytes:
            with suppress(FileNotFoundError):  # it was renamed before, and no new file could be made
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
            new = open_lines(self._path)
            self._file.close()
            self._file = new

    def try_write(self, values: Mapping[str, float], **labels: Any) -> None:
        """`write` for a service: a full disk costs it lines of this file and does not end it. The first is said."""
        try:
            self.write(values, **labels)
        except OSError as error:
            self.lost += 1
            if not self._loses:
                report_loss(f"lines of {self._path.name} are lost ({self.lost} so far)", error)
            self._loses = True
        else:
            self._loses = False

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without damaged or incomplete lines; empty if the file does not exist."""
    return list(iterate_lines(path))


def iterate_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The same one by one, for long files."""
    if not path.exists():
        return
    series = is_series(path)
    with path.open("rb") as file:
        yield from (line for text in file if (line := decode_line(text, series=series)) is not None)


def line_number(line: Mapping[str, Any], name: str) -> float | None:
    """A number of a line; None if it is missing, or too large for one."""
    value = line.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def line_time(line: Mapping[str, Any]) -> float:
    """The wall time of a line; 0 without one."""
    return line_number(line, "t") or 0.0


def drop_repeated_steps(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of `learner.jsonl` that count, one for each step: a learner that restarts from a checkpoint trains its
    last steps again, and a repeated step removes its earlier line and all later steps.

    >>> [line["x"] for line in drop_repeated_steps([{"step": s, "x": x} for s, x in ((1, 1), (2, 2), (3, 3), (2, 4))])]
    [1, 4]
    """
    kept: list[dict[str, Any]] = []
    for line in lines:
        if line_number(line, "step") is None:
            continue
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def decode_line(text: bytes, *, series: bool = False) -> dict[str, Any] | None:
    """A line as an object; None if it is not one. Of a damaged file, numbers of impossible size are removed, and in a
    metrics file metrics that are not numbers.
    """
    try:
        line = msgspec.json.decode(text)
    except UNREADABLE:
        return None
    if not isinstance(line, dict):
        return None
    wrong = [name for name in line if name in NUMBERS and not isinstance(line[name], int | float)] if series else []
    if LARGE.search(text):
        wrong += [name for name, value in line.items() if _is_too_large(name, value) and name not in wrong]
    for name in wrong:
        del line[name]
    return line


#: What a line with a number of impossible size has: a number of that many digits, or an exponent.
LARGE = re.compile(rb"\d{11}|\d[eE]\+?\d\d")
MOST, LAST_TIME = 3.4e38, 1e11  # the largest of float32; seconds since the epoch


def _is_too_large(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not abs(value) <= (LAST_TIME if name == "t" else MOST)


TAIL_BYTES = 1 << 20  # most that one poll reads


class Position(msgspec.Struct, frozen=True):
    """How far a tail has read: the file, and the end of its last complete line."""

    inode: int = 0
    offset: int = 0


class JsonTail:
    """New lines of a JSONL file that another process appends to.

    `position`: the position of an earlier tail, to continue from; else it begins at the end, with the complete lines of
    the `last_bytes` before it, or at the start.
    """

    def __init__(
        self, path: Path, *, from_end: bool = True, position: Position | None = None, last_bytes: int = 0
    ) -> None:
        self.path = path
        self._series = is_series(path)
        self.damaged = 0  # complete lines that are not JSON objects
        self.has_more = False  # the last poll read as much as it may
        self._descriptor = -1
        self._position = position or Position()
        self._partial = b""
        if last_bytes:
            self._position = _find_last_lines(path, last_bytes)
        elif from_end and position is None:
            self._position = _end_of(path)

    @property
    def position(self) -> Position:
        """The end of the last line that was returned."""
        return msgspec.structs.replace(self._position, offset=self._position.offset - len(self._partial))

    @property
    def behind_bytes(self) -> int:
        """Bytes of the file after that; 0 if the file is missing."""
        found = self._stat(self.path)
        if found is None:
            return 0
        return found.st_size - (self.position.offset if found.st_ino == self._position.inode else 0)

    def poll(self) -> list[dict[str, Any]]:
        """The lines completed since the last call (at most 1 MB)."""
        return [line for _, line in self.poll_placed()]

    def poll_placed(self) -> list[tuple[Position, dict[str, Any]]]:
        """The same, each with its begin."""
        try:
            data = self._read()
        except OSError:  # the folder is missing; it may come back on another file system
            self.close()
            data = b""
        self.has_more = len(data) == TAIL_BYTES
        inode, start = self.position.inode, self.position.offset
        self._position = Position(inode, self._position.offset + len(data))
        *whole, self._partial = (self._partial + data).split(b"\n")
        lines = []
        for text in whole:
            if (line := self._decode(text)) is not None:
                lines.append((Position(inode, start), line))
            start += len(text) + 1
        return lines

    def _read(self) -> bytes:
        if self._descriptor < 0 and not self._open():
            return b""
        data = os.pread(self._descriptor, TAIL_BYTES, self._position.offset)
        if data:
            return data
        now = self._stat(self.path)
        if now is None:
            return b""
        if now.st_ino != self._position.inode or now.st_size < self._position.offset:
            self.close()  # rotated or truncated, and everything before that was read
            return self._read() if self._open() else b""
        return b""

    def _open(self) -> bool:
        """Open the file; continue at the position if it is the same file, else at its start."""
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        found = os.fstat(self._descriptor)
        if found.st_ino != self._position.inode or not self._ends_a_line(self.position.offset):
            self._position, self._partial = Position(found.st_ino, 0), b""
        return True

    def _ends_a_line(self, offset: int) -> bool:
        """Whether this can be the file that was read before: inode numbers are reused."""
        return not offset or os.pread(self._descriptor, 1, offset - 1) == b"\n"

    def _decode(self, text: bytes) -> dict[str, Any] | None:
        line = decode_line(text, series=self._series) if text else None
        self.damaged += bool(text) and line is None
        return line

    @staticmethod
    def _stat(path: Path) -> os.stat_result | None:
        try:
            return path.stat()
        except OSError:
            return None

    def close(self) -> None:
        """Close the file; a later poll opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def _end_of(path: Path) -> Position:
    """After the last complete line of a file (for an incomplete line of more than 1 MB: its start)."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            start = max(0, found.st_size - TAIL_BYTES)
            data = os.pread(file.fileno(), found.st_size - start, start)
    except OSError:
        return Position()
    return Position(found.st_ino, start + data.rfind(b"\n") + 1)


def _find_last_lines(path: Path, count: int) -> Position:
    """The first line that begins in the last `count` bytes."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size <= count:
                return Position(found.st_ino, 0)
            file.seek(found.st_size - count - 1)
            file.readline()  # bounded: a plain file
            return Position(found.st_ino, file.tell())
    except OSError:
        return Position()
