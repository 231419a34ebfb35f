"""`asyncrl plan`: forecasts speed and staleness of settings before anything starts.

The plant comes from a run's logs (`--from`), from `--assume`, or both; a separate process, `buffers.simulation`, plays
scenarios. Guarantees:
1. with `--from` the run itself is forecast first, and the difference from its real behaviour is printed;
2. everything that was not measured is named;
3. nothing is started and nothing is written but the answer.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config, load
from asyncrl.config.sections.producers import devices_each
from asyncrl.errors import EXIT_CONFIG, UNREADABLE, AsyncRLError, ConfigError
from asyncrl.planner.measure import Observed, measure, shared_cores
from asyncrl.planner.model import Forecast, Plant, Request, Scenario, tokens_per_s
from asyncrl.planner.search import (
    BUFFER_GROUP_BYTES,
    BUFFER_GROUPS_S,
    Choice,
    Split,
    buffers_for,
    build_scenario,
    choices,
    devices_per_producer,
    play_all,
    splits,
    suggestion,
)
from asyncrl.planner.weight_seconds import sync_seconds, weight_bytes
from asyncrl.process_plan.interpreters import python_path
from asyncrl.runtime.model_folder import model_json
from asyncrl.runtime.run_dir import RunDir, format_json

PLAY_TIMEOUT_S = 900.0
DRAWN_GROUPS = 512
#: Numbers of `--assume` that are not fields of a plant.
LENGTHS = ("length_mean", "length_cv", "engine_tokens_s")
NEEDED = ("decode_sample_s or engine_tokens_s", "train_token_s", "length_mean")


class Options(msgspec.Struct, frozen=True):
    config: Path | tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    run: Path | None = None
    assume: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    steps: int = 0
    cores: float | None = None
    scale_batch: bool = True
    as_json: bool = False


class Planned(msgspec.Struct):
    """Content of the plan."""

    plant: Plant
    scenario: Scenario
    forecast: Forecast
    checked: tuple[Observed, Forecast] | None
    found: list[Choice]
    devices: list[tuple[Split, Forecast]]
    notes: list[str]
    each: int = 0  # producers of a job, where several jobs are rendered


def play(plant: Plant, scenarios: Sequence[Scenario]) -> list[Forecast]:
    """Forecasts of these scenarios, from the process with the state machine."""
    request = msgspec.json.encode(Request(plant, tuple(scenarios)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path())}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "buffers.simulation.main"],
            input=request,
            env=env,
            capture_output=True,
            timeout=PLAY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AsyncRLError("internal", f"no forecast within {PLAY_TIMEOUT_S:g} s", where="plan") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        code = "plan.stuck" if done.returncode == EXIT_CONFIG else "internal"
        raise AsyncRLError(code, words[-1] if words else f"exit code {done.returncode}", where="plan")
    try:
        return msgspec.json.decode(done.stdout, type=list[Forecast])
    except UNREADABLE as error:
        raise AsyncRLError("internal", f"the forecast cannot be read: {error}", where="plan") from None


def plan_command(options: Options) -> int:
    """Print the plan; 0."""
    planned = plan_for(options)
    if options.as_json:
        print(format_json(plan_tree(planned)))
    else:
        print("\n".join(format_plan(planned)))
    return 0


def plan_for(options: Options) -> Planned:
    config = load(options.config, options.overrides)
    plant, checked, notes = _plant(config, options)
    scenario = build_scenario(config, steps=options.steps, name="config")
    each = config.producers.count if config.cluster.producers > 1 else 0
    around = choices(scenario, each=each or 1)
    ways: list[Split] = []
    for number in options.devices:
        some = splits(config, plant, devices=number, scale_batch=options.scale_batch)
        if not some:
            needed = devices_per_producer(config)
            notes.append(f"{number} devices: too few for an engine of {needed} (producers.engine_args) and a learner")
        ways += some
    [forecast, *rest] = play_all(plant, [scenario, *around], play)
    found = [
        Choice(one.producers, one.depth, one.max_groups_in_flight, got) for one, got in zip(around, rest, strict=True)
    ]
    devices = _devices(plant, ways)
    if config.buffer.filters:
        notes.append("groups that buffer.filters drops are not played: they cost generation beyond this")
    if config.evaluation.enabled:
        notes.append("evaluations are not played: they cost generation beyond this")
    notes += _weight_notes(config)
    return Planned(plant, scenario, forecast, checked, found, devices, notes, each)


def _weight_notes(config: Config) -> Iterator[str]:
    """What the weights take by the speeds of common links, which a forecast from logs does not know."""
    sent = config.weightsync.dtype
    if nbytes := weight_bytes(model_json(config.model.path), config.model.dtype if sent == "auto" else sent):
        workers = max(1, devices_each(config.producers.engine, config.producers.engine_args))
        one = sync_seconds(nbytes, workers=workers)
        yield (
            f"weights of {nbytes / 1e9:.3g} GB, computed for PCIe 5.0 and one port of 400 Gbit/s: the learner copies "
            f"them in {one.blocked:.2g} s, an engine commits in {one.commit:.2g} s"
            + ("" if config.weightsync.quantised else f", or gets them direct in {one.direct:.2g} s")
        )


def _devices(plant: Plant, ways: Sequence[Split]) -> list[tuple[Split, Forecast]]:
    """The best split of each number of devices. Both sides share a single device."""
    if not ways:
        return []
    alone = [way for way in ways if way.devices == 1]
    several = [way for way in ways if way.devices > 1]
    one = msgspec.structs.replace(plant, cores=1.0, other_demand=0.0, producer_threads=1, learner_threads=1)
    many = msgspec.structs.replace(plant, cores=0.0)
    got: list[tuple[Split, Forecast]] = []
    for machines, some in ((one, alone), (many, several)):
        if some:
            got += zip(some, play_all(machines, [way.scenario for way in some], play), strict=True)
    best: dict[int, tuple[Split, Forecast]] = {}
    for way, forecast in got:
        if way.devices not in best or forecast.tokens_s > 1.005 * best[way.devices][1].tokens_s:
            best[way.devices] = (way, forecast)
    return [best[number] for number in sorted(best)]


# ---------------------------------------------------------------- the plant


def _plant(config: Config, options: Options) -> tuple[Plant, tuple[Observed, Forecast] | None, list[str]]:
    given = dict(_list_assumptions(options.assume))
    if options.run is None:
        return _given_plant(config, given, options.cores), None, ["nothing was measured: every number is assumed"]
    plant, did, of_run = measure(RunDir(options.run), cores=options.cores)
    itself = build_scenario(of_run, steps=did.steps, name="the run itself")
    if of_run.cluster.producers > 1:  # `launch all` starts one job's alone
        itself = msgspec.structs.replace(itself, producers=plant.members)
    checked = (did, play(plant, [itself])[0])
    notes = [f"assumed: {', '.join(options.assume)}"] if given else []
    longest = max((length for row in plant.lengths for length in row), default=0)
    if config.sampling.max_new_tokens < longest:
        limit = config.sampling.max_new_tokens
        plant = msgspec.structs.replace(
            plant, lengths=tuple(tuple(min(n, limit) for n in row) for row in plant.lengths)
        )
        notes.append(f"measured responses are cut at sampling.max_new_tokens = {limit}")
    return _override(plant, given, config), checked, notes


def _list_assumptions(words: Sequence[str]) -> Iterator[tuple[str, float]]:
    known = [item.name for item in msgspec.structs.fields(Plant) if item.type in (int, float)] + list(LENGTHS)
    for word in words:
        key, _, text = word.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if key not in known:
            raise ConfigError("usage", f"{key!r} is none of {', '.join(known)}", where="--assume")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError("usage", f"{word!r}: a number of at least 0 is needed", where="--assume")
        yield key, value


def _given_plant(config: Config, given: Mapping[str, float], cores: float | None) -> Plant:
    missing = [name for name in NEEDED if not any(word in given for word in name.split(" or "))]
    if missing:
        raise ConfigError("plan.numbers", f"without --from these must be assumed: {', '.join(missing)}", where="plan")
    shared = shared_cores(config) if cores is None else cores
    return _override(Plant(0.0, 0.0, 0.0, 0.0, ((1,),), cores=shared), given, config)


def _override(plant: Plant, given: Mapping[str, float], config: Config) -> Plant:
    """The plant with assumed values."""
    kinds = {item.name: item.type for item in msgspec.structs.fields(Plant)}
    changes: dict[str, Any] = {name: kinds[name](value) for name, value in given.items() if name not in LENGTHS}
    if "length_mean" in given:
        changes["lengths"] = drawn_lengths(
            given["length_mean"],
            given.get("length_cv", 0.5),
            limit=config.sampling.max_new_tokens,
            samples=config.sampling.asked_samples,
        )
    if "engine_tokens_s" in given:
        changes.setdefault("decode_sample_s", 1.0 / max(1e-9, given["engine_tokens_s"]))
        changes.setdefault("decode_s", 0.0)
    return msgspec.structs.replace(plant, **changes)


def drawn_lengths(mean: float, spread: float, *, limit: int, samples: int) -> tuple[tuple[int, ...], ...]:
    """Lengths of a log-normal distribution with this mean and standard deviation mean, truncated at the limit."""
    rng, sigma = random.Random(0), math.sqrt(math.log(1 + spread * spread))
    mu = math.log(max(1.0, mean)) - sigma * sigma / 2
    return tuple(
        tuple(max(1, min(limit, round(rng.lognormvariate(mu, sigma)))) for _ in range(samples))
        for _ in range(DRAWN_GROUPS)
    )


# ---------------------------------------------------------------- the words


def plan_tree(planned: Planned) -> dict[str, Any]:
    """The plan as JSON, without the lengths of all samples."""
    cheap, best = suggestion(planned.found)
    plant = msgspec.to_builtins(planned.plant)
    lengths = [length for row in planned.plant.lengths for length in row]
    plant |= {"lengths": {"samples": len(lengths), "mean": sum(lengths) / max(1, len(lengths)), "max": max(lengths)}}
    return {
        "plant": plant,
        "scenario": msgspec.to_builtins(planned.scenario),
        "forecast": msgspec.to_builtins(planned.forecast),
        "check": None
        if planned.checked is None
        else {
            "run": planned.checked[0]._asdict(),
            "forecast": msgspec.to_builtins(planned.checked[1]),
        },
        "buffers": buffers_for(planned.forecast.groups_s, planned.plant.group_bytes),
        "search": [
            {
                "producers": one.producers,
                "depth": one.depth,
                "max_groups_in_flight": one.quota,
                "forecast": msgspec.to_builtins(one.forecast),
            }
            for one in planned.found
        ],
        "suggested": {
            "producers": cheap.producers,
            "depth": cheap.depth,
            "max_groups_in_flight": cheap.quota,
            "of_best": cheap.forecast.steps_s / best.forecast.steps_s,
        },
        "devices": [
            {
                "devices": way.devices,
                "learner": way.learner,
                "producers": way.producers,
                "batch_groups": way.scenario.batch_groups,
                "forecast": msgspec.to_builtins(got),
                "buffers": buffers_for(got.groups_s, planned.plant.group_bytes),
            }
            for way, got in planned.devices
        ],
        "notes": planned.notes,
    }


def format_plan(planned: Planned) -> Iterator[str]:
    """The lines of the plan."""
    yield from _plant_lines(planned)
    got, scenario = planned.forecast, planned.scenario
    depth = "auto" if scenario.auto_depth else scenario.depth
    yield (
        f"settings  {scenario.producers} producers, depth {depth}, {scenario.batch_groups} groups of "
        f"{scenario.group_size}, bound {scenario.max_staleness}"
    )
    yield f"forecast  {rates(got)}"
    shares = ", ".join(f"{lag}: {share:.0%}" for lag, share in got.lags.items() if share >= 0.005)
    yield f"lag       mean {got.lag_mean:.2f} ({shares})" + (f"; {got.dropped} groups late" if got.dropped else "")
    yield f"buffer    {_buffer(got, planned.plant)}"
    yield ""
    yield "  producers depth   quota   steps/s   tokens/s   lag learner waits  idle"
    for one in planned.found:
        f = one.forecast
        yield (
            f"  {one.producers:>9} {one.depth:>5} {one.quota or '-':>7} {f.steps_s:>9.3g} {f.tokens_s:>10,.0f} "
            f"{f.lag_mean:>5.2f} {f.learner_wait_share:>13.0%} {f.producer_idle_share:>5.0%}"
        )
    cheap, best = suggestion(planned.found)
    yield ""
    share = cheap.forecast.steps_s / best.forecast.steps_s
    top = f"{_many(best.producers, 'producer')}, depth {best.depth}: {best.forecast.steps_s:.3g} steps/s"
    yield (
        f"suggested {_many(cheap.producers, 'producer')} and depth {cheap.depth} give {share:.0%} of the best "
        f"({top}) at a mean lag of {cheap.forecast.lag_mean:.2f}"
    )
    quota = f" --set producers.max_groups_in_flight={cheap.quota}" if cheap.quota else ""
    size = (
        f"cluster.producers={cheap.producers // planned.each}" if planned.each else f"producers.count={cheap.producers}"
    )
    yield f"          --set {size} --set buffer.pipeline_depth={cheap.depth}{quota}"
    yield from _device_lines(planned)
    yield from (f"note: {note}" for note in planned.notes)


def rates(got: Forecast) -> str:
    """`0.83 steps/s, 2,967 tokens/s; the learner waits 1 %, producers are idle 50 %`."""
    return (
        f"{got.steps_s:.3g} steps/s, {got.tokens_s:,.0f} tokens/s; the learner waits "
        f"{got.learner_wait_share:.0%} of the time, producers are idle {got.producer_idle_share:.0%}"
    )


def _plant_lines(planned: Planned) -> Iterator[str]:
    plant, slots = planned.plant, planned.scenario.slots
    shared = f" on {plant.cores:g} shared cores" if plant.cores else ""
    each, more = 1000 * plant.decode_s, 1000 * plant.decode_sample_s
    yield (
        f"engine    a decode step takes {each:.3g} ms + {more:.3g} ms per sample: "
        f"{tokens_per_s(plant, slots):,.0f} tokens/s with {slots}{shared}"
    )
    yield (
        f"learner   {plant.train_s:.3g} s + {1e6 * plant.train_token_s:.3g} s per million tokens; weights are there "
        f"{sum(plant.sync_s) / len(plant.sync_s):.3g} s after a publish"
    )
    if planned.checked is not None:
        did, got = planned.checked
        yield (
            f"check     the run itself: {got.steps_s:.3g} steps/s (it made {did.steps_s:.3g}, "
            f"{got.steps_s / did.steps_s - 1:+.0%}), mean lag {got.lag_mean:.2f} ({did.lag_mean:.2f}), the learner "
            f"waits {got.learner_wait_share:.0%} ({did.learner_wait_share:.0%})"
        )


def _buffer(got: Forecast, plant: Plant) -> str:
    count = buffers_for(got.groups_s, plant.group_bytes)
    size = f" of {plant.group_bytes / 1000:,.3g} kB ({got.groups_s * plant.group_bytes / 1e6:,.3g} MB/s)"
    needed = "one buffer is enough" if count == 1 else f"{count} buffers are needed"
    return (
        f"{got.groups_s:,.3g} groups/s{size if plant.group_bytes else ''}: {needed} (one took "
        f"{BUFFER_GROUPS_S:,.0f}/s of {BUFFER_GROUP_BYTES / 1000:.0f} kB: results/buffer.json)"
    )


def _device_lines(planned: Planned) -> Iterator[str]:
    if not planned.devices:
        return
    yield ""
    yield (
        f"  {'devices':>8} {'learner':>8} {'producers':>9} {'groups':>8} {'steps/s':>9} {'tokens/s':>12} {'lag':>5} "
        f"{'learner waits':>13} {'idle':>5} {'groups/s':>9} {'MB/s':>8} {'buffers':>7}"
    )
    for way, got in planned.devices:
        mb = got.groups_s * planned.plant.group_bytes / 1e6
        yield (
            f"  {way.devices:>8,} {way.learner:>8,} {way.producers:>9,} {way.scenario.batch_groups:>8,} "
            f"{got.steps_s:>9.3g} {got.tokens_s:>12,.0f} {got.lag_mean:>5.2f} {got.learner_wait_share:>13.0%} "
            f"{got.producer_idle_share:>5.0%} {got.groups_s:>9,.3g} {mb:>8,.3g} "
            f"{buffers_for(got.groups_s, planned.plant.group_bytes):>7}"
        )


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
