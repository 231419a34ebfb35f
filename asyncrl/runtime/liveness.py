"""Signs of life: a small file per role, `RUN/alive/NAME.json`, rewritten regularly by the role itself.

`asyncrl.launcher.liveness_watch` and `asyncrl status` read them. Guarantees:
1. a sign needs no other role: it continues while the buffer is down, so a silence points to one process;
2. it identifies the process (role, name, pid, host), and states the reason and the start of a wait;
3. it is replaced atomically and never synced; on a full disk the sign is lost, not the role. A service or worker signs
   from its event loop, so a blocked loop is silent. A learner's rank signs from a thread (`Ticker`), since a step may
   take minutes; `learners.gang.watchdog` watches its main thread.
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
    """One sign. `since`: wall time since when the role has waited without a break; 0 while it works."""

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
        """Sign now; with `every_s` only if the last sign is that old. `worked`: the role has worked since the last
        sign, so a wait begins now.
        """
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
        """Remove the sign: the process ends."""
        with suppress(OSError):
            self._path.unlink()


class Ticker:
    """Signs from its own thread; `waits` returns the reason of a wait. A context: the thread ends with it."""

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
    """The newest sign of every role by name; damaged files are ignored."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            seen = msgspec.json.decode(path.read_bytes(), type=Seen)
        except (OSError, *UNREADABLE):
            continue
        found[seen.name] = seen
    return found
