"""`asyncrl trace RUN --latency`: how long the trained groups of a run were in each stage, from its history.

Guarantees:
1. the history is read once, line by line, and of each group only times are kept; the run may be in progress;
2. a group counts once, with its first commit: what a restarted learner repeats is left out. Of several leases the last
   one counts, and the time of the ones before it is in the stage `lost leases`;
3. times are those of the buffer's drains, so nothing below its period is resolved.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE
from asyncrl.runtime.run_dir import RunDir, format_json
from asyncrl.trace.history import history_lines

#: Stages in order: name -> what happens in it. The first event is the issue of a group.
STAGES = {
    "lost leases": "from its issue to the lease that its samples came from",
    "generation": "from that lease to its last sample",
    "rewards": "from there to its last score",
    "queue": "from there to the claim of the learner",
    "training": "from there to the commit of the step",
}
SHARES = (0.5, 0.9, 0.99)


class _Line(msgspec.Struct):
    e: str = ""
    t: float = 0.0
    g: int = -1
    groups: list[int] = []


class Stage(msgspec.Struct):
    """Seconds of a stage over all groups. `share`: of the whole time of all groups."""

    name: str
    p50: float
    p90: float
    p99: float
    longest: float
    share: float


def latency_command(folder: Path, *, as_json: bool) -> int:
    """Print the stages; return the exit code."""
    groups, stages = measure(history_lines(RunDir(folder).require()))
    print(format_json({"groups": groups, "stages": stages}) if as_json else latency_text(groups, stages))
    return 0


def measure(lines: Iterable[bytes]) -> tuple[int, list[Stage]]:
    """The number of trained groups, and the stages with the whole time (`total`) at the end."""
    decode = msgspec.json.Decoder(_Line).decode
    times: dict[int, list[float]] = {}  # of groups that are not trained yet: of the events in `_PLACES`
    done: set[int] = set()
    seconds = [array("d") for _ in (*STAGES, "total")]
    for line in lines:
        try:
            event = decode(line)
        except UNREADABLE:
            continue  # a damaged line: `asyncrl audit` names it
        if event.e == "issue" and event.g not in done:
            times[event.g] = [event.t] * (len(STAGES) + 1)
        for group in (event.g,) if event.e in _BY_GROUP else event.groups if event.e in _BY_STEP else ():
            if (mine := times.get(group)) is None:
                continue
            place = _PLACES[event.e]
            mine[place:] = [event.t] * (len(mine) - place)
            if event.e == "commit":
                for stage, (before, after) in zip(seconds, itertools.pairwise(mine), strict=False):
                    stage.append(after - before)
                seconds[-1].append(mine[-1] - mine[0])
                done.add(group)
                del times[group]
    whole = sum(seconds[-1]) or 1.0
    return len(seconds[-1]), [_stage(name, held, whole) for name, held in zip((*STAGES, "total"), seconds, strict=True)]


_PLACES = {"lease": 1, "sample": 2, "ready": 3, "claim": 4, "commit": 5}
_BY_GROUP, _BY_STEP = ("lease", "sample", "ready"), ("claim", "commit")


def _stage(name: str, held: array[float], whole: float) -> Stage:
    ordered = sorted(held) or [0.0]
    p50, p90, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in SHARES)
    return Stage(name, p50, p90, p99, ordered[-1], sum(held) / whole)


def latency_text(groups: int, stages: list[Stage]) -> str:
    """A table with a row for each stage, and what the longest one means."""
    if not groups:
        return "no group was trained yet"
    lines = [f"{groups} trained groups, seconds:", f"{'':12}{'p50':>10}{'p90':>10}{'p99':>10}{'longest':>10}  share"]
    lines += [
        f"{one.name:12}{one.p50:10.3f}{one.p90:10.3f}{one.p99:10.3f}{one.longest:10.3f}  {one.share:5.0%}  "
        f"{STAGES.get(one.name, '')}"
        for one in stages
    ]
    return "\n".join(line.rstrip() for line in lines)
