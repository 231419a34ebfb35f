"""Detects within seconds that a process of a run is silent, and names it.

Guarantees:
1. a role without a sign of life (`asyncrl.runtime.liveness`) for `run.silent_timeout_s` is named once, with pid, host,
   state and the reason of its last wait; so is every process below a role that is stopped (SIGSTOP, a debugger) for
   that long, such as the private Redis. This needs no answer of any role, and no late step. What is in a sandbox is
   left alone: its calls have limits of their own, and a browser is stopped between two of them;
2. the end of a silence is reported too;
3. a launcher that was stopped itself reports no silence. It ends nothing: `asyncrl.launcher.hang_watch` does if the run
   makes no step. A role that has not signed yet (it loads its model) is named only if it is stopped.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from asyncrl.metrics import JsonTail
from asyncrl.runtime.host_facts import child_pids, process_state
from asyncrl.runtime.liveness import STOPPED, read_signs
from asyncrl.runtime.run_dir import RunDir

LOOK_S = 0.5
SANDBOX = "bwrap"  # its command


class Silent(NamedTuple):
    """A silent process."""

    name: str
    pid: int
    state: str
    silent_s: float
    last_words: str = ""

    def text(self) -> str:
        """`producer-1 (pid 123 on host) is silent for 12 s; it is stopped (state T)`."""
        stopped = self.state in STOPPED
        why = f"it is {'' if stopped else 'not '}stopped (state {self.state})"
        words = f", its last words: it waits for {self.last_words}" if self.last_words and not stopped else ""
        host = socket.gethostname()
        return f"{self.name} (pid {self.pid} on {host}) is silent for {self.silent_s:.0f} s; {why}{words}"


class SilenceWatch:
    """Signs of life of one launcher's processes. `clock` counts seconds."""

    def __init__(self, run: RunDir, *, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._limit_s = limit_s
        self._clock = clock
        self._processes = JsonTail(run.processes)
        self._names: dict[int, str] = {}  # pid -> name, of processes recorded in the run folder
        self._heard: dict[int, tuple[float, float]] = {}  # pid -> (time of the last sign by its clock, by ours)
        self._words: dict[int, str] = {}
        self._stopped: dict[int, float] = {}  # pid -> when it was first seen stopped
        self._said: dict[int, tuple[str, float]] = {}  # reported: pid -> name, silent since
        self._looked = clock()

    def look(self, started: Mapping[int, str]) -> list[tuple[str, str]]:
        """New events: ("silent" or "back", text). `started`: pid -> name of the launcher's own children."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return []
        if now - self._looked > max(4 * LOOK_S, self._limit_s / 2):  # this process was stopped: start again for all
            self._heard = {pid: (t, now) for pid, (t, _) in self._heard.items()}
            self._stopped = dict.fromkeys(self._stopped, now)
        self._looked = now
        silent = {one.pid: one for one in self.silent(started)}
        events = [("silent", one.text()) for pid, one in silent.items() if pid not in self._said]
        for pid, (name, since) in list(self._said.items()):
            if pid not in silent:
                del self._said[pid]
                if process_state(pid):  # else it has ended, which is reported elsewhere
                    events.append(("back", f"{name} (pid {pid}) is back after {now - since:.0f} s"))
        for pid, one in silent.items():
            self._said.setdefault(pid, (one.name, now - one.silent_s))
        return events

    def silent(self, started: Mapping[int, str]) -> list[Silent]:
        """All processes that are silent or stopped for longer than the limit."""
        now = self._clock()
        for line in self._processes.poll():
            if line.get("host") == socket.gethostname() and isinstance(line.get("pid"), int):
                self._names[line["pid"]] = str(line.get("name"))
        processes = process_tree(started, self._names)
        self._listen({one.pid for one in processes}, now)
        found = []
        for name, pid in processes:
            state = process_state(pid)
            if state and state in STOPPED:
                self._stopped.setdefault(pid, now)
            else:
                self._stopped.pop(pid, None)
            since = min(self._heard.get(pid, (0.0, now))[1], self._stopped.get(pid, now))
            if state and now - since >= self._limit_s:
                found.append(Silent(name, pid, state, now - since, self._words.get(pid, "")))
        return found

    def _listen(self, living: set[int], now: float) -> None:
        here = [seen for seen in read_signs(self._run.alive).values() if seen.host == socket.gethostname()]
        signs = {seen.pid: seen for seen in here if seen.pid in living}
        for pid, seen in signs.items():
            if self._heard.get(pid, (-1.0, 0.0))[0] != seen.t:
                self._heard[pid] = (seen.t, now)
            self._words[pid] = seen.waiting_for
        for gone in [pid for pid in self._heard if pid not in signs]:  # ended, or ending: it removed its sign
            del self._heard[gone]


class Process(NamedTuple):
    """A living process and its name."""

    name: str
    pid: int


def process_tree(started: Mapping[int, str], names: Mapping[int, str]) -> list[Process]:
    """The started processes and all below them, but for those in a sandbox. `names`: pid -> name of roles; other
    processes are named after their parent.

    The tree may change during the walk: a process that just starts may be missing.
    """
    found: dict[int, str] = {}
    layer = [(pid, names.get(pid, name)) for pid, name in started.items()]
    while layer:
        pid, name = layer.pop()
        if pid in found:
            continue
        found[pid] = name
        if name.startswith(f"{SANDBOX} of "):
            continue
        above = name.rpartition(" of ")[2]
        layer += [(child, names.get(child) or f"{_command(child)} of {above}") for child in child_pids(pid)]
    return [Process(name, pid) for pid, name in found.items()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"
