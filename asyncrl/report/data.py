"""Reads the files of a run into one value, and summarizes it in a few lines.

Guarantees:
1. it only reads; missing or truncated files are empty or shorter, never an error;
2. steps are those of the surviving history: a step that was trained again replaces its first time and all later steps.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl.audit.prove import Audit, audit_run
from asyncrl.config import Config, load
from asyncrl.config.mode import streams
from asyncrl.errors import AsyncRLError
from asyncrl.evaluation.ids import name_version
from asyncrl.evaluation.statistics import ALL
from asyncrl.metrics import drop_repeated_steps, line_number, read_lines
from asyncrl.monitor.advice import CUT_SHARE
from asyncrl.monitor.text import FIGURES, shown_mode
from asyncrl.process_plan.plan import Outcome
from asyncrl.report.events import Recovery, StepLags, read_events, story
from asyncrl.runtime.run_dir import RunDir, read_object

Line = dict[str, Any]
NO_SIGNAL_SHARE = 0.9  # of the last groups; a run that has learned its prompts comes near this
ENDS = 5  # steps averaged at each end of the run


class Deliveries(NamedTuple):
    """Weight versions delivered to generators: acknowledged with the right digest, with another one, or late."""

    matched: int
    wrong: int
    left_out: int


class RunData(msgspec.Struct):
    """Everything the report shows."""

    run: RunDir
    config: Config | None
    audit: Audit
    steps: list[Line]  # metrics/learner.jsonl, surviving steps
    roles: dict[str, list[Line]]  # metrics/roles.jsonl by name
    buffer: list[Line]
    rounds: list[Line]
    processes: list[Line]
    samples: list[Line]
    events: list[Line]  # logs/launch.jsonl
    history: list[Line]  # events for the fault log
    result: Line
    evaluations: list[Line] = []  # metrics/evaluation.jsonl
    every_step: list[Line] = []  # metrics/learner.jsonl, including steps that were trained again
    lags: list[StepLags] = []
    recoveries: list[Recovery] = []

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.run.name if self.config else self.run.root.name

    @property
    def wall_s(self) -> float:
        """From the first to the last time in any file."""
        start, end = self.span_of_time()
        return end - start

    @property
    def last_step(self) -> int:
        """The last trained step, 0 without one."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    def values(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a metric of the learner."""
        return [(float(line["step"]), value) for line in self.steps if (value := line_number(line, key)) is not None]

    def reward_ends(self) -> tuple[float, float]:
        """Mean reward of the first and the last five steps."""
        return self.metric_ends("reward_mean")

    def metric_ends(self, key: str) -> tuple[float, float]:
        """Mean of a metric of the learner over the first and over the last five steps; 0 without values."""
        found = [value for _, value in self.values(key)]
        return (statistics.fmean(found[:ENDS]), statistics.fmean(found[-ENDS:])) if found else (0.0, 0.0)

    def deliveries(self) -> Deliveries:
        """Over all rounds and members."""
        matched = wrong = left_out = 0
        for line in self.rounds:
            for answer in dict(line.get("members") or {}).values():
                if answer and answer == line.get("digest"):
                    matched += 1
                elif "digest" in str(answer):  # "holds digest ...", "received another digest"
                    wrong += 1
                else:
                    left_out += 1
        return Deliveries(matched, wrong, left_out)

    def count_acknowledged(self, name: str) -> int:
        """Versions that this generator acknowledged with the right digest."""
        answers = [(dict(line.get("members") or {}).get(name), line.get("digest")) for line in self.rounds]
        return sum(bool(answer) and answer == digest for answer, digest in answers)

    def span_of_time(self) -> tuple[float, float]:
        """First and last wall time in any file."""
        groups = [self.processes, self.steps, self.buffer, self.rounds, self.events, *self.roles.values()]
        times = [t for group in groups for line in group if (t := line_number(line, "t")) is not None]
        return (min(times), max(times)) if times else (0.0, 1.0)


def load_run(run: RunDir) -> RunData:
    try:
        config: Config | None = load(run.config)
    except AsyncRLError:
        config = None
    roles: dict[str, list[Line]] = defaultdict(list)
    for line in read_lines(run.metrics / "roles.jsonl"):
        roles[str(line.get("name", "?"))].append(line)
    learner, events = read_lines(run.metrics / "learner.jsonl"), read_lines(run.logs / "launch.jsonl")
    rounds = read_lines(run.metrics / "weightsync.jsonl")
    facts = story(read_events(run.history), events, rounds)
    return RunData(
        run=run,
        config=config,
        audit=audit_run(run.root),
        steps=drop_repeated_steps(learner),
        every_step=learner,
        roles=dict(roles),
        buffer=read_lines(run.metrics / "buffer.jsonl"),
        rounds=rounds,
        processes=read_lines(run.processes),
        samples=read_lines(run.samples),
        events=events,
        history=facts.notes,
        lags=facts.lags,
        recoveries=facts.recoveries,
        result=read_object(run.result),
        evaluations=read_lines(run.metrics / "evaluation.jsonl"),
    )


def ledger_text(audit: Audit) -> str:
    """`issued 640 = trained 640 + dropped 0 + dead 0 + in flight 0`."""
    parts = [("trained", audit.trained), ("dropped", sum(audit.dropped.values())), ("dead", sum(audit.dead.values()))]
    parts += [(name, count) for name, count in (("superseded", audit.superseded), ("lost", audit.lost)) if count]
    parts.append(("in flight", audit.in_flight))
    return f"issued {audit.issued} = {' + '.join(f'{name} {count}' for name, count in parts)}"


def newest(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of evaluations the last line of every step, in order."""
    return [line for _, line in sorted({int(line["step"]): line for line in lines if "step" in line}.items())]


def _held_out(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """`held out  mean@4 0.247 (version 0) -> 0.933 (version 40), 3 evaluations`; nothing without evaluations."""
    figures = []
    for line in (lines[0], lines[-1]) if lines else ():
        sources = list(dict(line.get("sources") or {}))
        name = f"val-core/{sources[0] if len(sources) == 1 else ALL}/reward/mean@{line.get('evaluation_samples')}"
        figures.append(f"{line[name]:.3f} ({name_version(line)})" if name in line else f"- (step {line.get('step')})")
    if not figures:
        return []
    missing = sum(int(line.get("evaluation_missing", 0)) + int(line.get("evaluation_failed", 0)) for line in lines)
    more = f"; {missing} prompts failed or missing" if missing else ""
    return [
        f"held out  mean@{lines[-1].get('evaluation_samples')} {' -> '.join(figures)}, {len(lines)} evaluations{more}"
    ]


def _hints(data: RunData) -> list[str]:
    """Reasons why the last steps did not learn; only of generated samples."""
    if data.config is not None and streams(data.config):
        return []
    flat, cut = (_mean_of_last(data, name) for name in ("zero_advantage_share", "truncated_share"))
    hints = []
    if flat >= NO_SIGNAL_SHARE and not (data.config is not None and data.config.teacher):
        hints.append(f"{flat:.0%} of the last groups have one reward for all their samples, and teach nothing")
    if cut >= CUT_SHARE:
        hints.append(f"{cut:.0%} of the last samples are cut at sampling.max_new_tokens")
    return [f"hint      {'; '.join(hints)}: `asyncrl samples` shows them"] if hints else []


def _mean_of_last(data: RunData, name: str) -> float:
    values = [value for _, value in data.values(name)][-ENDS:]
    return statistics.fmean(values) if values else 0.0


def _learning(data: RunData) -> list[str]:
    """What the run learned, by the figures of its mode; of generated samples also their lag."""
    audit = data.audit
    lines = []
    for name, key in FIGURES[shown_mode(data.config)] if data.last_step else ():
        early, late = data.metric_ends(key)
        lines.append(f"{name:<9} {early:.3f} -> {late:.3f} (mean of the first and of the last {ENDS} steps)")
    if data.last_step and (data.config is None or not streams(data.config)):
        over = f"; {audit.over_bound} groups over it" if audit.over_bound else ""
        lines.append(f"lag       mean {audit.lag_mean:.2f}, max {audit.lag_max}, bound {audit.bound_max}{over}")
    return lines


def _weights(data: RunData) -> list[str]:
    """How the weights reached the generators; nothing if there were none."""
    if data.config is not None and streams(data.config):
        return []
    audit, deliveries = data.audit, data.deliveries()
    return [
        f"weights   {deliveries.matched} deliveries acknowledged with the right digest, {deliveries.wrong} with "
        f"another, {deliveries.left_out} not in time; {audit.spans_matched} of {audit.spans} spans match"
    ]


def summary(data: RunData, outcome: Outcome) -> list[str]:
    """Summary lines at the end of `asyncrl launch`."""
    audit = data.audit
    restarts = ", ".join(f"{name} {count}" for name, count in outcome.restarts.items()) or "none"
    steps = data.config.learner.steps if data.config else "?"
    where = f"step {data.last_step} of {steps}"
    without = [f"{name} (code {code})" for name, code in outcome.given_up.items()]
    return [
        f"ended     {outcome.reason} after {outcome.wall_s:.1f} s, {where}; restarts: {restarts}",
        *([f"given up  {', '.join(without)}: the run went on without"] if without else []),
        *_learning(data),
        *_held_out(newest(data.evaluations)),
        f"ledger    {ledger_text(audit)}; doubled {audit.doubled}",
        *_weights(data),
        *_hints(data),
        *([f"alarm     {audit.lengths.alarm}"] if audit.lengths.alarm else []),
        f"audit     {'OK' if audit.ok else 'FAILED: ' + audit.violations[0]}",
    ]
