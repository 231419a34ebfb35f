"""Chooses settings to play, reduces large systems to small ones that behave alike, and derives suggestions.

Guarantees:
1. `reduced` keeps the values that determine throughput and lag: time per step, samples per slot, depth; groups,
   producers and the learner's tokens are divided by one number, and `restored` multiplies the rates by it;
2. a suggestion has the fewest producers, then the smallest depth, with `ENOUGH` of the best result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from asyncrl.config import Config
from asyncrl.config.sections.producers import devices_each
from asyncrl.planner.model import Forecast, Plant, Scenario

ENOUGH = 0.97
MOST_SAMPLES = 5_000  # of one forecast; larger ones are reduced
MOST_ENGINES = 16  # producers that are simulated one by one; beyond, one stands for several
LEAST_GROUPS = 8
MOST_STEPS = 40
#: Capacity of one buffer: benchmarks/results/buffer.json, SQLite, `bench_buffer.py --repeats 5 --groups 6400`.
BUFFER_GROUPS_S = 1493.0
BUFFER_GROUP_BYTES = 92_384.0
BUFFER_USE = 0.7  # largest planned share of it
#: Shares of the devices for the learner.
SPLITS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
Play = Callable[[Plant, Sequence[Scenario]], list[Forecast]]


def build_scenario(config: Config, *, steps: int = 0, name: str = "") -> Scenario:
    """The settings of a configuration."""
    buffer, sampling = config.buffer, config.sampling
    blocking = config.learner.checkpoint_every if not config.learner.checkpoint_async else 0
    return Scenario(
        name=name,
        steps=steps or min(config.learner.steps, MOST_STEPS),
        producers=config.producers.count * config.cluster.producers,
        slots=config.producers.slots,
        group_size=sampling.group_samples,
        asked_samples=sampling.asked_samples,
        batch_groups=buffer.batch_groups,
        max_staleness=buffer.max_staleness,
        depth=buffer.depth,
        auto_depth=buffer.pipeline_depth == "auto",
        learner_idle_target=buffer.learner_idle_target,
        on_late=buffer.on_late,
        late_timeout_s=buffer.late_timeout_s,
        max_reuse=buffer.max_reuse,
        max_groups_in_flight=config.producers.max_groups_in_flight,
        reward_workers=config.reward_workers.count,
        reward_batch=config.reward_workers.batch_samples,
        checkpoint_every=blocking,
    )


# ---------------------------------------------------------------- small stands for large


def reduce_scenario(scenario: Scenario, *, most_samples: int = MOST_SAMPLES) -> tuple[Scenario, float]:
    """A scenario of a size that is played in a second, and the factor for its rates."""
    samples = scenario.steps * scenario.batch_groups * scenario.asked_samples
    groups = max(min(LEAST_GROUPS, scenario.batch_groups), scenario.batch_groups * most_samples // max(1, samples))
    groups = min(groups, scenario.batch_groups)
    factor = scenario.batch_groups / groups
    engines = scenario.producers * scenario.engines / factor
    played = max(1, min(MOST_ENGINES, round(engines)))
    small = msgspec.structs.replace(
        scenario,
        batch_groups=groups,
        producers=played,
        engines=engines / played,
        learner_speed=scenario.learner_speed / factor,
        reward_workers=max(1, round(scenario.reward_workers / factor)),
    )
    return small, factor


def restore_rates(forecast: Forecast, factor: float) -> Forecast:
    """The forecast of the original scenario."""
    return msgspec.structs.replace(
        forecast,
        tokens_s=forecast.tokens_s * factor,
        groups_s=forecast.groups_s * factor,
        dropped=round(forecast.dropped * factor),
    )


def play_all(plant: Plant, scenarios: Sequence[Scenario], play: Play) -> list[Forecast]:
    """Forecasts of scenarios of any size. With shared cores nothing is reduced: engines are few, and compete."""
    small = [reduce_scenario(one) if not plant.cores else (one, 1.0) for one in scenarios]
    found = play(plant, [one for one, _ in small])
    return [restore_rates(forecast, factor) for forecast, (_, factor) in zip(found, small, strict=True)]


# ---------------------------------------------------------------- what to play


class Choice(NamedTuple):
    """A point of the search."""

    producers: int
    depth: int
    quota: int  # producers.max_groups_in_flight; 0: the capacity of an engine
    forecast: Forecast


def choices(scenario: Scenario, *, each: int = 1) -> list[Scenario]:
    """Numbers of producers around the configured one, depths within the bound, and evenly spread quotas: without one
    each producer may hold its share of the work in flight, more than its engine decodes at once. `each`: producers of
    one job; jobs are whole.
    """
    jobs = scenario.producers // each
    some = {1, 2, 3, 4, jobs, *(round(jobs * by) for by in (0.5, 1.5, 2))}
    producers = sorted(number * each for number in some if number > 0)
    depths = sorted({0, 1, 2, scenario.max_staleness // 2, scenario.max_staleness})
    found = []
    for number in producers:
        for depth in [depth for depth in depths if depth <= scenario.max_staleness]:
            held = -(-2 * scenario.slots // scenario.asked_samples)
            even = -(-(depth + 1) * scenario.batch_groups // number)
            quotas = [scenario.max_groups_in_flight]
            if number > 1 and not scenario.max_groups_in_flight and even < held:
                quotas.append(even)
            found += [
                msgspec.structs.replace(
                    scenario, producers=number, depth=depth, auto_depth=False, max_groups_in_flight=quota
                )
                for quota in quotas
            ]
    return found


def suggestion(found: Sequence[Choice]) -> tuple[Choice, Choice]:
    """The cheapest choice that is good enough, and the best."""
    best = max(found, key=lambda choice: choice.forecast.steps_s)
    enough = [choice for choice in found if choice.forecast.steps_s >= ENOUGH * best.forecast.steps_s]
    return min(enough, key=lambda choice: (choice.producers, choice.depth, choice.quota)), best


# ---------------------------------------------------------------- devices


class Split(NamedTuple):
    """A division of devices."""

    devices: int
    learner: int
    producers: int
    scenario: Scenario


def devices_per_producer(config: Config) -> int:
    """Devices of one engine, by its own setting."""
    args = config.producers.engine_args
    if config.producers.engine == "vllm":
        return devices_each("vllm", args)
    return int(args.get("tensor_parallel_size") or args.get("tp_size") or 1)


def splits(config: Config, plant: Plant, *, devices: int, scale_batch: bool) -> list[Split]:
    """Ways to divide the devices. The batch grows with them, so that a rank's share stays as measured. Both sides share
    a single device; none, where an engine of several leaves the learner without one.
    """
    base, each = build_scenario(config), devices_per_producer(config)
    if each > 1 and devices <= each:
        return []
    ranks = config.learner.ranks * config.cluster.learner_hosts
    now = ranks + base.producers * each
    groups = max(1, round(base.batch_groups * devices / now)) if scale_batch else base.batch_groups
    found: dict[int, Split] = {}
    for share in SPLITS:
        learner = min(max(1, round(devices * share)), max(1, devices - each))
        producers = max(1, (devices - learner) // each)
        scenario = msgspec.structs.replace(
            base,
            producers=producers,
            batch_groups=groups,
            learner_speed=learner / ranks,
            sync_factor=levels(producers, config.weightsync.relay_fanout)
            / levels(plant.members, config.weightsync.relay_fanout),
            reward_workers=max(base.reward_workers, round(base.reward_workers * groups / base.batch_groups)),
            name=f"{devices}: {learner} + {producers}",
        )
        found[learner] = Split(devices, learner, producers, scenario)
    return list(found.values())


def levels(members: int, fanout: int) -> float:
    """Hops of weights from the learner to the last of `members`: each relays to `fanout` others; with 0 the source
    serves all.

    >>> levels(1, 2), levels(2, 2), levels(6, 2), levels(1000, 2)
    (1.0, 1.0, 2.0, 9.0)
    """
    if not fanout:
        return float(members)
    if fanout == 1:
        return float(members)
    reached, level = fanout, 1
    while reached < members:
        level += 1
        reached += fanout**level
    return float(level)


def buffers_for(groups_s: float, group_bytes: float) -> int:
    """Buffers needed for this many groups, by number and by bytes, each used up to `BUFFER_USE`.

    >>> buffers_for(100, 10_000), buffers_for(5000, 92_384), buffers_for(1000, 1_000_000)
    (1, 5, 11)
    """
    by_bytes = groups_s * group_bytes / (BUFFER_GROUPS_S * BUFFER_GROUP_BYTES)
    return max(1, math.ceil(max(groups_s / BUFFER_GROUPS_S, by_bytes) / BUFFER_USE))
