"""Small records of the state machine that are not persisted: events, workers, cancelled leases.

They hold values and decide nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.versions import Runs
from buffers.groups.records import Change, Record


class Taken(msgspec.Struct, frozen=True):
    """What happened since the last `take`."""

    changes: list[Change]
    events: list[Event]
    freed: list[Record]


class SampleEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="e", tag="sample"):
    """The line of a sample in the history, there are more of these than of all others; same form as their dicts."""

    t: float
    g: int
    i: int
    token: int
    producer: str
    length: int
    runs: Runs
    digests: dict[int, str]
    reward: float | None = None  # an environment's own reward has no line of its own
    parts: dict[str, float] = {}  # of it


class Worker(msgspec.Struct):
    """A producer, reward worker or learner as the service last saw it. Not persisted: leases are judged anew."""

    name: str
    pid: int = 0
    host: str = ""
    seen: float = 0.0
    waiting_for: str = ""
    stats: dict[str, float] = {}
    answered: int = 0  # last request for work that was answered
    waiting_since: float | None = None  # it waits without a break since then
    capacity: int = 0  # groups that a producer can hold, as its last request said; 0: it has not asked
    kept: tuple[int, float] = (-1, 0.0)  # version, since when groups are kept for it there
    others: str = ""  # for whom groups are kept that this producer could have, as its last request was told
    judge: str = ""  # for whom a reward worker scores, as its last request said

    def waits(self, what: str, now: float) -> None:
        """What its heartbeat says that it waits for; empty while it works."""
        self.waiting_for = what
        self.waiting_since = None if not what else now if self.waiting_since is None else self.waiting_since


#: What happened, as it stands in the history.
Event = dict[str, Any] | SampleEvent


class Cancelled(msgspec.Struct, gc=False):
    """A lease that its holder is to stop. Not persisted: it learns the same from the answer to its next samples."""

    since: float
    told: bool = False
