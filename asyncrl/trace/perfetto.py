"""`asyncrl trace RUN --perfetto FILE`: a run as a timeline for ui.perfetto.dev, from its logs.

Writes Perfetto's own format: a track per role process, in it one for what it holds; what
overlaps lies in lanes below one another. Guarantees:
1. it only reads, line by line: a run of any length needs memory for what was under way at one time, and it may go on;
2. slices of one lane nest; times are microseconds since the run's first event, none is negative;
3. a group is one flow, from its lease over its scores and its wait in the queue into the step that trained it; weights
   are one from the step that published them into their round. A flow never goes back in time: where the clocks of
   hosts differ by more than what lies between, the arrow into the step is left out;
4. faults (ends, restarts, kills, silences, lost leases, dropped and dead groups) are marks at whom they hit.

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
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.metrics import JsonTail
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.perfetto_writer import Drawing, Lane, Out, Slice
from asyncrl.trace.story import Event, decoded, lines_of

#: The parts of a step in the order in which they happen; together they are `step_s`.
PARTS = ("checkpoint", "wait", "fetch", "assemble", "proximal", "train", "publish", "commit")
MARKED = frozenset({"exit", "restart", "kill", "given up", "silent", "back", "stop", "end"})  # of logs/launch.jsonl
#: Names of tracks.
STEPS, HELD, SCORED, WAITING, ROUNDS, EVALUATIONS = (
    "steps",
    "groups held",
    "groups scored",
    "groups waiting",
    "rounds",
    "evaluations",
)
#: Curves: metric -> unit. The lines of the buffer, of the learner, of the others.
QUEUE = {"leased": "groups", "unscored": "groups", "ready": "groups", "claimed": "groups"}
CURVES = {"lag_mean": "steps", "lag_max": "steps", "reward_mean": "", "tokens_per_s": "tokens/s"}
ROLE_CURVES = {"busy_share": "", "engine_version": "", "samples_in_flight": "samples"}


def group_flow(group: int) -> int:
    """The flow of a group."""
    return 2 * group + 2


def weights_flow(version: int) -> int:
    """The flow of a weight version."""
    return 2 * version + 3


# ---------------------------------------------------------------- groups


class Way(msgspec.Struct):
    """A group on its way: its slices now, and when the last of those that are drawn began."""

    lease: Slice | None = None
    scores: dict[str, Slice] = {}  # by worker
    waits: Slice | None = None
    arrived: float = 0.0  # its first sample without a score
    last: int = 0
    attempts: int = 0
    trained: bool = False


class GroupDrawing:
    """The history of groups, drawn event by event."""

    def __init__(self, drawing: Drawing) -> None:
        self._draw = drawing
        self._ways: dict[int, Way] = {}
        self._steps: dict[int, list[int]] = {}  # step that is not drawn yet -> its groups
        self._evaluations: dict[object, Slice] = {}  # round -> under way
        self._handlers: dict[str, Callable[[Event], None]] = {
            "lease": self._lease, "sample": self._sample, "score": self._score, "unscored": self._unscored,
            "ready": self._ready, "lost": self._lost, "drop": self._gone, "dead": self._gone, "claim": self._claim,
            "register": self._register, "service": self._service, "retire": self._retire,
            "eval_begin": self._eval_begin, "eval_end": self._eval_end,
        }  # fmt: skip

    def take(self, event: Event) -> None:
        """One event of the history, in its order."""
        handler = self._handlers.get(str(event.get("e")))
        if handler is not None:
            handler(event)

    def _lease(self, event: Event) -> None:
        way = self._ways.setdefault(event["g"], Way())
        way.attempts += 1
        again = f", attempt {way.attempts}" if way.attempts > 1 else ""
        way.lease = self._draw.begin(
            event["producer"],
            HELD,
            event["t"],
            f"group {event['g']}{again}",
            flows=(group_flow(event["g"]),),
            group=event["g"],
            engine_version=event["w"],
            deadline=event["deadline"],
            bound=event["bound"],
        )

    def _sample(self, event: Event) -> None:
        way = self._ways.get(event["g"])
        if way is None:
            return
        if way.lease is not None:
            way.lease.args[f"#{event['i']}"] = f"{event['length']} tokens"
        if "reward" not in event:
            way.arrived = way.arrived or event["t"]

    def _score(self, event: Event) -> None:
        """From the arrival of its first sample to its last score: the wait for a worker is in it."""
        way = self._ways.get(event["g"])
        if way is None:
            return
        one = way.scores.get(event["worker"])
        if one is None:
            since = way.arrived or event["t"]
            one = self._begin(event["worker"], SCORED, since, "score", event["g"])
            way.scores[event["worker"]] = one
        one.args[f"#{event['i']}"] = event["reward"]

    def _unscored(self, event: Event) -> None:
        way = self._ways.get(event["g"])
        if way is not None:
            self._end_lease(way, event["t"])
            way.waits = self._begin("buffer", WAITING, event["t"], "unscored", event["g"])

    def _ready(self, event: Event) -> None:
        way = self._ways.get(event["g"])
        if way is not None:
            self._close(way, event["t"])
            way.waits = self._begin("buffer", WAITING, event["t"], "ready", event["g"])

    def _begin(self, process: str, track: str, t: float, what: str, group: int) -> Slice:
        return self._draw.begin(process, track, t, f"{what} {group}", flows=(group_flow(group),), group=group)

    def _end_lease(self, way: Way, t: float, **args: Any) -> None:
        if way.lease is not None:
            self._pass(way, way.lease, t, **args)
            way.lease = None

    def _pass(self, way: Way, one: Slice, t: float, **args: Any) -> None:
        self._draw.end(one, t, **args)
        way.last = max(way.last, one.start)

    def _close(self, way: Way, t: float, **args: Any) -> None:
        """Everything that is under way of the group ends."""
        self._end_lease(way, t, **args)
        for one in [*way.scores.values(), *([way.waits] if way.waits is not None else [])]:
            self._pass(way, one, t, **args)
        way.scores, way.waits, way.arrived = {}, None, 0.0

    def _lost(self, event: Event) -> None:
        self._draw.mark(event["producer"] or "buffer", event["t"], f"group {event['g']} lost: {event['why']}")
        if event["g"] in self._ways:
            self._close(self._ways[event["g"]], event["t"], ended=event["why"])

    def _gone(self, event: Event) -> None:
        name = f"group {event['g']} {event['e']}: {event['reason']}"
        self._draw.mark("buffer", event["t"], name, detail=event.get("detail", ""))
        way = self._ways.pop(event["g"], None)
        if way is not None:
            self._close(way, event["t"], ended=event["reason"])

    def _claim(self, event: Event) -> None:
        """The flows of the groups end when the slice of their step is known."""
        self._steps[event["step"]] = list(event["groups"])
        for group in event["groups"]:
            way = self._ways.get(group)
            if way is not None:
                self._close(way, event["t"])

    def trained(self, step: int, train: Slice) -> None:
        """The part of a step that trains is about to be drawn: its groups' flows lead into it."""
        for group in self._steps.pop(step, []):
            way = self._ways.get(group)
            if way is not None:
                way.trained = True
                train.flows += [group_flow(group)] if way.last <= train.start else []

    def _register(self, event: Event) -> None:
        self._draw.mark("learner", event["t"], f"registered at step {event['step']}, epoch {event['epoch']}")
        for step in [step for step in self._steps if step > event["step"]]:
            del self._steps[step]

    def _service(self, event: Event) -> None:
        self._draw.mark("buffer", event["t"], f"service epoch {event['service_epoch']} starts")

    def _retire(self, _event: Event) -> None:
        """What is in a durable checkpoint is not needed any more."""
        for group in [group for group, way in self._ways.items() if way.trained and way.waits is None]:
            del self._ways[group]

    def _eval_begin(self, event: Event) -> None:
        self._evaluations[event["round"]] = self._draw.begin(
            "buffer",
            EVALUATIONS,
            event["t"],
            f"evaluation of step {event['step']}",
            prompts=event.get("prompts"),
            samples=event.get("samples"),
        )

    def _eval_end(self, event: Event) -> None:
        one = self._evaluations.pop(event["round"], None)
        if one is not None:
            self._draw.end(one, event["t"], scored=event.get("evaluation_scored"), why=event.get("why"))

    def close(self, t: float) -> None:
        """What is under way ends with the log."""
        for way in self._ways.values():
            self._close(way, t, ended="the log ends here")
        for one in self._evaluations.values():
            self._draw.end(one, t, ended="the log ends here")


# ---------------------------------------------------------------- the others


class RunDrawing:
    """Everything: the history and the metrics of a run, in the order of their time."""

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
        """A worker's line; its tokens since the start become a speed."""
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
        end = self._draw.at(line["t"])
        start = max(self._learner_at, self._draw.at(line["t"] - float(line.get("step_s", 0.0))))
        if "step" not in line or end <= start:
            return
        step, self._learner_at = int(line["step"]), end
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and "/" not in key}
        lane = Lane("learner", STEPS)
        whole = Slice(lane, start, f"step {step}", numbers, [])
        parts = {name: (Slice(lane, first, name, {}, []), last) for name, first, last in parts_of(line, start, end)}
        if "publish" in parts:
            parts["publish"][0].flows = [weights_flow(step)]
            self._published[step] = parts["publish"][0].start
        self._groups.trained(step, parts["train"][0] if "train" in parts else whole)
        self._draw.slice(whole, end, inside=parts.values())
        self._curves("learner", line, CURVES)
        self._rounds_until(step)

    def _round(self, line: Event) -> None:
        """A round is told before the step that published its weights, which knows whether an arrow leads to it."""
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
        """The log is over: what is under way ends."""
        self._groups.close(t)
        self._rounds_until(math.inf)


def parts_of(line: Event, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """The parts of a step between its start and its end; they follow one another.

    >>> list(parts_of({"wait_s": 1.0, "train_s": 3.0}, 0, 4_000_000))
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


# ---------------------------------------------------------------- reading


def write_trace(run: RunDir, path: Path) -> int:
    """Draw the run into the file; how many events that were. Raises `run.missing` where nothing was logged."""
    first = next((event for line in lines_of(run) if (event := decoded(line)) is not None), None)
    start = min([float(first["t"]) if first else 0.0, *(_first_time(file) for _, file in _files(run))])
    with Out(path) as out:
        draw = Drawing(out, zero=start)
        draw.mark("launch", start, "the log begins", at=_utc(start))
        drawing = RunDrawing(draw)
        last = start
        for t, kind, event in _merged(run):
            try:
                drawing.take(kind, event)
            except (KeyError, TypeError, ValueError):
                continue  # a line of another version, or damaged: the others are drawn
            last = max(last, t)
        drawing.close(last)
        return out.events


def _files(run: RunDir) -> list[tuple[str, Path]]:
    metrics = [(name, run.metrics / f"{name}.jsonl") for name in ("learner", "weightsync", "buffer", "roles")]
    return [*metrics, ("launch", run.logs / "launch.jsonl")]


def _merged(run: RunDir) -> Iterator[tuple[float, str, Event]]:
    """Lines of all files by time."""
    history = (("history", event) for line in lines_of(run) if (event := decoded(line)) is not None)
    sources = [history, *(_lines(name, file) for name, file in _files(run))]
    timed = [((_time(event), kind, event) for kind, event in source) for source in sources]
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
    starts = [_time(line) - float(line.get("step_s") or line.get("round_s") or 0.0) for line in lines[:50]]
    return min(starts, default=math.inf)


def _utc(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds")


def _time(event: Event) -> float:
    t = event.get("t", 0.0)
    return float(t) if isinstance(t, int | float) else 0.0


def perfetto_command(folder: Path, path: Path) -> int:
    """`asyncrl trace RUN --perfetto FILE`."""
    target = path if path.name.endswith(".gz") else path.with_name(f"{path.name}.gz")
    events = write_trace(RunDir(folder).require(), target)
    print(f"{target}: {events} events; open it at https://ui.perfetto.dev (it is read in your browser, not sent)")
    return 0
