"""The edits that one drain of the service makes: rows to write, history lines, payloads that are no longer needed.

Guarantees:
1. every change of a persisted item passes through `edit` or `put`, so the store sees all changes of a drain at once;
2. `take` hands the changes out exactly once;
3. tokens grow: every token of a service is larger than all tokens of the services before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from asyncrl.versions import Runs
from buffers.groups.records import Change, Record


class SampleEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="e", tag="sample"):
    """The history line of a sample. Most lines are of this kind, so they are structs instead of dicts."""

    t: float
    g: int
    i: int
    token: int
    producer: str
    length: int
    runs: Runs
    digests: dict[int, str]
    reward: float | None = None  # given by the environment; it has no line of its own
    parts: dict[str, float] = {}


#: A history line.
Event = dict[str, Any] | SampleEvent


class Changes(msgspec.Struct, frozen=True):
    """What happened since the last `take`."""

    rows: list[Change]
    events: list[Event]
    freed: list[Record]


class Indexes(Protocol):
    """Indexes that are derived from the items of a table."""

    def add(self, item: Any) -> None: ...

    def remove(self, item: Any) -> None: ...


class Rows(Protocol):
    """Encodes persisted rows."""

    def row(self, key: str) -> bytes | None:
        """The encoded row; None if the item no longer exists."""


class Table(Rows, Protocol):
    """A table of persisted items."""

    @property
    def indexes(self) -> Indexes: ...

    def row_key(self, item: Any) -> str:
        """The key of the item's row."""


class Edit:
    """A context in which an item may be edited: its indexes are updated and its row is written at the end."""

    __slots__ = ("_item", "_table", "_tx")

    def __init__(self, tx: Transaction, table: Table, item: Any) -> None:
        self._tx, self._table, self._item = tx, table, item

    def __enter__(self) -> None:
        self._table.indexes.remove(self._item)

    def __exit__(self, *_: object) -> None:
        self._table.indexes.add(self._item)
        self._tx.put(self._table.row_key(self._item), self._table)


class Transaction:
    """Collects the changes of a drain. `now` is the monotonic time of the drain, in seconds.

    `wall_offset` turns `now` into wall time. `generation` counts edits: polls are looked at again when it has moved.
    """

    def __init__(self, *, epoch: int = 1, wall_offset: float = 0.0) -> None:
        self.now = 0.0
        self.wall_offset = wall_offset
        self.generation = 0
        self.newest_token = epoch << 24
        self._stamped = (math.nan, 0.0)
        self._rows: dict[str, Rows] = {}
        self._events: list[Event] = []
        self._freed: list[Record] = []

    @property
    def wall_time(self) -> float:
        """Seconds since the epoch."""
        return self.now + self.wall_offset

    @property
    def timestamp(self) -> float:
        """Wall time as written to the history: rounded to microseconds, once per drain."""
        if self.now != self._stamped[0]:
            self._stamped = (self.now, round(self.now + self.wall_offset, 6))
        return self._stamped[1]

    def edit(self, table: Table, item: Any) -> Edit:
        """A context in which `item` may be edited."""
        return Edit(self, table, item)

    def put(self, key: str, rows: Rows) -> None:
        """Write the row of `key` with this transaction."""
        self._rows[key] = rows
        self.generation += 1

    def put_quietly(self, key: str, rows: Rows) -> None:
        """`put` for a change that no waiting request depends on."""
        self._rows[key] = rows

    def event(self, name: str, **fields: Any) -> None:
        """Append a line to the history."""
        self._events.append({"t": self.timestamp, "e": name, **fields})

    def sample_events(self, events: Iterable[SampleEvent]) -> None:
        """Append the lines of samples."""
        self._events.extend(events)

    def free(self, records: list[Record]) -> None:
        """The payloads of these records are no longer needed."""
        self._freed.extend(records)

    def next_token(self) -> int:
        """A token that no lease had before."""
        self.newest_token += 1
        return self.newest_token

    def take(self) -> Changes:
        """The changes since the last call."""
        rows = [Change(key, source.row(key)) for key, source in self._rows.items()]
        changes = Changes(rows, self._events, self._freed)
        self._rows, self._events, self._freed = {}, [], []
        return changes
