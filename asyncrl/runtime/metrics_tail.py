"""Follows the metrics of a run while its roles write them: the newest numbers of every process, and a point per step.

Guarantees:
1. it only reads files of the run folder, so it cannot disturb a role;
2. new lines are taken in the order of their time, so a point holds the numbers known at the end of its step: a reader
   that is behind does not run ahead in a shorter file;
3. a reader that starts from `positions` repeats at most the unfinished part.
"""

from __future__ import annotations

import math
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


class _Line(NamedTuple):
    """A line that was read, and its begin in its file."""

    t: float
    start: Position
    values: dict[str, Any]


class Following:
    """The newest lines of all processes (`newest`, by role and name) and, from `poll`, a point for every step."""

    def __init__(self, run: RunDir, *, positions: Mapping[str, Position] | None = None) -> None:
        known = positions or {}
        self._tails = {
            name: JsonTail(run.metrics / f"{name}.jsonl", from_end=False, position=known.get(name)) for name in FILES
        }
        self._held: dict[str, list[_Line]] = {name: [] for name in FILES}  # read, and newer than another file so far
        self._read_to = dict.fromkeys(FILES, -math.inf)  # newest time of the lines that were read last
        self.newest: dict[tuple[str, str], Heard] = {}

    @property
    def positions(self) -> dict[str, Position]:
        """How far the lines of each file were taken."""
        return {
            name: held[0].start if (held := self._held[name]) else tail.position for name, tail in self._tails.items()
        }

    @property
    def behind_bytes(self) -> int:
        """Bytes not taken yet."""
        held = sum(
            self._tails[name].position.offset - lines[0].start.offset for name, lines in self._held.items() if lines
        )
        return held + sum(tail.behind_bytes for tail in self._tails.values())

    @property
    def damaged(self) -> int:
        """Number of unreadable lines."""
        return sum(tail.damaged for tail in self._tails.values())

    def poll(self) -> list[Point]:
        """Read new lines; return the points of the steps and evaluations that ended."""
        points: list[Point] = []
        for t, name, line in self._take():
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

    def _take(self) -> list[tuple[float, str, dict[str, Any]]]:
        """New lines of all files in the order of their time, with the names of their files."""
        for name, tail in self._tails.items():
            if not self._held[name]:
                self._held[name] = [_Line(line_time(line), start, line) for start, line in tail.poll_placed()]
                self._read_to[name] = max((line.t for line in self._held[name]), default=self._read_to[name])
        # The file that ends first holds nothing back, so it is read on.
        until = min((self._read_to[name] for name, tail in self._tails.items() if tail.has_more), default=math.inf)
        new = [(line.t, name, line.values) for name, lines in self._held.items() for line in lines if line.t <= until]
        self._held = {name: [line for line in lines if line.t > until] for name, lines in self._held.items()}
        return sorted(new, key=lambda item: item[0])

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
