"""Measurements of a run for `asyncrl plan`: decoding speed, cost of a step, lengths, weight rounds.

It reads the history and the metrics of a run. Guarantees:
1. simultaneous decoding follows from leases and arrivals (an engine decodes `slots` samples at once, others wait in
   order), and so does the use of cores: nothing is assumed that the logs show;
2. if producers and learner share cores, times are converted to those of a process with cores of its own;
3. a run with too few steps is refused (`plan.numbers`).

Example: a sample of 50 tokens that was decoded in 2.6 s, together with 31 others on average: 52 ms per token. All
samples together are fitted by `decode_s + decode_sample_s * live`.
"""

from __future__ import annotations

import bisect
import itertools
import os
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl.config import Config, load
from asyncrl.errors import ConfigError
from asyncrl.metrics import read_lines
from asyncrl.planner.model import Plant
from asyncrl.runtime.device import device_nodes
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.history import Event, history_events

LEAST_STEPS = 8
SKIPPED = 5  # as in buffers.simulation.simulation
OTHER_DEMAND = 0.15  # cores of buffer, reward worker, weight sync and launcher together, on a shared machine


class Observed(NamedTuple):
    """Behaviour of a run, in the terms of a forecast."""

    steps: int
    steps_s: float
    lag_mean: float
    learner_wait_share: float
    tokens_s: float


class Decoded(NamedTuple):
    """A sample in its engine."""

    producer: str
    start: float
    end: float
    length: int


class Curve:
    """A step function of time, and its integral."""

    def __init__(self, changes: Iterable[tuple[float, float]]) -> None:
        """`changes`: (time, change)."""
        self._times: list[float] = []
        self._values: list[float] = []
        self._sums: list[float] = []
        value = total = 0.0
        for t, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
            if self._times:
                total += value * (t - self._times[-1])
            value += sum(change for _, change in group)
            self._times.append(t)
            self._values.append(value)
            self._sums.append(total)

    def integral_until(self, t: float) -> float:
        """The integral up to `t`."""
        place = bisect.bisect_right(self._times, t) - 1
        return self._sums[place] + self._values[place] * (t - self._times[place]) if place >= 0 else 0.0

    def steps(self) -> Iterable[tuple[float, float]]:
        """(time, value from then on)."""
        return zip(self._times, self._values, strict=True)

    def mean(self, start: float, end: float) -> float:
        return (self.integral_until(end) - self.integral_until(start)) / max(1e-9, end - start)


# ---------------------------------------------------------------- decoding over time


def decoded_samples(events: Iterable[Event], *, slots: int, asked: int, evaluated: int) -> list[Decoded]:
    """Time of decoding of each sample: from its turn in the engine to its arrival."""
    found: list[Decoded] = []
    waiting: dict[str, deque[tuple[int, int]]] = defaultdict(deque)
    live: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    have: dict[int, set[int]] = defaultdict(set)

    def seat(producer: str, t: float) -> None:
        while waiting[producer] and len(live[producer]) < slots:
            live[producer][waiting[producer].popleft()] = t

    for event in events:
        kind, t = event.get("e"), float(event.get("t", 0.0))
        if kind in ("lease", "eval_lease"):
            count = asked if kind == "lease" else evaluated
            missing = [index for index in range(count) if index not in have[event["g"]]]
            waiting[event["producer"]].extend((event["token"], index) for index in missing)
            seat(event["producer"], t)
        elif kind in ("sample", "eval_sample"):
            who, key = event["producer"], (event["token"], event["i"])
            have[event["g"]].add(event["i"])
            if key in waiting[who]:
                waiting[who].remove(key)
            start = live[who].pop(key, None)
            if start is not None and t > start:
                found.append(Decoded(who, start, t, int(event["length"])))
            seat(who, t)
        elif kind in ("lost", "cancel", "eval_lost"):
            token = event["token"]
            for who in list(live):
                live[who] = {key: start for key, start in live[who].items() if key[0] != token}
                waiting[who] = deque(key for key in waiting[who] if key[0] != token)
                seat(who, t)
    return found


def live_curves(samples: Sequence[Decoded]) -> dict[str, Curve]:
    """Number of samples that each producer decoded over time."""
    changes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        changes[sample.producer] += [(sample.start, 1.0), (sample.end, -1.0)]
    return {producer: Curve(some) for producer, some in changes.items()}


class Work:
    """Core-seconds that a process got in an interval, if `cores` are shared (0: not shared)."""

    def __init__(self, config: Config, live: dict[str, Curve], lines: Sequence[Event], *, cores: float) -> None:
        self._pace: Curve | None = None
        if not cores:
            return
        changes: list[tuple[float, float]] = []
        for curve in live.values():
            busy = False
            for t, number in curve.steps():
                if (number > 0.5) != busy:
                    busy = not busy
                    changes.append((t, config.producers.torch_threads * (1.0 if busy else -1.0)))
        for line in lines:
            start, end = training_interval(line)
            threads = float(config.learner.torch_threads * config.learner.ranks)
            changes += [(start, threads), (end, -threads)]
        if not changes:
            return
        demand = Curve([(min(t for t, _ in changes), OTHER_DEMAND), *changes])
        paces = [(t, min(1.0, cores / max(value, 1e-9))) for t, value in demand.steps()]
        before = [0.0, *(pace for _, pace in paces)]
        self._pace = Curve([(t, pace - last) for (t, pace), last in zip(paces, before, strict=False)])

    def work_between(self, start: float, end: float) -> float:
        return end - start if self._pace is None else self._pace.integral_until(end) - self._pace.integral_until(start)


def training_interval(line: Event) -> tuple[float, float]:
    """Interval in which the learner worked on the batch of a step."""
    end = float(line["t"]) - float(line.get("commit_s", 0.0))
    parts = ("fetch_s", "assemble_s", "proximal_s", "train_s", "publish_s")
    return end - sum(float(line.get(name, 0.0)) for name in parts), end


# ---------------------------------------------------------------- fits


def fit_line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Least squares of `y = a + b * x` with a, b >= 0, without outliers.

    >>> fitted([1, 2, 3, 4], [3, 5, 7, 9], [1, 1, 1, 1])
    (1.0, 2.0)
    """
    xs, ys, ws = (np.asarray(values, dtype=float) for values in (x, y, weights))
    a = b = 0.0
    for _ in range(3):
        root = np.sqrt(ws)
        if np.ptp(xs) > 1e-9:
            design = np.stack([np.ones_like(xs), xs], axis=1) * root[:, None]
            a, b = (float(value) for value in np.linalg.lstsq(design, ys * root, rcond=None)[0])
        if np.ptp(xs) <= 1e-9 or b < 0:
            a, b = float(np.average(ys, weights=ws)), 0.0
        elif a < 0:
            a, b = 0.0, float(np.sum(ws * xs * ys) / max(1e-12, np.sum(ws * xs * xs)))
        gap = np.abs(ys - (a + b * xs))
        kept = gap <= 4 * max(float(np.median(gap)), 1e-12)
        if kept.all() or kept.sum() < 4:
            break
        xs, ys, ws = xs[kept], ys[kept], ws[kept]
    return round(a, 9), round(b, 9)


def measure(run: RunDir, *, cores: float | None = None) -> tuple[Plant, Observed, Config]:
    """The plant of a run, its behaviour, and its configuration. `cores`: shared ones; None: by its devices.

    Raises:
        ConfigError: `plan.numbers` if it has too few steps.
    """
    config = load(run.require().config)
    lines = unique_steps(read_lines(run.metrics / "learner.jsonl"))
    if len(lines) < LEAST_STEPS:
        what = f"it has {len(lines)} steps, at least {LEAST_STEPS} are needed"
        raise ConfigError("plan.numbers", what, where=str(run.root))
    shared = shared_cores(config) if cores is None else cores
    events = list(history_events(run))
    samples = decoded_samples(
        events, slots=config.producers.slots, asked=config.sampling.asked_samples, evaluated=config.evaluation.samples
    )
    if not samples:
        raise ConfigError("plan.numbers", "its history names no samples", where=str(run.history))
    live = live_curves(samples)
    work = Work(config, live, lines, cores=shared)
    per_token = [work.work_between(sample.start, sample.end) / sample.length for sample in samples if sample.length]
    concurrent = [live[sample.producer].mean(sample.start, sample.end) for sample in samples if sample.length]
    decode_s, decode_sample_s = fit_line(concurrent, per_token, [sample.length for sample in samples if sample.length])
    spent = [_train_work(line, work) for line in lines]
    tokens = [float(line["tokens"]) for line in lines]
    train_s, train_token_s = fit_line(tokens[1:], spent[1:], [1.0] * (len(lines) - 1))
    noise = [a / max(1e-9, train_s + train_token_s * b) for a, b in zip(spent[1:], tokens[1:], strict=True)]
    rounds = [float(line["round_s"]) for line in read_lines(run.metrics / "weightsync.jsonl") if "round_s" in line]
    plant = Plant(
        decode_s=decode_s,
        decode_sample_s=decode_sample_s,
        train_s=train_s,
        train_token_s=train_token_s,
        lengths=group_lengths(events),
        train_noise=tuple(round(min(4.0, value), 4) for value in noise),
        reward_s=_role_mean(run, "reward", "reward_call_s"),
        swap_s=_role_mean(run, "producer", "swap_s"),
        fetch_s=_mean(lines, "fetch_s") + _mean(lines, "assemble_s"),
        publish_s=_mean(lines, "publish_s"),
        commit_s=_mean(lines, "commit_s"),
        checkpoint_s=_mean([x for x in lines if x.get("checkpoint_s")], "checkpoint_s"),
        sync_s=tuple(rounds[1:] or rounds) or (0.05,),
        cores=shared,
        other_demand=OTHER_DEMAND if shared else 0.0,
        producer_threads=config.producers.torch_threads,
        learner_threads=config.learner.torch_threads * config.learner.ranks,
        group_bytes=_group_bytes(run, events),
        members=max(1, len(live)),
    )
    return plant, measure_rates(lines), config


def unique_steps(lines: Iterable[Event]) -> list[Event]:
    """The last line of every step, in order; without recorded batches of a restart."""
    found = {int(line["step"]): line for line in lines if "step" in line and not line.get("replayed")}
    return [found[step] for step in sorted(found)]


def measure_rates(lines: Sequence[Event]) -> Observed:
    """Rates after the first steps, during which the pipeline fills."""
    skipped = min(SKIPPED, len(lines) // 3)
    counted = lines[skipped:]
    since = float(lines[skipped - 1]["t"]) if skipped else float(lines[0]["t"]) - float(lines[0]["step_s"])
    span = max(1e-9, float(lines[-1]["t"]) - since)
    groups = sum(float(line["groups"]) for line in counted)
    return Observed(
        steps=len(lines),
        steps_s=len(counted) / span,
        tokens_s=sum(float(line["tokens"]) for line in counted) / span,
        lag_mean=sum(float(line["lag_mean"]) * float(line["groups"]) for line in counted) / max(1.0, groups),
        learner_wait_share=sum(float(line["wait_s"]) for line in counted) / span,
    )


def shared_cores(config: Config) -> float:
    """Cores of this machine if roles compute on its CPU; 0 if each has an accelerator, or runs on another host."""
    if config.cluster.producers > 1 or config.cluster.learner_hosts > 1:
        return 0.0
    seen = any(device_nodes().values())
    devices = (config.producers.device, config.learner.device)
    on_cpu = any(device == "cpu" or (device == "auto" and not seen) for device in devices)
    return float(os.cpu_count() or 1) if on_cpu and config.producers.engine == "hf" else 0.0


def group_lengths(events: Iterable[Event]) -> tuple[tuple[int, ...], ...]:
    """Response tokens of the samples of each group, by group."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for event in events:
        if event.get("e") == "sample":
            found[event["g"]][event["i"]] = int(event["length"])
    most = max((len(row) for row in found.values()), default=0)
    return tuple(tuple(found[group].values()) for group in sorted(found) if len(found[group]) == most)


def _train_work(line: Event, work: Work) -> float:
    end = float(line["t"]) - float(line.get("commit_s", 0.0)) - float(line.get("publish_s", 0.0))
    return work.work_between(end - float(line.get("train_s", 0.0)) - float(line.get("proximal_s", 0.0)), end)


def _mean(lines: Sequence[Event], name: str) -> float:
    values = [float(line[name]) for line in lines if name in line]
    return statistics.fmean(values) if values else 0.0


def _role_mean(run: RunDir, role: str, name: str) -> float:
    values: list[Any] = [line.get(name) for line in read_lines(run.metrics / "roles.jsonl") if line.get("role") == role]
    numbers = [float(value) for value in values if value]
    return statistics.median(numbers) if numbers else 0.0


def _group_bytes(run: RunDir, events: Sequence[Event]) -> float:
    bytes_in = max((float(line.get("ingest_bytes", 0)) for line in read_lines(run.metrics / "buffer.jsonl")), default=0)
    complete = sum(event.get("e") == "unscored" for event in events)
    return bytes_in / complete if complete else 0.0
