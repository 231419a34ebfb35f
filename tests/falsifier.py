"""Forgeries of a history: each kind is one change at a random place, made as a careful forger would.

A forger who changes a line also changes what follows from it (a producer in its lease, samples and lost lines; the time
of a line that is moved). `Book.encode` then writes the history with the seals it had, or with all seals computed again.
`blind` names the violations of which one must be found in a history whose chain was computed again, without anything
that the learner kept: the audit then has only the meaning of the lines.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.audit.findings import Audit
from asyncrl.runtime.history_chain import Chain

Event = dict[str, Any]
Edit = Callable[["Book"], bool]
SEALS = ("chain", "sign")


class Kind(msgspec.Struct, frozen=True):
    """`edit` changes a book and says whether there was a place for it."""

    name: str
    edit: Edit
    blind: frozenset[str] = frozenset()
    raw: bool = False  # it is a change of seals or bytes: a chain that is computed again takes it back


KINDS: dict[str, Kind] = {}


def kind(name: str, *, blind: str = "", raw: bool = False) -> Callable[[Edit], Edit]:
    def add(edit: Edit) -> Edit:
        assert name not in KINDS
        KINDS[name] = Kind(name, edit, frozenset(blind.split()), raw)
        return edit

    return add


class Book:
    """The lines of a history. Changes are made at places before `limit`, which the learner's newest head covers."""

    def __init__(self, data: bytes, *, limit: int | None = None) -> None:
        self.events: list[Event] = [msgspec.json.decode(line) for line in data.splitlines()]
        self.limit = len(self.events) if limit is None else limit
        self.random = random.Random(0)
        self.damage: Callable[[bytes], bytes] | None = None  # of the encoded file
        assert self.encode() == data

    def fresh(self, seed: int) -> Book:
        """A copy with its own choices."""
        made = copy.copy(self)
        made.events, made.random = copy.deepcopy(self.events), random.Random(seed)
        return made

    def encode(self, *, rechain: bool = False) -> bytes:
        if not rechain:
            data = b"".join(msgspec.json.encode(event) + b"\n" for event in self.events)
            return self.damage(data) if self.damage is not None else data
        chain, pending, parts = Chain(), b"", []
        for place, event in enumerate(self.events):
            pending += msgspec.json.encode({key: value for key, value in event.items() if key not in SEALS}) + b"\n"
            if "chain" in event or place == len(self.events) - 1:
                parts.append(chain.seal(pending))
                pending = b""
        return b"".join(parts)

    # ------------------------------------------------------------ places

    def places(self, *names: str, **wanted: Any) -> list[int]:
        """Of the events of these names with these fields, in front of the limit."""
        return [
            place
            for place, event in enumerate(self.events[: self.limit])
            if event["e"] in names and all(event.get(key) == value for key, value in wanted.items())
        ]

    def pick(self, *names: str, **wanted: Any) -> Event | None:
        found = self.places(*names, **wanted)
        return self.events[self.random.choice(found)] if found else None

    def lives(self) -> dict[int, int]:
        """id of an event -> life of the service."""
        found, life = {}, 0
        for event in self.events:
            life += event["e"] == "service"
            found[id(event)] = life
        return found

    def story(self) -> dict[str, list[Event]] | None:
        """A group with one lease that one service led from its issue into a commit: its events by name."""
        lives, stories = self.lives(), defaultdict(list)
        for event in self.events[: self.limit]:
            if "g" in event:
                stories[event["g"]].append(event)
        for event in self.events[: self.limit]:
            for number in event["groups"] if event["e"] in ("claim", "commit") else ():
                stories[number].append(event)
        wanted = ["issue", "lease", "unscored", "ready", "claim", "commit"]
        found = []
        for events in stories.values():
            names = [event["e"] for event in events]
            whole = all(names.count(name) == 1 for name in wanted) and names.count("score") == names.count("sample") > 1
            if (
                whole
                and set(names) == {*wanted, "sample", "score"}
                and len({lives[id(event)] for event in events}) == 1
            ):
                found.append(events)
        if not found:
            return None
        by_name = defaultdict(list)
        for event in self.random.choice(found):
            by_name[event["e"]].append(event)
        return by_name

    # ------------------------------------------------------------ changes

    def at(self, event: Event) -> int:
        return next(place for place, one in enumerate(self.events) if one is event)

    def move(self, event: Event, after: Event) -> bool:
        """Move an event right behind another one, at its time."""
        self.events.pop(self.at(event))
        place = self.at(after)
        self.events.insert(place + 1, event)
        if "t" in event:
            event["t"] = after["t"]
        return True

    def add(self, event: Event, after: Event) -> bool:
        fresh = {key: value for key, value in event.items() if key not in SEALS}
        place = self.at(after) + 1
        self.events.insert(place, {**fresh, "t": after["t"]})
        return place < self.limit

    def remove(self, event: Event | None) -> bool:
        if event is not None:
            self.events.pop(self.at(event))
        return event is not None


def limit_of(path: Path, heads: set[str]) -> int:
    """Lines that the newest of the heads covers."""
    lines = path.read_bytes().splitlines()
    covered = [n for n, line in enumerate(lines, start=1) if any(head.encode() in line[-60:] for head in heads)]
    return max(covered, default=0)


class Result(msgspec.Struct):
    """What the audit said of a kind, in all places together."""

    places: int = 0
    as_is: set[str] = set()  # kinds of violations with the seals that the history had
    anchored: set[str] = set()  # with all seals computed again
    blind: set[str] = set()  # with all seals computed again, and without anything that the learner kept
    missed: list[str] = []


def kinds_of(found: Audit) -> set[str]:
    return {violation.partition(":")[0] for violation in found.violations}


class Judged(Protocol):
    """A run whose history may be replaced."""

    def judge(self, data: bytes, anchored: bool) -> Audit:
        """The audit of these bytes; `anchored`: with what the learner kept."""


def falsify(one: Kind, histories: Sequence[tuple[Judged, Book]], *, places: int) -> Result:
    """Make a forgery at some places of every history and have each judged in its three forms."""
    made = Result(as_is=set(), anchored=set(), blind=set(), missed=[])
    for number, (run, book) in enumerate(histories):
        for seed in range(places):
            forged = book.fresh(seed)
            if not one.edit(forged) or (data := forged.encode()) == book.encode():
                continue
            made.places += 1
            where = f"history {number}, seed {seed}"
            found = kinds_of(run.judge(data, True))
            made.as_is |= found
            made.missed += [] if found else [f"{where}: as it is"]
            if one.raw:
                continue
            data = forged.encode(rechain=True)
            found = kinds_of(run.judge(data, True))
            made.anchored |= found
            made.missed += [] if found else [f"{where}: with a new chain"]
            if one.blind:
                found = kinds_of(run.judge(data, False))
                made.blind |= found
                made.missed += [] if found & one.blind else [f"{where}: without heads, {found} is not {set(one.blind)}"]
    return made


def table(results: dict[str, Result]) -> str:
    """Kind -> findings, a line each."""
    lines = []
    for name, result in results.items():
        text = f"{name} ({result.places}): {', '.join(sorted(result.as_is))}"
        if result.anchored:
            text += f"; new chain: {', '.join(sorted(result.anchored))}"
        if result.blind:
            text += f"; and no heads: {', '.join(sorted(result.blind))}"
        lines.append(text)
    return "\n".join(lines)
