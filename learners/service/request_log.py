"""The durable log of requests: a table of SQLite that the front writes to, and the trainer answers in.

A request belongs to a queue (a model, or a sampling session) and has a number in it. Guarantees:
1. a request is on disk before its id leaves (`synchronous = FULL`);
2. the same number with the same body is the same request; with another body it is refused;
3. an answer is written once. Bodies that a model's state covers, and answers of more than a day ago, are cleared; the
   rows stay, so that a late repeat executes nothing.

Example: queue "s-1:train:0" with numbers 0 (create_model), 1 (forward_backward), 2 (optim_step).
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from asyncrl.errors import AsyncRLError

PENDING, JSON, PROTO, FAILED = range(4)  # form of an answer; FAILED is JSON as well
KEPT_ANSWER_S = 86400.0

_TABLES = """
CREATE TABLE IF NOT EXISTS requests (
  queue TEXT, seq INTEGER, kind TEXT, digest BLOB, body BLOB, form INTEGER, answer BLOB, tries INTEGER, created REAL,
  PRIMARY KEY (queue, seq)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pending ON requests (queue, seq) WHERE form = 0;
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, finished INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, path TEXT) WITHOUT ROWID;
"""


class Conflict(Exception):
    """A number was used before, with another body."""


class Request(NamedTuple):
    queue: str
    seq: int
    kind: str
    created: float  # seconds of the epoch
    tries: int  # how often its execution has begun

    @property
    def id(self) -> str:
        return f"{self.queue}:{self.seq}"


class RequestLog:
    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises `store.refused`."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_TABLES)
        except sqlite3.Error as error:
            raise AsyncRLError("store.refused", f"sqlite: {error}", where=str(path)) from None

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------ the front

    def add(self, queue: str, seq: int, kind: str, body: bytes) -> str:
        """Store a request and return its id.

        Raises:
            Conflict: the number belongs to another request.
        """
        digest = hashlib.blake2b(kind.encode() + b"\0" + body, digest_size=16).digest()
        self._db.execute(
            "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, NULL, 0, ?)",
            (queue, seq, kind, digest, body, PENDING, time.time()),
        )
        found = self._db.execute("SELECT kind, digest FROM requests WHERE queue = ? AND seq = ?", (queue, seq))
        known, expected = found.fetchone()
        if expected != digest:
            raise Conflict(f"request {seq} of {queue} is a {known} that was sent before, and this one differs from it")
        return f"{queue}:{seq}"

    def find_answer(self, request_id: str) -> tuple[int, bytes | None] | None:
        """Form and bytes of an answer; bytes None: cleared. None: there is no such request."""
        queue, _, seq = request_id.rpartition(":")
        if not seq.isdecimal():
            return None
        found: tuple[int, bytes | None] | None = self._db.execute(
            "SELECT form, answer FROM requests WHERE queue = ? AND seq = ?", (queue, int(seq))
        ).fetchone()
        return found

    def add_session(self, session: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO sessions VALUES (?, 0)", (session,))

    def finish_session(self, session: str) -> None:
        self._db.execute("UPDATE sessions SET finished = 1 WHERE id = ?", (session,))

    def is_finished(self, session: str) -> bool | None:
        """None: there is no such session."""
        found = self._db.execute("SELECT finished FROM sessions WHERE id = ?", (session,)).fetchone()
        return None if found is None else bool(found[0])

    def add_sampler(self, sampler: str, path: str) -> None:
        """Note a sampling session. `path`: a folder of weights, empty for the base model. The first one stays."""
        self._db.execute("INSERT OR IGNORE INTO samplers VALUES (?, ?)", (sampler, path))

    def find_sampler(self, sampler: str) -> str | None:
        """The path of a sampling session; None: there is no such session."""
        found = self._db.execute("SELECT path FROM samplers WHERE id = ?", (sampler,)).fetchone()
        return None if found is None else str(found[0])

    # ------------------------------------------------------------ the trainer

    def pending(self) -> list[Request]:
        """Requests without an answer, by queue and number."""
        columns = "queue, seq, kind, created, tries"
        return [
            Request(*row)
            for row in self._db.execute(f"SELECT {columns} FROM requests WHERE form = 0 ORDER BY queue, seq")
        ]

    def count(self, queue: str, first: int, end: int) -> int:
        """How many of the numbers from `first` to before `end` are there."""
        found = self._db.execute(
            "SELECT count(*) FROM requests WHERE queue = ? AND seq >= ? AND seq < ?", (queue, first, end)
        )
        return int(found.fetchone()[0])

    def body(self, request: Request) -> bytes:
        found = self._db.execute("SELECT body FROM requests WHERE queue = ? AND seq = ?", (request.queue, request.seq))
        return bytes(found.fetchone()[0])

    def first_body(self, queue: str) -> tuple[str, bytes] | None:
        """Kind and body of request 0, which makes a model; it is never cleared."""
        found: tuple[str, bytes] | None = self._db.execute(
            "SELECT kind, body FROM requests WHERE queue = ? AND seq = 0", (queue,)
        ).fetchone()
        return found

    def begin(self, request: Request) -> None:
        """Count an execution, so that a request that ends the process is not repeated for ever."""
        self._db.execute(
            "UPDATE requests SET tries = tries + 1 WHERE queue = ? AND seq = ?", (request.queue, request.seq)
        )

    def answer(self, request: Request, form: int, answer: bytes) -> None:
        self._db.execute(
            "UPDATE requests SET form = ?, answer = ? WHERE queue = ? AND seq = ? AND form = 0",
            (form, answer, request.queue, request.seq),
        )

    def passes(self, queue: str, first: int, end: int) -> list[bytes]:
        """Bodies of the answered forward_backward requests with these numbers, in order."""
        found = self._db.execute(
            "SELECT body FROM requests WHERE queue = ? AND seq >= ? AND seq < ? AND kind = ? AND form = ? ORDER BY seq",
            (queue, first, end, "forward_backward", PROTO),
        )
        return [bytes(row[0]) for row in found]

    def clear_bodies(self, queue: str, first: int, end: int) -> None:
        """Clear the bodies of these numbers; number 0 stays."""
        self._db.execute(
            "UPDATE requests SET body = NULL WHERE queue = ? AND seq >= ? AND seq < ?", (queue, max(first, 1), end)
        )

    def clear_old_answers(self) -> None:
        old = time.time() - KEPT_ANSWER_S
        self._db.execute("UPDATE requests SET answer = NULL WHERE form != 0 AND seq > 0 AND created < ?", (old,))
