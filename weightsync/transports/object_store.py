"""Where the disk transport keeps its folders: a file system, or an object store through fsspec.

Guarantees:
1. `write` shows a folder whole or not at all: on a file system by a rename after everything is on the disk, in an
   object store by its last file, without which nobody reads the others;
2. names come from this process, never from what was read;
3. every failure is an OSError, whatever the store raises.
fsspec is needed for a URL alone: `pip install asyncrl[object-store]`, and the package of the store (s3fs, gcsfs).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.wire import Buffer

#: A file to write: name and the parts of its contents.
File = tuple[str, Sequence[Buffer]]


class Folders(Protocol):
    """Folders of files below a root."""

    root: str

    def make_ready(self) -> None:
        """Make the root, remove what was begun and not ended."""

    def visible(self) -> bool:
        """Whether the root can be seen from this process."""

    def names(self, pattern: str) -> list[str]:
        """The whole folders whose name fits, oldest first."""

    def path(self, name: str) -> str:
        """The address of a folder."""

    def write(self, name: str, files: Sequence[File], *, each: Callable[[], None], last: Callable[[], None]) -> None:
        """Write a folder; `each` is called before every file, `last` before it can be seen."""

    def remove(self, name: str) -> None:
        """Remove a folder, also one that is not there."""

    def size(self, name: str, file: str) -> int:
        """Size of a file, -1 where it is not there."""

    def read(self, name: str, file: str) -> bytes: ...

    def read_into(self, name: str, file: str, start: int, parts: Sequence[memoryview]) -> None:
        """Fill the parts with the bytes from `start` on."""


def open_folders(root: str) -> Folders:
    """Folders at a path or URL. Raises `config.extra` for a URL without fsspec."""
    return Stored(root) if "://" in root else Files(root)


class Files:
    """On a file system."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._path = Path(root)

    def make_ready(self) -> None:
        """One publisher writes here, so what is hidden was left by one that ended."""
        self._path.mkdir(parents=True, exist_ok=True)
        for path in self._path.glob(".v*"):
            shutil.rmtree(path)

    def visible(self) -> bool:
        return self._path.is_dir()

    def names(self, pattern: str) -> list[str]:
        found = [path for path in self._path.iterdir() if re.fullmatch(pattern, path.name)]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]

    def path(self, name: str) -> str:
        return str(self._path / name)

    def write(self, name: str, files: Sequence[File], *, each: Callable[[], None], last: Callable[[], None]) -> None:
        hidden = self._path / f".{name}"
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        try:
            for file, parts in files:
                each()
                with (hidden / file).open("xb", buffering=0) as out:
                    for part in parts:
                        _write_all(out.fileno(), part)
                    os.fsync(out.fileno())
            _sync(hidden)
            last()
            hidden.rename(self._path / name)
            _sync(self._path)
        except OSError:
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def remove(self, name: str) -> None:
        """Hidden first, so that nobody begins to read it; who has a file open ends."""
        hidden = self._path / f".{name}"
        shutil.rmtree(hidden, ignore_errors=True)
        if (self._path / name).exists():
            (self._path / name).rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def size(self, name: str, file: str) -> int:
        try:
            return (self._path / name / file).stat().st_size
        except FileNotFoundError:
            return -1

    def read(self, name: str, file: str) -> bytes:
        return (self._path / name / file).read_bytes()

    def read_into(self, name: str, file: str, start: int, parts: Sequence[memoryview]) -> None:
        with (self._path / name / file).open("rb", buffering=0) as source:
            source.seek(start)
            for part in parts:
                _read_all(source, part)


def _write_all(descriptor: int, part: Buffer) -> None:
    view = memoryview(part).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view[: 1 << 30]) :]


def _read_all(source: Any, part: memoryview) -> None:
    while part.nbytes:
        count = source.readinto(part)
        if not count:
            raise OSError("the file ends too early")
        part = part[count:]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Stored:
    """In an object store: nothing can be renamed, so a folder is whole when it has its last file."""

    def __init__(self, root: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                "config.extra",
                f"{root} needs fsspec",
                where="weightsync.disk_dir",
                remedy="pip install asyncrl[object-store], and the package of the store (s3fs, gcsfs)",
            ) from None
        self.root = root.rstrip("/")
        try:
            self._store, self._path = fsspec.core.url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            raise ConfigError("config.extra", f"{root}: {error}", where="weightsync.disk_dir") from None
        self._marks: dict[str, str] = {}  # the last file of each folder written here

    def make_ready(self) -> None:
        """Object stores need no folders; a bucket that is not there shows."""
        with _as_os_error():
            self._store.makedirs(self._path, exist_ok=True)

    def visible(self) -> bool:
        """Object stores are seen from everywhere; what is missing shows when it is read."""
        return True

    def names(self, pattern: str) -> list[str]:
        """By name: stores know no time that all of them agree on."""
        with _as_os_error():
            self._store.invalidate_cache()
            found = [str(path).rstrip("/").rpartition("/")[2] for path in self._store.ls(self._path, detail=False)]
        return sorted(name for name in found if re.fullmatch(pattern, name))

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def write(self, name: str, files: Sequence[File], *, each: Callable[[], None], last: Callable[[], None]) -> None:
        with _as_os_error():
            for number, (file, parts) in enumerate(files, start=1):
                each()
                if number == len(files):
                    last()
                with self._store.open(f"{self._path}/{name}/{file}", "wb") as out:
                    for part in parts:
                        out.write(part)

    def remove(self, name: str) -> None:
        with _as_os_error():
            self._store.invalidate_cache()
            if self._store.exists(f"{self._path}/{name}"):
                self._store.rm(f"{self._path}/{name}", recursive=True)

    def size(self, name: str, file: str) -> int:
        try:
            with _as_os_error():
                return int(self._store.size(f"{self._path}/{name}/{file}"))
        except FileNotFoundError:
            return -1

    def read(self, name: str, file: str) -> bytes:
        with _as_os_error():
            self._store.invalidate_cache()
            return bytes(self._store.cat_file(f"{self._path}/{name}/{file}"))

    def read_into(self, name: str, file: str, start: int, parts: Sequence[memoryview]) -> None:
        """One request for all parts: what lies between them in memory lies in one piece there."""
        size = sum(part.nbytes for part in parts)
        with _as_os_error():
            data = memoryview(self._store.cat_file(f"{self._path}/{name}/{file}", start=start, end=start + size))
        if data.nbytes != size:
            raise OSError("the file ends too early")
        for part in parts:
            part[:] = data[: part.nbytes]
            data = data[part.nbytes :]


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Stores raise what their packages like."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of s3fs, gcsfs or any other: they share no class, and none of theirs may end a role
        raise OSError(f"{type(error).__name__}: {error}") from error
