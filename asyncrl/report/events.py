"""Facts of the report from a run's history: the lags of each step, recoveries from faults, and notes.

Guarantees:
1. the log is read once, line by line; memory grows with groups and steps, not with events of samples;
2. steps are those of the surviving history: a learner that registers at step s takes back the steps after s;
3. times of a fault start at the launcher's record of the exit: until the process was restarted, until it worked again
   (a producer's sample, a reward worker's score, a learner's commit, a service's next event), and until the run took a
   new step. Missing ones are None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.audit.records import to_count
from asyncrl.metrics import iterate_lines, line_time

Line = dict[str, Any]
KEPT = frozenset({"service", "register", "lost", "cancel", "drop", "dead", "tune", "end"})


class StepLags(msgspec.Struct):
    """The lags of the groups that a step trained, in steps."""

    step: int
    low: int
    median: float
    high: int
    upper: float  # 90 % of the groups are at most this old
    bound: int  # the largest of their leases


class Recovery(msgspec.Struct):
    """A process that ended with an error, and the seconds until recovery."""

    t: float
    name: str
    role: str
    code: int
    reached: int = 0  # newest step at that time
    start_s: float | None = None
    work_s: float | None = None
    progress_s: float | None = None
    given_up: bool = False


class Story(msgspec.Struct):
    notes: list[Line] = []
    lags: list[StepLags] = []
    recoveries: list[Recovery] = []


def read_events(path: Path) -> Iterator[Line]:
    """The events of a history one by one; unreadable lines are skipped."""
    for event in iterate_lines(path):
        if isinstance(event.get("e"), str) and isinstance(event.get("t", 0.0), int | float):
            yield event


def story(events: Iterable[Line], launched: Sequence[Line], rounds: Sequence[Line]) -> Story:
    """`launched`: logs/launch.jsonl; `rounds`: metrics/weightsync.jsonl."""
    faults = recoveries(launched)
    found = Story(recoveries=faults)
    lags = Lags()
    waiting = list(faults)
    active: list[Recovery] = []
    for event in events:
        t = line_time(event)
        while waiting and waiting[0].t <= t:
            waiting[0].reached = lags.reached
            active.append(waiting.pop(0))
        try:
            for one in active:
                _note(one, event, t)
            lags.take(event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # a damaged line: the audit reports it
        active = [one for one in active if one.work_s is None or one.progress_s is None]
        if event["e"] in KEPT:
            found.notes.append(event)
    for one in faults:
        if one.role == "weightsync":
            one.work_s = next((line_time(line) - one.t for line in rounds if line_time(line) > one.t), None)
    found.lags = [lags.steps[step] for step in sorted(lags.steps)]
    return found


def recoveries(launched: Sequence[Line]) -> list[Recovery]:
    """Exits with an error before the end of the run, in order, with the launcher's facts."""
    found: list[Recovery] = []
    stopping = False
    for event in launched:
        kind, name, t = event.get("event"), str(event.get("name", "")), line_time(event)
        mine = next((one for one in reversed(found) if one.name == name and one.start_s is None), None)
        if kind == "exit" and event.get("code") and not stopping:
            found.append(Recovery(t, name, str(event.get("role", "")), int(event["code"])))
        elif kind == "start":
            stopping = False  # a launch after the stopped one
            if mine is not None:
                mine.start_s = t - mine.t
        elif kind == "given up" and mine is not None:
            mine.given_up = True
        elif kind == "stop":
            stopping = True
    return found


def _note(one: Recovery, event: Line, t: float) -> None:
    kind = event.get("e")
    if kind == "commit" and one.progress_s is None and int(event.get("step", 0)) > one.reached:
        one.progress_s = t - one.t
    if one.work_s is not None:
        return
    works = {
        "producer": kind == "sample" and event.get("producer") == one.name,
        "reward": kind == "score" and event.get("worker") == one.name,
        "learner": kind == "commit",
        "buffer": kind == "service",
    }
    if works.get(one.role, False):
        one.work_s = t - one.t


class Lags:
    """Lags of the groups of every step, from the events."""

    def __init__(self) -> None:
        self.steps: dict[int, StepLags] = {}
        self.reached = 0  # newest committed step
        self._oldest: dict[int, dict[int, int]] = {}  # group -> sample -> oldest version
        self._bounds: dict[int, int] = {}
        self._claims: dict[int, tuple[int, list[int]]] = {}

    def take(self, event: Line) -> None:
        kind = event.get("e")
        if kind == "sample" and event.get("runs"):
            oldest = min(to_count(run[0]) for run in event["runs"])
            self._oldest.setdefault(int(event["g"]), {})[int(event.get("i", 0))] = oldest
        elif kind == "lease":
            self._bounds[int(event["g"])] = to_count(event.get("bound", 0))
        elif kind == "claim":
            self._claims[int(event["step"])] = (to_count(event["version"]), [int(one) for one in event["groups"]])
        elif kind == "register":
            self.steps = {step: one for step, one in self.steps.items() if step <= int(event.get("step", 0))}
        elif kind == "commit":
            self._commit(int(event["step"]), [int(one) for one in event.get("groups", ())])

    def _commit(self, step: int, groups: list[int]) -> None:
        self.reached = max(self.reached, step)
        version, claimed = self._claims.get(step, (step - 1, groups))
        lags = sorted(version - min(self._oldest[one].values()) for one in groups or claimed if self._oldest.get(one))
        if lags:
            bound = max((self._bounds.get(one, 0) for one in groups or claimed), default=0)
            upper = lags[min(len(lags) - 1, -(-9 * len(lags) // 10) - 1)]
            self.steps[step] = StepLags(step, lags[0], statistics.median(lags), lags[-1], upper, bound)
