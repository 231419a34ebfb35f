"""Writes the trace event format that ui.perfetto.dev reads, as far as a run needs it: slices, flows, marks, curves.

Guarantees:
1. a file is complete or absent, gzipped, and written event by event;
2. overlapping slices get separate lanes; a free lane is reused; the lanes of a track have one name and stand together;
3. roles and tracks are introduced at their first use; the tracks of a role have a fixed order.

A role is a process of the format, a lane one of its threads. A flow begins at the slice that is its source.
"""

from __future__ import annotations

import gzip
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

#: Ranks within a role: events, steps, and tracks with many lanes. Curves stand by themselves.
EVENTS_RANK, STEPS_RANK, LANES_RANK = 1, 2, 100
ALONE = -1  # lane number of a track with a single lane
Event = dict[str, Any]


class Out:
    """The file: events one by one. A context that removes the file after an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = gzip.GzipFile(self._temporary, "wb", compresslevel=5)
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        self.events = 0

    def put(self, event: Event) -> None:
        self._file.write(b",\n" * bool(self.events) + msgspec.json.encode(event))
        self.events += 1

    def __enter__(self) -> Out:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._file.write(b"]}\n")
        self._file.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)


class Lane(NamedTuple):
    """A place for consecutive slices: process of a role, name of the track, number of the lane."""

    process: str
    track: str
    number: int = ALONE


class Lanes:
    """The times from which the lanes of a track are free."""

    def __init__(self) -> None:
        self._free_at: list[float] = []

    def take(self, start: int) -> int:
        """The first lane that is free at `start`; it is taken until `give`."""
        lane = next((lane for lane, free in enumerate(self._free_at) if free <= start), len(self._free_at))
        self._free_at[lane : lane + 1] = [math.inf]
        return lane

    def give(self, lane: int, end: int) -> None:
        """Free the lane from `end` on."""
        self._free_at[lane] = end


class Slice(msgspec.Struct):
    """Something in progress: its lane, start (microseconds), and flows. `source`: its flows begin here."""

    lane: Lane
    start: int
    name: str
    args: dict[str, Any] = {}
    flows: list[int] = []
    source: bool = False


class Drawing:
    """Events of a run as slices, flows and marks. `zero` is the wall time (s) of its first event."""

    def __init__(self, out: Out, *, zero: float) -> None:
        self._out = out
        self._zero = zero
        self._roles: dict[str, int] = {}
        self._threads: dict[Lane, int] = {}
        self._lanes: dict[tuple[str, str], Lanes] = defaultdict(Lanes)
        self._numbers = itertools.count(1)

    def microseconds(self, t: float) -> int:
        """Microseconds since the start."""
        return max(0, round((t - self._zero) * 1e6))

    def _introduce(self, what: str, pid: int, tid: int, **args: Any) -> None:
        self._out.put({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})

    def _role(self, process: str) -> int:
        if process not in self._roles:
            self._roles[process] = next(self._numbers)
            self._introduce("process_name", self._roles[process], 0, name=process)
        return self._roles[process]

    def _place(self, lane: Lane, rank: int) -> dict[str, int]:
        """Process and thread of a lane."""
        pid = self._role(lane.process)
        if lane not in self._threads:
            tid = self._threads[lane] = next(self._numbers)
            self._introduce("thread_name", pid, tid, name=lane.track)
            self._introduce("thread_sort_index", pid, tid, sort_index=rank)
        return {"pid": pid, "tid": self._threads[lane]}

    def begin(
        self,
        process: str,
        track: str,
        t: float,
        name: str,
        *,
        flows: Iterable[int] = (),
        source: bool = False,
        **args: Any,
    ) -> Slice:
        """Begin a slice, on a free lane."""
        start = self.microseconds(t)
        number = self._lanes[process, track].take(start)
        return Slice(Lane(process, track, number), start, name, args, list(flows), source)

    def end(self, one: Slice, t: float, **args: Any) -> int:
        """End a slice; return its end on the timeline."""
        end = max(self.microseconds(t), one.start + 1)
        self._lanes[one.lane.process, one.lane.track].give(one.lane.number, end)
        one.args |= args
        self.slice(one, end)
        return end

    def slice(self, one: Slice, end: int) -> None:
        """A slice of known length. Slices inside of it follow it."""
        place = self._place(one.lane, STEPS_RANK if one.lane.number == ALONE else LANES_RANK)
        args = {name: value for name, value in one.args.items() if value is not None}
        at = {"ts": one.start, "cat": "run", **place}
        self._out.put({"ph": "X", "name": one.name, "dur": end - one.start, "args": args, **at})
        for flow in one.flows:
            self._out.put({"ph": "s" if one.source else "t", "name": "flow", "id": flow, "bp": "e", **at})

    def mark(self, process: str, t: float, name: str, **args: Any) -> None:
        """An event at one time."""
        place = self._place(Lane(process, "events"), EVENTS_RANK)
        known = {key: value for key, value in args.items() if value not in (None, "")}
        at = self.microseconds(t)
        self._out.put({"ph": "i", "s": "t", "name": name, "ts": at, "cat": "event", "args": known, **place})

    def count(self, process: str, t: float, name: str, value: float, *, unit: str = "") -> None:
        """A number as a curve, named by its unit."""
        args = {unit or "value": float(value)}
        self._out.put({"ph": "C", "name": name, "ts": self.microseconds(t), "pid": self._role(process), "args": args})
