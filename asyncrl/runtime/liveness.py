"""Signs of life: a small file per role, `RUN/alive/NAME.json`, written again and again by the role itself.

Written by every role, read by `asyncrl.launcher.liveness_watch` (the launcher) and `asyncrl status`. Guarantees:
1. a sign needs no other role: it goes on while the buffer is away, so silence has one owner;
2. it says who (role, name, pid, host), what is waited for and since when; nothing where the role works;
3. it is replaced whole and never synced; a full disk costs the sign, not the role.
A service or worker signs from its event loop, so a loop that stands still is silent. A learner's rank signs from a
thread (`Ticker`), since a step may take minutes: a main thread that stands still is for `learners.gang.watchdog`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE

STOPPED = "Tt"  # states of /proc: stopped by a signal, by a debugger


class Seen(msgspec.Struct, frozen=True):
    """One sign. `since`: wall time since when it waits without a break, 0 where it works."""

    role: str
    name: str
    pid: int
    host: str
    t: float
    waiting_for: str = ""
    since: float = 0.0


class Sign:
    """The file of this process. `clock` gives wall time."""

    def __init__(self, folder: Path, *, role: str, name: str, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / f"{name.replace(os.sep, '_')}.json"
        self._who = (role, name, os.getpid(), socket.gethostname())
        self._clock = clock
        self._since = 0.0
        self._next = 0.0

    def beat(self, waiting_for: str = "", *, every_s: float = 0.0, worked: bool = False) -> None:
        """Alive now. With `every_s` nothing happens until that long after the last sign. `worked`: it has worked since
        the last sign, so that it waits since now at most."""
        now = self._clock()
        if every_s and self._next - every_s <= now < self._next:  # a wall clock may jump backwards
            return
        self._next = now + every_s
        self._since = ((not worked and self._since) or now) if waiting_for else 0.0
        seen = Seen(*self._who, round(now, 3), waiting_for, round(self._since, 3))
        temporary = self._path.with_suffix(f".{self._who[2]}.tmp")
        with suppress(OSError):
            temporary.write_bytes(msgspec.json.encode(seen))
            os.replace(temporary, self._path)

    def close(self) -> None:
        """This process ends: no sign is missed any more."""
        with suppress(OSError):
            self._path.unlink()


class Ticker:
    """Signs from a thread of its own; `waits` says what for. A context: the thread ends with it."""

    def __init__(self, sign: Sign, *, every_s: float, waits: Callable[[], str] = str) -> None:
        self.waits = waits
        self._sign = sign
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs", daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)
        self._sign.close()

    def _run(self) -> None:
        while True:
            self._sign.beat(self.waits())
            if self._ended.wait(self._every_s):
                return


def read_signs(folder: Path) -> dict[str, Seen]:
    """The newest sign of every role that has one, by name; what is damaged is left out."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            seen = msgspec.json.decode(path.read_bytes(), type=Seen)
        except (OSError, *UNREADABLE):
            continue
        found[seen.name] = seen
    return found
