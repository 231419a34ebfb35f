"""The embedded store: one SQLite file in WAL mode. Nothing to install.

`fsync`: always = `synchronous FULL`; everysec = NORMAL, and `sync` flushes the write-ahead log
once per second; never = OFF. A kill of the process loses nothing in any of them; a loss of power loses at most what
came after the last flush, and the file stays consistent (WAL).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import Fenced, Unavailable
from buffers.groups.records import Change
from buffers.stores.base import Opened

SYNCHRONOUS = {"always": "FULL", "everysec": "NORMAL", "never": "OFF"}


class SqliteStore:
    kind = "sqlite"

    def __init__(self, path: Path, *, fsync: str = "everysec") -> None:
        self.path = path
        self._fsync = fsync
        self._epoch = 0
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
            os.chmod(path, 0o600)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute(f"PRAGMA synchronous={SYNCHRONOUS[fsync]}")
            self._connection.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")
            self._connection.execute("CREATE TABLE IF NOT EXISTS service (id INTEGER PRIMARY KEY, epoch INTEGER)")
        except sqlite3.Error as error:
            raise Unavailable("store.refused", f"sqlite: {error}", where=str(path)) from None

    def open(self, *, floor: int) -> Opened:
        """Take the epoch and read the rows."""
        with self._transaction():
            found = self._connection.execute("SELECT epoch FROM service WHERE id = 1").fetchone()
            self._epoch = max(floor, found[0] + 1 if found else 1)
            self._connection.execute("INSERT OR REPLACE INTO service VALUES (1, ?)", (self._epoch,))
            rows = self._connection.execute("SELECT key, value FROM rows").fetchall()
        return Opened(self._epoch, [(key, bytes(value)) for key, value in rows])

    def apply(self, changes: Sequence[Change]) -> None:
        """Write the changes as one step."""
        with self._transaction():
            self._check_epoch()
            self._write(changes)

    def reseed(self, rows: Sequence[Change]) -> None:
        """Replace whatever the store holds by these rows."""
        with self._transaction():
            self._check_epoch()
            self._connection.execute("DELETE FROM rows")
            self._write(rows)

    def _check_epoch(self) -> None:
        found = self._connection.execute("SELECT epoch FROM service WHERE id = 1").fetchone()
        if found is None or found[0] != self._epoch:
            raise Fenced(
                "fenced", f"service epoch {self._epoch} is over, {found and found[0]} writes now", where=str(self.path)
            )

    def _write(self, changes: Sequence[Change]) -> None:
        writes = [(change.key, change.value) for change in changes if change.value is not None]
        deletes = [(change.key,) for change in changes if change.value is None]
        if writes:
            self._connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", writes)
        if deletes:
            self._connection.executemany("DELETE FROM rows WHERE key = ?", deletes)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._connection, self.path)

    def sync(self) -> None:
        """Flush the write-ahead log (everysec; the other settings need nothing)."""
        if self._fsync != "everysec":
            return
        try:
            descriptor = os.open(f"{self.path}-wal", os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close it; what was applied stays."""
        self._connection.close()


class _Transaction:
    """BEGIN IMMEDIATE .. COMMIT, or ROLLBACK on an error; SQLite's errors become ours."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def __enter__(self) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise Unavailable("store.refused", f"sqlite: {error}", where=str(self._path)) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        try:
            self._connection.execute("COMMIT" if kind is None else "ROLLBACK")
        except sqlite3.Error as failure:
            raise Unavailable("store.refused", f"sqlite: {failure}", where=str(self._path)) from None
        if isinstance(error, sqlite3.Error):
            raise Unavailable("store.refused", f"sqlite: {error}", where=str(self._path)) from None
