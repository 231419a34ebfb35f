"""Follows the metrics of a run while its roles write them: the newest numbers of every process, and a point per step.

Guarantees:
1. it only reads files of the run folder, so it cannot disturb a role;
2. new lines are taken in the order of their time, so a point holds the numbers known at the end of its step;
3. a reader that starts from `positions` repeats at most the unfinished part.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncrl.evaluation.ids import measured_version
from asyncrl.metrics import CATALOGUE, OPEN, JsonTail, Position, line_number, line_time
from asyncrl.metrics.pages import metric_tag
from asyncrl.runtime.run_dir import RunDir

FILES = ("learner", "buffer", "roles", "weightsync", "evaluation")
WORKER_S = 10.0  # a heartbeat older than this is no longer valid for a step


class Point(NamedTuple):
    """The numbers of a step, by tag."""

    step: int
    values: dict[str, float]


class Heard(NamedTuple):
    """The newest line of a process."""

    t: float
    values: dict[str, float]
    waiting_for: str


class Following:
    """The newest lines of all processes (`newest`, by role and name) and, from `poll`, a point for every step."""

    def __init__(self, run: RunDir, *, positions: Mapping[str, Position] | None = None) -> None:
        known = positions or {}
        self._tails = {
            name: JsonTail(run.metrics / f"{name}.jsonl", from_end=False, position=known.get(name)) for name in FILES
        }
        self.newest: dict[tuple[str, str], Heard] = {}

    @property
    def positions(self) -> dict[str, Position]:
        """How far each file was read."""
        return {name: tail.position for name, tail in self._tails.items()}

    @property
    def behind_bytes(self) -> int:
        """Bytes not read yet."""
        return sum(tail.behind_bytes for tail in self._tails.values())

    @property
    def damaged(self) -> int:
        """Number of unreadable lines."""
        return sum(tail.damaged for tail in self._tails.values())

    def poll(self) -> list[Point]:
        """Read new lines; return the points of the steps and evaluations that ended."""
        new = [(line_time(line), name, line) for name, tail in self._tails.items() for line in tail.poll()]
        new.sort(key=lambda item: item[0])
        points: list[Point] = []
        for t, name, line in new:
            values = numbers(line)
            role, who = (str(line.get("role", "?")), str(line.get("name", "?"))) if name == "roles" else (name, name)
            if role in ("buffer", "learner") and (role, who) in self.newest:
                # a line may hold only some numbers: a heartbeat has a few of those of a step
                values = {**self.newest[role, who].values, **values}
            self.newest[role, who] = Heard(t, values, str(line.get("waiting_for", "")))
            step = line.get("step")
            if name == "learner" and isinstance(step, int):
                points.append(Point(step, self._point(t, numbers(line))))
            elif name == "evaluation" and isinstance(step, int):
                found = {metric_tag(key): value for key, value in values.items() if key != "step"}
                points.append(Point(measured_version(line), found))
        return points

    def _point(self, t: float, learner: dict[str, float]) -> dict[str, float]:
        """The learner's numbers, together with the newest ones of the other processes."""
        values: dict[str, float] = {}
        for service in ("weightsync", "buffer"):
            heard = self.newest.get((service, service))
            values |= {metric_tag(key): value for key, value in heard.values.items()} if heard is not None else {}
        workers: dict[tuple[str, str], list[float]] = defaultdict(list)
        for (role, _), heard in self.newest.items():
            if role in ("producer", "reward") and t - heard.t <= WORKER_S:
                for key, value in heard.values.items():
                    workers[role, key].append(value)
        values |= {metric_tag(key, role=role): statistics.fmean(some) for (role, key), some in workers.items()}
        values |= {metric_tag(key): value for key, value in learner.items()}
        return {key: value for key, value in values.items() if not key.endswith("/step")}

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line that are in the catalogue."""
    return {
        key: value
        for key in line
        if (key in CATALOGUE or key.startswith(OPEN)) and (value := line_number(line, key)) is not None
    }
