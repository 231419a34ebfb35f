"""Events of some groups in the history of a run, read line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.runtime.run_dir import RunDir

Event = dict[str, Any]
_GROUP = re.compile(rb'"g":(\d+)[,}]')
_BATCHED = (b'"e":"claim"', b'"e":"commit"', b'"e":"register"', b'"e":"retire"', b'"e":"tune"')


def history_lines(run: RunDir) -> Iterator[bytes]:
    """The complete lines of the history. Raises `run.missing` without one."""
    if not run.history.exists():
        raise ConfigError("run.missing", "no history.jsonl in it: the buffer has not started", where=str(run.root))
    with run.history.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def decode_event(line: bytes) -> Event | None:
    """A line as an event; None if it is damaged."""
    try:
        event = msgspec.json.decode(line)
    except UNREADABLE:
        return None
    return event if isinstance(event, dict) else None


def group_events(run: RunDir, groups: Iterable[int]) -> Iterator[Event]:
    """The events of some groups, and of the learner."""
    wanted = {b"%d" % group for group in groups}
    for line in history_lines(run):
        found = _GROUP.search(line)
        if found[1] in wanted if found else any(word in line for word in _BATCHED):
            event = decode_event(line)
            if event is not None:
                yield event


def quarantined_groups(run: RunDir) -> list[Event]:
    """Every quarantined group in the history."""
    found = (decode_event(line) for line in history_lines(run) if b'"e":"dead"' in line)
    return [event for event in found if event is not None]


def find_claim(run: RunDir, step: int) -> Event:
    """The newest claim of a step. Raises `trace.unknown` without one."""
    newest: Event | None = None
    for line in history_lines(run):
        if b'"e":"claim"' in line:
            event = decode_event(line)
            newest = event if event is not None and event.get("step") == step else newest
    if newest is None:
        raise ConfigError("trace.unknown", f"step {step} was never claimed", where=str(run.history))
    return newest
