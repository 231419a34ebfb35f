"""One view of a run at one moment, for `asyncrl top` and its advice.

Guarantees:
1. pure: a function of `asyncrl.monitor.source.Observed`;
2. unknown values are empty, None or -1, and are shown as `-`;
3. shares of time cover the newest `WINDOW_S` seconds of the run's own clock, so a finished run shows its last state.

Example: a learner whose last steps took 10 s, including 4 s of waiting, has `waiting` 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.config import AlgorithmConfig
from asyncrl.config.sections.algorithm_catalogue import level_of_age
from asyncrl.metrics import line_number
from asyncrl.monitor.source import Line, Observed
from asyncrl.monitor.status_schema import Alive, Judge, Member, Worker

STATES = ("leased", "unscored", "ready", "claimed")
COUNTED = (*STATES, "issued", "trained", "retired", "dropped", "dead")
WINDOW_S = 60.0
RATE_S = 15.0
SHOWN_STEPS = 60
SHOWN_FAULTS = 5
TROUBLE = frozenset({"exit", "kill", "given up", "silent", "back", "restart", "dead", "lost"})
WEIGHT_SETTINGS = ("advantage", "correction", "correction_options", "loss", "proximal")
SYNC_PARTS = ("publish_s", "commit_s", "checkpoint_s")
WAIT_PARTS = ("wait_s", "fetch_s")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A producer or a reward worker."""

    name: str
    host: str = ""
    pid: int = 0
    seen_s: float = 0.0  # seconds since its last heartbeat
    state: str = ""  # state of the process on this host: "T" stopped, "ended"
    waiting_for: str = ""
    waiting_s: float = 0.0
    busy: float | None = None  # share of the window
    rate: float | None = None  # tokens or samples per second
    stats: dict[str, float] = {}
    judge: str = ""  # judge that it scores for

    def stat(self, name: str) -> float | None:
        """A number of its last heartbeat."""
        return self.stats.get(name)


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the learner's time over the newest steps; None: unknown."""

    name: str = "learner"
    seen_s: float | None = None
    state: str = ""
    waiting_for: str = ""
    waiting_s: float = 0.0
    waiting: float | None = None
    training: float | None = None
    other: float | None = None  # weights, commit, checkpoint


class Trouble(msgspec.Struct, frozen=True):
    """A fault."""

    t: float
    what: str
    text: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    name: str = ""
    folder: str = ""
    live: bool = True  # the buffer answers
    ended: str = ""  # reason of the end, empty while it runs
    exit_code: int | None = None
    fault: str = ""  # reason if the buffer ends the run
    silent: str = ""  # reason if the buffer does not answer although the run has not ended
    launchers: int = 0
    steps: int = 0  # total steps of the run
    step: int = 0
    lines: tuple[Line, ...] = ()  # newest steps, in order
    queue: dict[str, int] = {}
    dropped: dict[str, int] = {}
    dead: dict[str, int] = {}
    capacity: int = 0
    depth: int = -1
    max_staleness: int = -1
    batch_groups: int = 0
    slots: int = 0
    weight_level: str = ""  # of the importance weights that make up for age: token, sequence, geometric; empty: unknown
    why: str = ""  # reason if the next batch is not ready
    learner: Learner = Learner()
    producers: tuple[Row, ...] = ()
    rewards: tuple[Row, ...] = ()
    parts: dict[str, float] = {}  # mean of each reward function, from the newest step with it
    judges: tuple[Judge, ...] = ()
    members: dict[str, Member] = {}
    version: int = -1  # newest weights that were published
    committed: int = -1  # version of the serving generators
    syncs: bool = True  # whether the run has a weight-sync service
    sync_error: str = ""
    rounds: tuple[Line, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    evaluation: str = ""
    silent_timeout_s: float = 10.0

    def newest(self, name: str) -> float | None:
        """A number of the newest step."""
        return line_number(self.lines[-1], name) if self.lines else None

    def values(self, name: str) -> list[float]:
        """A number of the newest steps, where it was written."""
        return [value for line in self.lines if (value := line_number(line, name)) is not None]

    def recent(self, name: str, count: int = 10) -> float | None:
        """Mean over the newest steps."""
        found = self.values(name)[-count:]
        return sum(found) / len(found) if found else None

    @property
    def outstanding(self) -> int:
        return sum(self.queue.get(state, 0) for state in STATES)


def _parts(lines: Sequence[Line]) -> dict[str, float]:
    """Mean of each reward function, from the newest step with it."""
    return {
        name.removeprefix("reward/"): value
        for line in lines
        for name in line
        if name.startswith("reward/") and (value := line_number(line, name)) is not None
    }


def _weight_level(settings: Mapping[str, Any]) -> str:
    """Level of the importance weights in force; empty if the buffer does not answer, or the loss has its own."""
    found = {name: settings[key] for name in WEIGHT_SETTINGS if (key := f"learner.algorithm.{name}") in settings}
    return level_of_age(AlgorithmConfig(**found)) if found else ""


def snapshot(seen: Observed) -> Snapshot:
    """The view of one look."""
    status, buffer = seen.status, seen.status.buffer
    sync, live = status.weightsync, not buffer.error
    result = dict(status.result)
    over = bool(result) and not live
    lines = tuple(seen.steps[-SHOWN_STEPS:]) or ((dict(status.last_step),) if "step" in status.last_step else ())
    counts: Mapping[str, Any] = buffer.ledger if live else status.queue
    newest = max((float(line.get("t", 0.0)) for line in (*seen.steps[-1:], *seen.queue[-1:])), default=seen.at)
    until = seen.at if live else newest  # for a finished run: its own last moment
    return Snapshot(
        at=seen.at,
        name=status.name,
        folder=status.run,
        live=live,
        ended=str(result.get("reason") or "ended") if over else "",
        exit_code=int(result["code"]) if over and isinstance(result.get("code"), int) else None,
        fault=f"{buffer.fault.code}: {buffer.fault.message}" if buffer.fault else "",
        silent="" if live or over else buffer.error,
        launchers=len(status.launchers),
        steps=status.steps,
        step=int(lines[-1].get("step", 0)) if lines else buffer.version,
        lines=lines,
        queue={state: int(counts.get(state, 0)) for state in COUNTED},
        dropped=dict(buffer.dropped),
        dead=dict(buffer.dead),
        capacity=seen.capacity,
        depth=buffer.tuning.depth if live else -1,
        max_staleness=seen.max_staleness,
        batch_groups=buffer.tuning.batch_groups,
        slots=seen.slots,
        weight_level=_weight_level(buffer.tuning.settings),
        why=buffer.waiting_for,
        learner=_learner(seen, until),
        producers=_rows(seen, "producer", until),
        rewards=_rows(seen, "reward", until),
        parts=_parts(lines),
        judges=tuple(buffer.judges),
        members=dict(sync.members) if sync else {},
        version=sync.version if sync and not sync.error else -1,
        committed=sync.committed if sync else -1,
        syncs=sync is not None,
        sync_error=sync.error if sync and not over else "",
        rounds=tuple(seen.rounds[-10:]),
        troubles=troubles(seen.events),
        silent_timeout_s=status.silent_timeout_s,
        evaluation=str(buffer.evaluation.get("running") or ""),
    )


def _learner(seen: Observed, until: float) -> Learner:
    known = seen.status.buffer.learner
    name = known.name if known is not None else "learner"
    alive = seen.status.alive.get(name) or seen.status.alive.get("learner")
    recent = [line for line in seen.steps if until - float(line.get("t", until)) <= WINDOW_S] or seen.steps[-3:]
    whole = sum(line_number(line, "step_s") or 0.0 for line in recent)

    def share(names: Sequence[str]) -> float | None:
        spent = [value for line in recent for part in names if (value := line_number(line, part)) is not None]
        return min(1.0, sum(spent) / whole) if spent and whole > 0 else None

    waiting, other = share(WAIT_PARTS), share(SYNC_PARTS)
    return Learner(
        name=name,
        seen_s=alive.age_s if alive else known.age_s if known else None,
        state=alive.state if alive else "",
        waiting_for=alive.waiting_for if alive else known.waiting_for if known else "",
        waiting_s=alive.waiting_s if alive else known.waiting_s if known else 0.0,
        waiting=waiting,
        other=other,
        training=None if waiting is None else max(0.0, 1.0 - waiting - (other or 0.0)),
    )


def _rows(seen: Observed, role: str, until: float) -> tuple[Row, ...]:
    """Workers of a role: those that the buffer knows, else those in the files."""
    buffer, alive = seen.status.buffer, seen.status.alive
    known: dict[str, Worker] = {one.name: one for one in (buffer.producers if role == "producer" else buffer.rewards)}
    signed = {name: one for name, one in alive.items() if one.role == role}
    filed = {name for name, lines in seen.beats.items() if lines and lines[-1].get("role") == role}
    names = sorted(set(known) | set(signed)) if not buffer.error or signed else sorted(filed)
    return tuple(_row(name, known.get(name), signed.get(name), seen.beats.get(name, []), until) for name in names)


def _row(name: str, worker: Worker | None, sign: Alive | None, beats: Sequence[Line], until: float) -> Row:
    last = beats[-1] if beats else {}
    stats = {
        key: float(value) for key, value in last.items() if isinstance(value, int | float) and key not in ("t", "pid")
    }
    busy = [
        value
        for line in beats
        if until - float(line.get("t", 0.0)) <= WINDOW_S and (value := line_number(line, "busy_share")) is not None
    ]
    ages = [one.age_s for one in (worker, sign) if one is not None and one.age_s is not None]
    newest = sign or worker
    return Row(
        name=name,
        host=newest.host if newest else str(last.get("host", "")),
        pid=newest.pid if newest else int(last.get("pid", 0)),
        seen_s=min(ages) if ages else max(0.0, until - float(last.get("t", until))),
        state=sign.state if sign else "",
        waiting_for=newest.waiting_for if newest else str(last.get("waiting_for", "")),
        waiting_s=newest.waiting_s if newest else 0.0,
        busy=sum(busy) / len(busy) if busy else None,
        rate=_rate(beats, "generated_tokens" if "generated_tokens" in last else "scored_samples"),
        stats=dict(worker.stats) | stats if worker else stats,
        judge=worker.judge if worker else "",
    )


def _rate(beats: Sequence[Line], name: str) -> float | None:
    """Increase of a counter per second, over the newest `RATE_S` seconds of one process's heartbeats."""
    if not beats:
        return None
    end, pid = float(beats[-1].get("t", 0.0)), beats[-1].get("pid")
    marks = [
        (float(line["t"]), float(line[name]))
        for line in beats
        if line.get("pid") == pid and name in line and end - float(line.get("t", 0.0)) <= RATE_S
    ]
    if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
        return None
    return max(0.0, (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0]))


def troubles(events: Sequence[Line], count: int = SHOWN_FAULTS) -> tuple[Trouble, ...]:
    """The newest faults, in reverse order. An exit with code 0 is not a fault."""
    found = []
    for event in events:
        what = str(event.get("event") or event.get("e") or "")
        if what not in TROUBLE or (what == "exit" and event.get("code") == 0):
            continue
        found.append(Trouble(float(event.get("t", 0.0)), what, _words(event)))
    return tuple(reversed(found[-count:]))


def _words(event: Line) -> str:
    if event.get("text"):
        return str(event["text"])
    if "g" in event:
        return f"group {event['g']}: {event.get('reason') or event.get('why') or ''}".rstrip(": ")
    more = [f"code {event['code']}"] if "code" in event and event.get("event") != "restart" else []
    more += [f"in {event['wait_s']:g} s"] if isinstance(event.get("wait_s"), int | float) else []
    return " ".join([str(event.get("name", "")), *more])
