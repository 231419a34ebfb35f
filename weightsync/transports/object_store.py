"""The folders of the disk transport: on a file system, or in an object store through fsspec.

Guarantees:
1. `write` makes a folder visible as a whole or not at all: on a file system by a rename after everything is on the
   disk, in an object store by its last file, without which readers ignore the others;
2. names come from this process, never from file contents;
3. every failure is an OSError, whatever the store raises.
A URL needs fsspec: `pip install asyncrl[object-store]`, and the package of the store (s3fs, gcsfs).
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
        """Make the root, remove unfinished folders."""

    def visible(self) -> bool:
        """Whether the root can be seen from this process."""

    def names(self, pattern: str) -> list[str]:
        """The complete folders with matching names, oldest first."""

    def path(self, name: str) -> str:
        """The address of a folder."""

    def write(self, name: str, files: Sequence[File], *, each: Callable[[], None], last: Callable[[], None]) -> None:
        """Write a folder; `each` is called before every file, `last` before the folder becomes visible."""

    def remove(self, name: str) -> None:
        """Remove a folder, if it exists."""

    def size(self, name: str, file: str) -> int:
        """Size of a file, -1 if it does not exist."""

    def read(self, name: str, file: str) -> bytes: ...

    def read_into(self, name: str, file: str, start: int, parts: Sequence[memoryview]) -> None:
        """Fill the parts with the bytes from `start` on."""


def open_folders(root: str) -> Folders:
    """Folders at a path or URL. Raises `config.extra` for a URL without fsspec."""
    return ObjectFolders(root) if "://" in root else FileFolders(root)


class FileFolders:
    """Folders on a file system."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._path = Path(root)

    def make_ready(self) -> None:
        """One publisher writes here, so hidden folders are remains of an earlier one."""
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
        """Hide it first, so that no new reader starts; readers with an open file can finish."""
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


class ObjectFolders:
    """Folders in an object store. Nothing can be renamed: a folder is complete when it has its last file."""

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
        """Object stores need no folders; a missing bucket raises."""
        with _convert_errors():
            self._store.makedirs(self._path, exist_ok=True)

    def visible(self) -> bool:
        """Always: missing objects raise when they are read."""
        return True

    def names(self, pattern: str) -> list[str]:
        """Sorted by name: the times of a store are not reliable."""
        with _convert_errors():
            self._store.invalidate_cache()
            found = [str(path).rstrip("/").rpartition("/")[2] for path in self._store.ls(self._path, detail=False)]
        return sorted(name for name in found if re.fullmatch(pattern, name))

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def write(self, name: str, files: Sequence[File], *, each: Callable[[], None], last: Callable[[], None]) -> None:
        with _convert_errors():
            for number, (file, parts) in enumerate(files, start=1):
                each()
                if number == len(files):
                    last()
                with self._store.open(f"{self._path}/{name}/{file}", "wb") as out:
                    for part in parts:
                        out.write(part)

    def remove(self, name: str) -> None:
        with _convert_errors():
            self._store.invalidate_cache()
            if self._store.exists(f"{self._path}/{name}"):
                self._store.rm(f"{self._path}/{name}", recursive=True)

    def size(self, name: str, file: str) -> int:
        try:
            with _convert_errors():
                return int(self._store.size(f"{self._path}/{name}/{file}"))
        except FileNotFoundError:
            return -1

    def read(self, name: str, file: str) -> bytes:
        with _convert_errors():
            self._store.invalidate_cache()
            return bytes(self._store.cat_file(f"{self._path}/{name}/{file}"))

    def read_into(self, name: str, file: str, start: int, parts: Sequence[memoryview]) -> None:
        """One request for all parts: they are contiguous in the file."""
        size = sum(part.nbytes for part in parts)
        with _convert_errors():
            data = memoryview(self._store.cat_file(f"{self._path}/{name}/{file}", start=start, end=start + size))
        if data.nbytes != size:
            raise OSError("the file ends too early")
        for part in parts:
            part[:] = data[: part.nbytes]
            data = data[part.nbytes :]


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Turn the errors of a store's package into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # s3fs, gcsfs and others share no class, and none of their errors may end a role
        raise OSError(f"{type(error).__name__}: {error}") from error
