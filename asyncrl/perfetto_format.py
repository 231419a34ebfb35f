"""Chrome's trace-event format, as far as a run needs it: slices on lanes, flows between them, marks, curves.

Called by `asyncrl.perfetto`. Guarantees:
1. a file is there whole or not at all, gzipped, and is written event by event;
2. slices that overlap are given lanes of their own; a lane that is free again is used again;
3. processes and lanes are introduced by name where they first appear.
It knows nothing of a run. The format: "Trace Event Format" of Chromium, which ui.perfetto.dev reads.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

Event = dict[str, Any]
MAIN, FAULTS, FIRST_LANE = 1, 2, 10
ORDER = ("launch", "learner", "buffer", "weightsync", "producer", "reward", "tracker")


class Out:
    """The file: events one by one. A context; nothing is left where it fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = gzip.GzipFile(self._temporary, "wb", compresslevel=5)
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self.events = 0

    def put(self, event: Event) -> None:
        """One event."""
        self._file.write((b",\n" if self.events else b"\n") + msgspec.json.encode(event))
        self.events += 1

    def __enter__(self) -> Out:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        if kind is None:
            self._file.write(b"\n]}\n")
        self._file.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)


class Lanes:
    """Which lane of a process is free from when on."""

    def __init__(self) -> None:
        self._free_at: list[float] = []

    def take(self, start: int) -> int:
        """The first lane that is free at `start`; it is taken until `give`."""
        for lane, free in enumerate(self._free_at):
            if free <= start:
                self._free_at[lane] = float("inf")
                return FIRST_LANE + lane
        self._free_at.append(float("inf"))
        return FIRST_LANE + len(self._free_at) - 1

    def give(self, tid: int, end: int) -> None:
        """It is free again from `end` on."""
        self._free_at[tid - FIRST_LANE] = end


class Slice(msgspec.Struct):
    """Something that is under way: where it is drawn and since when."""

    process: str
    tid: int
    start: int
    name: str
    args: dict[str, Any] = {}


class Drawing:
    """Events of a run as slices, flows and marks. `zero` is the wall time of its first event."""

    def __init__(self, out: Out, *, zero: float) -> None:
        self._out = out
        self._zero = zero
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, Lanes] = {}
        self._named: set[tuple[str, int]] = set()

    def at(self, t: float) -> int:
        """Microseconds since the start."""
        return max(0, round((t - self._zero) * 1e6))

    def pid(self, process: str) -> int:
        """The number of a process; it is introduced once."""
        if process not in self._pids:
            number = self._pids[process] = len(self._pids) + 1
            role = process.partition("-")[0]
            place = ORDER.index(role) if role in ORDER else len(ORDER)
            self._meta("process_name", number, MAIN, name=process)
            self._meta("process_sort_index", number, MAIN, sort_index=1000 * place + number)
        return self._pids[process]

    def _meta(self, what: str, pid: int, tid: int, **args: Any) -> None:
        self._out.put({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args})

    def _lane(self, process: str, tid: int) -> dict[str, int]:
        pid = self.pid(process)
        if (process, tid) not in self._named:
            self._named.add((process, tid))
            name = {MAIN: "steps" if process == "learner" else "main", FAULTS: "faults"}.get(tid, f"lane {tid - 9}")
            self._meta("thread_name", pid, tid, name=name)
        return {"pid": pid, "tid": tid}

    def begin(self, process: str, t: float, name: str, **args: Any) -> Slice:
        """Something begins, on a lane of its own while it lasts."""
        start = self.at(t)
        tid = self._lanes.setdefault(process, Lanes()).take(start)
        return Slice(process, tid, start, name, args)

    def end(self, one: Slice, t: float, **args: Any) -> int:
        """It ends; its end on the timeline."""
        end = max(self.at(t), one.start + 1)
        self._lanes[one.process].give(one.tid, end)
        one.args |= args
        self.slice(one, end)
        return end

    def slice(self, one: Slice, end: int) -> None:
        """A slice of known length."""
        where = self._lane(one.process, one.tid)
        self._out.put({"ph": "X", "cat": "run", "name": one.name, "ts": one.start, "dur": end - one.start, **where,
                       "args": one.args})  # fmt: skip

    def flow(self, name: str, number: int, places: Sequence[tuple[int, str, int]]) -> None:
        """A flow through slices: time, process and lane of each place, in order; there are two at least."""
        for place, (at, process, tid) in enumerate(places):
            phase = "s" if not place else "f" if place == len(places) - 1 else "t"
            more = {"bp": "e"} if phase == "f" else {}
            self._out.put({"ph": phase, "cat": name, "name": name, "id": f"{name}-{number}", "ts": at,
                           **self._lane(process, tid), **more})  # fmt: skip

    def mark(self, process: str, t: float, name: str, **args: Any) -> None:
        """A fault."""
        where = self._lane(process, FAULTS)
        self._out.put({"ph": "i", "cat": "fault", "name": name, "ts": self.at(t), "s": "p", **where, "args": args})

    def count(self, process: str, t: float, name: str, values: dict[str, float]) -> None:
        """Numbers as curves."""
        self._out.put({"ph": "C", "name": name, "ts": self.at(t), "pid": self.pid(process), "tid": MAIN,
                       "args": values})  # fmt: skip
