"""Input of `asyncrl top`: the services' answers and the newest lines of the run's files.

Guarantees:
1. it only asks and reads; every question has a deadline, and of a file it reads at most a few megabytes at its end;
2. the files alone describe a run that has ended or crashed;
3. without a folder (`--connect`) it keeps the buffer's heartbeats instead of the files.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.metrics import JsonTail
from asyncrl.monitor.status_schema import Status
from asyncrl.net.keys import Keys
from asyncrl.runtime.run_dir import RunDir

Line = dict[str, Any]
LAST_BYTES = 2 << 20  # of a file at the first poll
MOST_POLLS = 8  # of a megabyte each, per poll
STEPS, BEATS, ROUNDS, EVENTS = 240, 120, 60, 60  # newest lines to keep
NOTED = frozenset({"dead", "lost", "register", "service"})  # of the history


class Observed(msgspec.Struct, kw_only=True):
    """Result of one poll. `beats`: newest lines of metrics/roles.jsonl by name."""

    at: float
    status: Status
    steps: list[Line] = []
    beats: dict[str, list[Line]] = {}
    queue: list[Line] = []
    rounds: list[Line] = []
    events: list[Line] = []  # of the launcher (`event`) and of the history (`e`)
    capacity: int = 0  # groups that may be in flight at once; 0: unknown
    max_staleness: int = -1  # -1: unknown
    slots: int = 0  # samples that one engine decodes at once


class FileSource:
    """A run by its folder: `look` asks its services and continues to read its files."""

    def __init__(self, run: RunDir, *, key: str = "") -> None:
        from asyncrl.config import load

        self._run = run
        self._key = key
        self._config = load(run.config)
        self._tails = {
            name: JsonTail(run.metrics / f"{name}.jsonl", last_bytes=LAST_BYTES)
            for name in ("learner", "roles", "buffer", "weightsync")
        }
        self._tails["launch"] = JsonTail(run.logs / "launch.jsonl", last_bytes=LAST_BYTES)
        self._tails["history"] = JsonTail(run.history, last_bytes=LAST_BYTES)
        self._steps: deque[Line] = deque(maxlen=STEPS)
        self._queue: deque[Line] = deque(maxlen=STEPS)
        self._rounds: deque[Line] = deque(maxlen=ROUNDS)
        self._events: deque[Line] = deque(maxlen=EVENTS)
        self._beats: dict[str, deque[Line]] = {}

    def look(self) -> Observed:
        from asyncrl.monitor.status import run_status

        for line in self._new("learner"):
            while self._steps and self._steps[-1].get("step", 0) >= line.get("step", 0):
                self._steps.pop()  # trained again
            self._steps.append(line)
        for line in self._new("roles"):
            self._beats.setdefault(str(line.get("name")), deque(maxlen=BEATS)).append(line)
        self._queue.extend(self._new("buffer"))
        self._rounds.extend(self._new("weightsync"))
        self._events.extend(self._new("launch"))
        self._events.extend(line for line in self._new("history") if str(line.get("e")) in NOTED)
        buffer = self._config.buffer
        return Observed(
            at=time.time(),
            status=msgspec.convert(run_status(self._run, key=self._key), Status),
            steps=list(self._steps),
            beats={name: list(lines) for name, lines in self._beats.items()},
            queue=list(self._queue),
            rounds=list(self._rounds),
            events=sorted(self._events, key=lambda line: float(line.get("t", 0.0))),
            capacity=buffer.max_in_flight_groups,
            max_staleness=buffer.max_staleness,
            slots=self._config.producers.slots,
        )

    def _new(self, name: str) -> list[Line]:
        found: list[Line] = []
        for _ in range(MOST_POLLS):
            lines = self._tails[name].poll()
            if not lines:
                break
            found += lines
        return found


class ServiceSource:
    """A run by the address of its buffer."""

    def __init__(self, address: str, *, keys: Keys | None) -> None:
        self._address = address
        self._keys = keys
        self._beats: dict[str, deque[Line]] = {}
        self._steps: deque[Line] = deque(maxlen=STEPS)

    def look(self) -> Observed:
        from asyncrl.monitor.status import connect_status

        status = msgspec.convert(connect_status(self._address, self._keys), Status)
        now = time.time()
        buffer = status.buffer
        for role, workers in (("producer", buffer.producers), ("reward", buffer.rewards)):
            for one in workers:
                t = now - (one.age_s or 0.0)
                line = {
                    "t": t,
                    "role": role,
                    "name": one.name,
                    "pid": one.pid,
                    "host": one.host,
                    "waiting_for": one.waiting_for,
                    **one.stats,
                }
                kept = self._beats.setdefault(one.name, deque(maxlen=BEATS))
                if not kept or t - float(kept[-1]["t"]) > 0.2:  # a new heartbeat, not the previous one again
                    kept.append(line)
        learner = buffer.learner
        if learner is not None and "step" in learner.stats:
            line = {"t": now - (learner.age_s or 0.0), **learner.stats}
            if not self._steps or self._steps[-1]["step"] != line["step"]:
                self._steps.append(line)
        return Observed(
            at=now,
            status=status,
            steps=list(self._steps),
            capacity=(buffer.tuning.depth + 1) * buffer.tuning.batch_groups,
            beats={name: list(lines) for name, lines in self._beats.items()},
            max_staleness=int(buffer.tuning.settings.get("buffer.max_staleness", -1)),
        )


def open_source(folder: Path | None, *, connect: str, key: str) -> FileSource | ServiceSource:
    """The source that the command names. Raises ConfigError unless exactly one is given."""
    from asyncrl.errors import ConfigError
    from asyncrl.net.keys import read_keys

    if (folder is None) == (not connect):
        raise ConfigError("usage", "give a run folder or --connect URL")
    if folder is None:
        return ServiceSource(connect, keys=read_keys(Path(key)) if key else None)
    return FileSource(RunDir(folder).require(), key=key)
