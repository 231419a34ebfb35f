"""Writes Perfetto's trace format, as far as a run needs it: slices on tracks, flows, marks, curves.

Guarantees:
1. a file is complete or absent, gzipped, and written packet by packet;
2. overlapping slices get separate lanes; a free lane is reused; the lanes of a name form one track in the viewer;
3. roles and tracks are introduced at their first use; the tracks of a role have a fixed order.

The format: protobuf messages of perfetto/protos/perfetto/trace (`TracePacket`, `TrackDescriptor`, `TrackEvent`,
`DebugAnnotation`), with the numbers below. Chrome's JSON would be simpler, but the trace processor sorts its processes
by size and shows every lane as a row. Written without the library: three kinds of field are less than Perfetto's 200
messages. `make test-trackers` reads it with Perfetto's trace processor.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

# ---------------------------------------------------------------- protobuf

#: Numbers of fields. In a packet:
PACKET, TIMESTAMP, SEQUENCE, EVENT, DESCRIPTOR = 1, 8, 10, 11, 60
#: In a track: id, name, parent, whether it is a curve, order of its children, its rank.
UUID, NAME, PARENT, CURVE, ORDER_BY, RANK, UNIT_NAME = 1, 2, 5, 8, 11, 12, 6
#: In an event: annotations, type, track, category and name, value (of a curve), its flows.
NOTE, TYPE, TRACK, CATEGORY, EVENT_NAME, NUMBER, FLOW = 4, 9, 11, 22, 23, 44, 47
#: In an annotation, by the type of its value.
NOTE_BOOL, NOTE_INT, NOTE_DOUBLE, NOTE_TEXT, NOTE_NAME, NOTE_ENTRIES = 2, 4, 5, 6, 10, 11
BEGIN, END, INSTANT, COUNT = 1, 2, 3, 4
EXPLICIT = 3  # children in the order of their ranks
#: Ranks within a role: events, steps, curves, and tracks with many lanes.
EVENTS_RANK, STEPS_RANK, CURVES_RANK, LANES_RANK = 1, 2, 10, 100


def whole(number: int, value: int) -> bytes:
    """A field with a whole number (varint).

    >>> whole(1, 300).hex()
    '08ac02'
    """
    return _varint(number << 3) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def real(number: int, value: float) -> bytes:
    """A field with a double."""
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def fixed64_field(number: int, value: int) -> bytes:
    """A field with 8 bytes."""
    return _varint(number << 3 | 1) + struct.pack("<Q", value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    """A field with a text or a message."""
    data = value.encode(errors="replace") if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def note(name: str, value: object, *, number: int = NOTE) -> bytes:
    """An annotation: numbers and texts as they are, a dictionary with its entries, anything else as JSON."""
    if isinstance(value, bool):
        held = whole(NOTE_BOOL, int(value))
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        held = whole(NOTE_INT, value)
    elif isinstance(value, float):
        held = real(NOTE_DOUBLE, value)
    elif isinstance(value, dict):
        held = b"".join(note(str(key), one, number=NOTE_ENTRIES) for key, one in value.items())
    else:
        held = bytes_field(NOTE_TEXT, value if isinstance(value, str) else msgspec.json.encode(value))
    return bytes_field(number, bytes_field(NOTE_NAME, name) + held)


class Out:
    """The file: packets one by one. A context that removes the file after an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file = gzip.GzipFile(self._temporary, "wb", compresslevel=5)
        self.events = 0

    def put(self, packet: bytes) -> None:
        self._file.write(bytes_field(PACKET, packet))
        self.events += 1

    def __enter__(self) -> Out:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------- tracks

ALONE = -1  # lane number of a track with a single lane


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
        for lane, free in enumerate(self._free_at):
            if free <= start:
                self._free_at[lane] = float("inf")
                return lane
        self._free_at.append(float("inf"))
        return len(self._free_at) - 1

    def give(self, lane: int, end: int) -> None:
        """Free the lane from `end` on."""
        self._free_at[lane] = end


class Slice(msgspec.Struct):
    """Something in progress: its lane, start (microseconds), and flows."""

    lane: Lane
    start: int
    name: str
    args: dict[str, Any] = {}
    flows: list[int] = []


class Drawing:
    """Events of a run as slices, flows and marks. `zero` is the wall time (s) of its first event."""

    def __init__(self, out: Out, *, zero: float) -> None:
        self._out = out
        self._zero = zero
        self._uuids: dict[tuple[str, str, int], int] = {}
        self._lanes: dict[tuple[str, str], Lanes] = {}

    def microseconds(self, t: float) -> int:
        """Microseconds since the start."""
        return max(0, round((t - self._zero) * 1e6))

    def _put(self, at: int, kind: int, message: bytes) -> None:
        self._out.put(whole(TIMESTAMP, 1000 * at) + whole(SEQUENCE, 1) + bytes_field(kind, message))

    def _new(self, key: tuple[str, str, int], name: str, more: bytes) -> int:
        """Introduce a track."""
        uuid = self._uuids[key] = len(self._uuids) + 1
        self._put(0, DESCRIPTOR, whole(UUID, uuid) + bytes_field(NAME, name) + more)
        return uuid

    def _role(self, process: str) -> int:
        """Roles have no rank: the viewer sorts top-level tracks by name."""
        key = (process, "", 0)
        return self._uuids.get(key) or self._new(key, process, whole(ORDER_BY, EXPLICIT))

    def _track(self, lane: Lane, rank: int, more: bytes = b"") -> int:
        if lane in self._uuids:
            return self._uuids[lane]
        return self._new(lane, lane.track, whole(PARENT, self._role(lane.process)) + whole(RANK, rank) + more)

    def _event(self, at: int, kind: int, track: int, *more: bytes) -> None:
        self._put(at, EVENT, whole(TYPE, kind) + whole(TRACK, track) + b"".join(more))

    # ------------------------------------------------------------ what is drawn

    def begin(self, process: str, track: str, t: float, name: str, *, flows: Iterable[int] = (), **args: Any) -> Slice:
        """Begin a slice, on a free lane."""
        start = self.microseconds(t)
        number = self._lanes.setdefault((process, track), Lanes()).take(start)
        return Slice(Lane(process, track, number), start, name, args, list(flows))

    def end(self, one: Slice, t: float, **args: Any) -> int:
        """End a slice; return its end on the timeline."""
        end = max(self.microseconds(t), one.start + 1)
        self._lanes[one.lane.process, one.lane.track].give(one.lane.number, end)
        one.args |= args
        self.slice(one, end)
        return end

    def slice(self, one: Slice, end: int, *, inside: Iterable[tuple[Slice, int]] = ()) -> None:
        """A slice of known length, and those `inside` of it, in order. Consecutive slices have equal times: the order
        of the packets defines which end and begin come first.
        """
        rank = STEPS_RANK if one.lane.number == ALONE else LANES_RANK
        track = self._track(one.lane, rank)
        notes = [note(name, value) for name, value in one.args.items() if value is not None]
        flows = [fixed64_field(FLOW, flow) for flow in one.flows]
        self._event(
            one.start, BEGIN, track, bytes_field(CATEGORY, "run"), bytes_field(EVENT_NAME, one.name), *flows, *notes
        )
        for part, part_end in inside:
            self.slice(part, part_end)
        self._event(end, END, track)

    def mark(self, process: str, t: float, name: str, **args: Any) -> None:
        """An event at one time."""
        track = self._track(Lane(process, "events"), EVENTS_RANK)
        notes = [note(key, value) for key, value in args.items() if value not in (None, "")]
        self._event(
            self.microseconds(t), INSTANT, track, bytes_field(CATEGORY, "event"), bytes_field(EVENT_NAME, name), *notes
        )

    def count(self, process: str, t: float, name: str, value: float, *, unit: str = "") -> None:
        """A number as a curve."""
        curve = bytes_field(CURVE, bytes_field(UNIT_NAME, unit) if unit else b"")
        track = self._track(Lane(process, name), CURVES_RANK, curve)
        self._event(self.microseconds(t), COUNT, track, real(NUMBER, float(value)))
