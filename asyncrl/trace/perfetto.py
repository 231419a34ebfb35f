"""`asyncrl trace RUN --perfetto FILE`: a run as a timeline for ui.perfetto.dev, from its logs.

Writes Perfetto's own format: a track per role process, in it one for what it holds; what
overlaps lies in lanes below one another. Guarantees:
1. it only reads, line by line: a run of any length needs memory for what was under way at one time, and it may go on;
2. slices of one lane nest; times are microseconds since the run's first event, none is negative;
3. a group is one flow, from its lease over its scores and its wait in the queue into the step that trained it; weights
   are one from the step that published them into their round. A flow never goes back in time: where the clocks of
   hosts differ by more than what lies between, the arrow into the step is left out;
4. faults (ends, restarts, kills, silences, lost leases, dropped and dead groups) are marks at the affected process.

    learner      [ step 3  [wait][fetch][train ......][publish] ]
    buffer                            [ ready 7 ... ]
    producer-0   [ group 7 ......... ]          a lane for each group that it holds
    reward-0                     [ score 7 ]
    weightsync                                        [ version 3 ]
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asyncrl.metrics import JsonTail, line_time
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.history import Event, history_events
from asyncrl.trace.perfetto_groups import ROUNDS, STEPS, GroupDrawing
from asyncrl.trace.perfetto_writer import Drawing, Lane, Out, Slice

#: The parts of a step in their order; their sum is `step_s`.
PARTS = ("checkpoint", "wait", "fetch", "assemble", "proximal", "train", "publish", "commit")
MARKED = frozenset({"exit", "restart", "kill", "given up", "silent", "back", "stop", "end"})  # of logs/launch.jsonl
#: Curves: metric -> unit. The lines of the buffer, of the learner, of the others.
QUEUE = {"leased": "groups", "unscored": "groups", "ready": "groups", "claimed": "groups"}
CURVES = {"lag_mean": "steps", "lag_max": "steps", "reward_mean": "", "tokens_per_s": "tokens/s"}
ROLE_CURVES = {"busy_share": "", "engine_version": "", "samples_in_flight": "samples"}


def weights_flow(version: int) -> int:
    """The flow of a weight version."""
    return 2 * version + 3


class RunDrawing:
    """The timeline of a run: its history and metrics in the order of their time."""

    def __init__(self, drawing: Drawing) -> None:
        self._draw = drawing
        self._groups = GroupDrawing(drawing)
        self._learner_at = 0
        self._published: dict[int, int] = {}  # version -> when its publishing began
        self._rounds: deque[tuple[int, Slice, float]] = deque()  # whose step is not drawn yet: version, slice, end
        self._spoken: dict[str, tuple[float, float]] = {}  # producer -> newest line: time, tokens

    def take(self, kind: str, event: Event) -> None:
        """One line of one file."""
        if kind == "history":
            self._groups.take(event)
        elif kind == "learner":
            self._step(event)
        elif kind == "weightsync":
            self._round(event)
        elif kind == "buffer":
            self._curves("buffer", event, QUEUE)
        elif kind == "roles":
            self._beat(event)
        elif event.get("event") in MARKED:
            words = event.get("text") or event.get("reason") or ""
            code = f" with code {event['code']}" if "code" in event else ""
            self._draw.mark(str(event.get("name", "launch")), event["t"], f"{event['event']}{code}", words=words)

    def _curves(self, process: str, line: Event, names: dict[str, str]) -> None:
        for name, unit in names.items():
            if name in line:
                self._draw.count(process, line["t"], name, line[name], unit=unit)

    def _beat(self, line: Event) -> None:
        """A worker's line; its token counter becomes a rate."""
        if line["role"] not in ("producer", "reward"):
            return
        name, t = line["name"], float(line["t"])
        self._curves(name, line, ROLE_CURVES)
        if "generated_tokens" in line:
            tokens = float(line["generated_tokens"])
            before, had = self._spoken.get(name, (t, tokens))
            self._spoken[name] = (t, tokens)
            if t > before and tokens >= had:
                self._draw.count(name, t, "tokens_per_s", (tokens - had) / (t - before), unit="tokens/s")

    def _step(self, line: Event) -> None:
        end = self._draw.microseconds(line["t"])
        start = max(self._learner_at, self._draw.microseconds(line["t"] - float(line.get("step_s", 0.0))))
        if "step" not in line or end <= start:
            return
        step, self._learner_at = int(line["step"]), end
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and "/" not in key}
        lane = Lane("learner", STEPS)
        whole = Slice(lane, start, f"step {step}", numbers, [])
        parts = {name: (Slice(lane, first, name, {}, []), last) for name, first, last in step_parts(line, start, end)}
        if "publish" in parts:
            parts["publish"][0].flows = [weights_flow(step)]
            self._published[step] = parts["publish"][0].start
        self._groups.lead_into_step(step, parts["train"][0] if "train" in parts else whole)
        self._draw.slice(whole, end, inside=parts.values())
        self._curves("learner", line, CURVES)
        self._rounds_until(step)

    def _round(self, line: Event) -> None:
        """A round is logged before the step that published its weights, which decides about the arrow."""
        version, begun = int(line.get("version", -1)), line["t"] - float(line.get("round_s", 0.0))
        shown: dict[str, Any] = {
            key: line.get(key) for key in ("members", "state", "transport", "encoding", "carried_bytes")
        }
        one = self._draw.begin("weightsync", ROUNDS, begun, f"version {version}", **shown)
        self._rounds.append((version, one, line["t"]))

    def _rounds_until(self, version: float) -> None:
        while self._rounds and self._rounds[0][0] <= version:
            number, one, end = self._rounds.popleft()
            if self._published.get(number, math.inf) <= one.start:
                one.flows = [weights_flow(number)]
            self._draw.end(one, end)
        for old in [old for old in self._published if old < version - 100]:
            del self._published[old]

    def close(self, t: float) -> None:
        """End of the log: end everything in progress."""
        self._groups.close(t)
        self._rounds_until(math.inf)


def step_parts(line: Event, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """The consecutive parts of a step between its start and its end.

    >>> list(step_parts({"wait_s": 1.0, "train_s": 3.0}, 0, 4_000_000))
    [('wait', 0, 1000000), ('train', 1000000, 4000000)]
    """
    whole = sum(float(line.get(f"{name}_s", 0.0)) for name in PARTS)
    done, first = 0.0, start
    for name in PARTS:
        done += float(line.get(f"{name}_s", 0.0))
        last = start + round((end - start) * done / whole) if whole > 0 else first
        if last > first:
            yield name, first, last
        first = last


def write_trace(run: RunDir, path: Path) -> int:
    """Draw the run into the file; return the number of events. Raises `run.missing` without a log."""
    first = next(history_events(run), None)
    start = min([float(first["t"]) if first else 0.0, *(_first_time(file) for _, file in _files(run))])
    with Out(path) as out:
        draw = Drawing(out, zero=start)
        draw.mark("launch", start, "the log begins", at=_utc(start))
        drawing = RunDrawing(draw)
        last = start
        for t, kind, event in _merge_by_time(run):
            try:
                drawing.take(kind, event)
            except (KeyError, TypeError, ValueError):
                continue  # a damaged line, or one of another version
            last = max(last, t)
        drawing.close(last)
        return out.events


def _files(run: RunDir) -> list[tuple[str, Path]]:
    metrics = [(name, run.metrics / f"{name}.jsonl") for name in ("learner", "weightsync", "buffer", "roles")]
    return [*metrics, ("launch", run.logs / "launch.jsonl")]


def _merge_by_time(run: RunDir) -> Iterator[tuple[float, str, Event]]:
    """Lines of all files by time."""
    history = (("history", event) for event in history_events(run))
    sources = [history, *(_lines(name, file) for name, file in _files(run))]
    timed = [((line_time(event), kind, event) for kind, event in source) for source in sources]
    yield from heapq.merge(*timed, key=lambda item: item[0])


def _lines(kind: str, path: Path) -> Iterator[tuple[str, Event]]:
    tail = JsonTail(path, from_end=False)
    before = -1
    while tail.position.offset != before:
        before = tail.position.offset
        yield from ((kind, line) for line in tail.poll())
    tail.close()


def _first_time(path: Path) -> float:
    lines = JsonTail(path, from_end=False).poll()
    starts = [line_time(line) - float(line.get("step_s") or line.get("round_s") or 0.0) for line in lines[:50]]
    return min(starts, default=math.inf)


def _utc(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds")


def perfetto_command(folder: Path, path: Path) -> int:
    """`asyncrl trace RUN --perfetto FILE`."""
    target = path if path.name.endswith(".gz") else path.with_name(f"{path.name}.gz")
    events = write_trace(RunDir(folder).require(), target)
    print(f"{target}: {events} events; open it at https://ui.perfetto.dev (it is read in your browser, not sent)")
    return 0
