"""The planner's simulation: what can be computed by hand, the bound on staleness, large systems in small."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import msgspec
import pytest

from asyncrl.planner.model import Forecast, Plant, Request, Scenario, tokens_per_s
from asyncrl.planner.search import (
    BUFFER_GROUP_BYTES,
    BUFFER_GROUPS_S,
    ENOUGH,
    Choice,
    choices,
    play_all,
    reduce_scenario,
    restore_rates,
    suggestion,
)
from buffers.groups.fair_share import FairShare
from buffers.groups.group_table import ledger_counts
from buffers.groups.records import State
from buffers.simulation.clock import Clock
from buffers.simulation.simulation import Simulation, play

ROOT = Path(__file__).parents[2]
EVEN = ((50,) * 8,) * 100  # every response has 50 tokens
SWIFT = Plant(0.001, 0.0, 0.01, 0.0, EVEN, sync_s=(0.001,), request_s=0.0001)


def test_work_shares_cores_and_waiting_does_not() -> None:
    clock, seen = Clock(cores=2.0), list[tuple[str, float]]()
    clock.ask(3.0)  # three that want a core each, of two
    clock.schedule_work(1.0, lambda: seen.append(("work", round(clock.now, 6))))
    clock.schedule(1.2, lambda: seen.append(("wait", round(clock.now, 6))))
    while clock.step():
        pass
    assert seen == [("wait", 1.2), ("work", 1.5)]
    clock.ask(-1.0)
    clock.schedule_work(1.0, lambda: seen.append(("alone", round(clock.now, 6))))
    assert clock.step() and not clock.step() and seen[-1] == ("alone", 2.5)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """One engine that holds a whole batch: 50 decode steps of 16 * 8 samples, the training, the way of the weights."""
    plant = Plant(0.01, 0.001, 2.0, 0.001, EVEN, sync_s=(0.5,), publish_s=0.25, fetch_s=0.125, commit_s=0.0625)
    got = play(plant, Scenario(slots=128, max_staleness=0, depth=0))
    step_s = 50 * (0.01 + 0.001 * 128) + 0.125 + (2.0 + 0.001 * 16 * 8 * 50) + 0.25 + 0.5
    assert got.lags == {0: 1.0} and got.lag_mean == 0.0
    assert 1 / got.steps_s == pytest.approx(step_s, rel=0.02)  # a few messages on the way
    assert got.learner_wait_share == pytest.approx(1 - (0.125 + 8.4 + 0.25 + 0.0625) / step_s, abs=0.02)
    assert got.producer_idle_share == pytest.approx(1 - 50 * 0.138 / step_s, abs=0.03)


def test_a_slow_learner_never_waits_and_a_slow_engine_never_idles() -> None:
    slow_learner = msgspec.structs.replace(SWIFT, train_s=5.0)
    got = play(slow_learner, Scenario(max_staleness=2, depth=2))
    assert got.steps_s == pytest.approx(0.2, rel=0.01) and got.learner_wait_share < 0.01
    slow_engine = msgspec.structs.replace(SWIFT, decode_sample_s=0.001)
    got = play(slow_engine, Scenario(max_staleness=2, depth=2))
    assert got.tokens_s == pytest.approx(tokens_per_s(slow_engine, 64), rel=0.06) and got.producer_idle_share < 0.05
    two = play(slow_engine, Scenario(max_staleness=2, depth=2, producers=2))
    assert two.steps_s == pytest.approx(2 * got.steps_s, rel=0.15)


def test_answers_that_take_an_hour_are_no_standstill() -> None:
    """An engine asks every quarter of a second meanwhile, far more often than samples end."""
    slow = msgspec.structs.replace(SWIFT, decode_s=60.0)
    got = play(slow, Scenario(max_staleness=2, depth=2, slots=8, batch_groups=1, steps=3, late_timeout_s=1e5))
    assert 1 / got.steps_s == pytest.approx(50 * 60.0, rel=0.01)


def test_deeper_is_faster_and_older() -> None:
    plant = msgspec.structs.replace(SWIFT, decode_sample_s=0.0002, train_s=1.2)
    found = [play(plant, Scenario(max_staleness=3, depth=depth, slots=256, steps=20)) for depth in range(4)]
    lags = [got.lag_mean for got in found]
    assert lags == sorted(lags) and lags[0] == 0 and lags[3] > 2
    assert found[1].steps_s > 1.2 * found[0].steps_s


def test_a_synchronous_batch_is_spread_over_the_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like with a quota of half of it each; without shares whoever asks first is given all, and the other idles."""
    plant = msgspec.structs.replace(SWIFT, decode_sample_s=0.001)
    shared = play(plant, Scenario(producers=2, max_staleness=0, depth=0))
    spread = play(plant, Scenario(producers=2, max_staleness=0, depth=0, max_groups_in_flight=8))
    monkeypatch.setattr(FairShare, "room", lambda *_: math.inf)
    greedy = play(plant, Scenario(producers=2, max_staleness=0, depth=0))
    assert min(shared.steps_s, spread.steps_s) > 1.5 * greedy.steps_s
    assert shared.steps_s > 0.97 * spread.steps_s
    assert greedy.producer_idle_share > 0.4 > shared.producer_idle_share + 0.2


def test_more_samples_than_needed_cut_the_tail() -> None:
    rng = random.Random(1)
    lengths = tuple(tuple(rng.choice((20, 20, 20, 400)) for _ in range(10)) for _ in range(99))
    plant = msgspec.structs.replace(SWIFT, lengths=lengths, decode_s=0.01)
    whole = play(plant, Scenario(max_staleness=0, depth=0, batch_groups=4, group_size=8, asked_samples=8))
    over = play(plant, Scenario(max_staleness=0, depth=0, batch_groups=4, group_size=6, asked_samples=10))
    assert over.steps_s > 1.2 * whole.steps_s


@pytest.mark.parametrize("seed", range(12))
def test_the_state_machine_holds_whatever_is_played(seed: int) -> None:
    """No lag above the bound, everything accounted for, and the same answer twice."""
    rng = random.Random(seed)
    eta = rng.randint(0, 4)
    size = rng.randint(1, 4)
    scenario = Scenario(
        steps=rng.randint(3, 12),
        producers=rng.randint(1, 4),
        slots=rng.choice((2, 8, 64)),
        group_size=size,
        asked_samples=size + rng.choice((0, 0, 2)),
        batch_groups=rng.randint(1, 9),
        max_staleness=eta,
        depth=rng.randint(0, eta),
        on_late=rng.choice(("wait", "wait", "drop")),
        late_timeout_s=20.0,
        auto_depth=rng.random() < 0.2,
        max_groups_in_flight=rng.choice((0, 0, 2)),
        reward_workers=rng.randint(1, 2),
        checkpoint_every=rng.choice((0, 3)),
        seed=seed,
    )
    lengths = tuple(tuple(rng.randint(1, 300) for _ in range(6)) for _ in range(50))
    plant = Plant(
        rng.uniform(0.001, 0.02),
        rng.uniform(0, 0.001),
        rng.uniform(0.01, 1),
        1e-5,
        lengths,
        swap_s=rng.choice((0, 0.3)),
        cores=rng.choice((0, 0, 2.0)),
        reward_s=rng.choice((0, 0.01)),
        checkpoint_s=0.5,
        train_noise=(0.5, 1.0, 1.5),
    )
    simulation = Simulation(plant, scenario)
    got = simulation.run()
    simulation.machine.check()
    assert got.steps == scenario.steps and all(0 <= lag <= eta for lag in got.lags)
    assert sum(got.lags.values()) == pytest.approx(1.0) and 0 <= got.producer_idle_share <= 1
    counts = ledger_counts(simulation.machine.table)
    assert counts["retired"] == scenario.steps * scenario.batch_groups and counts["dead"] == 0
    assert counts["dropped"] == got.dropped or simulation.machine.table.indexes.counts[State.LEASED] > 0
    assert simulation.clock.work <= simulation.clock.now + 1e-6
    assert Simulation(plant, scenario).run() == got


# ---------------------------------------------------------------- small for large


def test_a_large_system_behaves_as_the_small_one_that_stands_for_it() -> None:
    rng = random.Random(3)
    lengths = tuple(tuple(rng.randint(10, 90) for _ in range(8)) for _ in range(400))
    plant = Plant(0.01, 0.0005, 0.2, 0.00002, lengths)
    scenario = Scenario(producers=12, batch_groups=48, max_staleness=2, depth=2, steps=40, reward_workers=4)
    small, factor = reduce_scenario(scenario, most_samples=5120)
    assert factor > 2 and small.batch_groups * factor == 48
    assert small.producers * small.engines * factor == pytest.approx(12)
    whole, stood_for = play(plant, scenario), restore_rates(play(plant, small), factor)
    # The slowest of four engines is not as slow as that of twelve: the small one is too quick, by 14 to 16 %.
    assert whole.steps_s < stood_for.steps_s < 1.2 * whole.steps_s
    assert whole.tokens_s < stood_for.tokens_s < 1.2 * whole.tokens_s
    assert stood_for.lag_mean == pytest.approx(whole.lag_mean, abs=0.2)


def test_ten_thousand_devices_are_a_matter_of_seconds() -> None:
    lengths = tuple((1000, 2000, 3000, 4000, 500, 800, 900, 1500) for _ in range(50))
    scenario = Scenario(producers=8000, batch_groups=50_000, slots=256, steps=40, learner_speed=2000)
    started = time.monotonic()
    [got] = play_all(
        Plant(0.02, 0.0001, 1.0, 1e-5, lengths), [scenario], lambda p, some: [play(p, one) for one in some]
    )
    assert time.monotonic() - started < 120
    assert got.groups_s == pytest.approx(got.steps_s * 50_000, rel=1e-6) and got.tokens_s > 1e6


def test_the_cheapest_that_gives_enough_is_suggested() -> None:
    def made(producers: int, depth: int, steps_s: float) -> Choice:
        return Choice(producers, depth, 0, Forecast("", 1, 1.0, steps_s, 1, 1, 1.0, {1: 1.0}, 0.0, 0.0))

    found = [made(1, 2, 0.5), made(2, 1, 0.975), made(2, 2, 0.99), made(4, 2, 1.0)]
    cheap, best = suggestion(found)
    assert (cheap.producers, cheap.depth, best.producers) == (2, 1, 4) and ENOUGH < 0.975
    around = choices(Scenario(producers=4, max_staleness=2))
    assert {one.producers for one in around} >= {1, 2, 4, 8} and {one.depth for one in around} == {0, 1, 2}
    assert all(one.max_groups_in_flight in (0, math.ceil((one.depth + 1) * 16 / one.producers)) for one in around)


def test_what_one_buffer_takes_is_what_was_measured() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "buffer.json").read_text())
    measured = result["summary"]["sqlite:everysec"]["groups_s"]
    assert round(measured) == BUFFER_GROUPS_S and result["size"] == "typical"
    assert result["summary"]["zmq_direct"]["kb"] * 1000 == BUFFER_GROUP_BYTES


def test_requests_and_answers_are_json() -> None:
    request = Request(SWIFT, (Scenario(name="a"), Scenario(name="b", engines=2.5)))
    assert msgspec.json.decode(msgspec.json.encode(request), type=Request) == request
    got = play(SWIFT, Scenario(steps=3))
    assert msgspec.json.decode(msgspec.json.encode(got), type=Forecast) == got
