"""What the planner reads off a run: a simulated run's logs give back the numbers that it was simulated with."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_run import write_run

from asyncrl.config import dump, parse
from asyncrl.errors import ConfigError
from asyncrl.planner.forecast import Options, _weight_notes, format_plan, plan_for, play
from asyncrl.planner.measure import (
    Curve,
    decoded_samples,
    fit_line,
    measure,
    measure_rates,
    shared_cores,
    unique_steps,
)
from asyncrl.planner.model import Forecast, Plant, Scenario
from asyncrl.planner.search import buffers_for, build_scenario, devices_per_producer, levels, splits
from asyncrl.runtime.run_dir import RunDir
from buffers.groups.machine import Parts
from buffers.groups.transaction import Transaction
from buffers.simulation.simulation import QuietTable, QuietTransaction, Simulation, settings_for

ROOT = Path(__file__).parents[2]
TEXT = """
run.dir = "{root}"
model.path = "m"
data.path = "d"
[[reward]]
function = "a:b"
[sampling]
group_size = 4
max_new_tokens = 200
[buffer]
batch_groups = 8
max_staleness = 2
[producers]
count = 2
slots = 16
[learner]
steps = 24
"""


class LoggedTransaction(QuietTransaction):
    """A transaction that keeps the history."""

    event = Transaction.event
    sample_events = Transaction.sample_events


LOGGED = Parts(transaction=LoggedTransaction, table=QuietTable)


def simulated_run(root: Path, plant: Plant) -> tuple[RunDir, Simulation]:
    """A run folder as a run with such machines would have left it."""
    run = RunDir(root).create()
    config = parse(TEXT.format(root=run.root))
    run.config.write_text(dump(config))
    simulation = Simulation(plant, build_scenario(config), parts=LOGGED)
    simulation.run()
    events = simulation.machine.take().events
    run.history.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    lines = []
    for number, step in enumerate(simulation.steps, start=1):
        trained = step.ended - plant.commit_s - plant.publish_s
        train = trained - step.claimed - plant.fetch_s
        lines.append(
            {
                "t": step.ended,
                "step": number,
                "wait_s": step.claimed - step.asked,
                "fetch_s": plant.fetch_s,
                "assemble_s": 0.0,
                "proximal_s": 0.0,
                "train_s": train,
                "publish_s": plant.publish_s,
                "tokens": step.tokens,
                "commit_s": plant.commit_s,
                "checkpoint_s": 0.0,
                "step_s": step.ended - step.asked,
                "groups": 8,
                "lag_mean": sum(step.lags) / len(step.lags),
            }
        )
    write(run.metrics / "learner.jsonl", lines)
    write(run.metrics / "weightsync.jsonl", [{"t": line["t"], "round_s": plant.sync_s[0]} for line in lines])
    return run, simulation


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def lengths(seed: int = 0) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(seed)
    return tuple(tuple(rng.randint(5, 190) for _ in range(4)) for _ in range(24 * 8))


@pytest.mark.parametrize("cores", [0.0, 2.0])
def test_a_run_gives_back_what_its_machines_do(tmp_path: Path, cores: float) -> None:
    plant = Plant(
        0.004,
        0.0003,
        0.3,
        0.0003,
        lengths(),
        sync_s=(0.06,),
        fetch_s=0.02,
        publish_s=0.01,
        commit_s=0.01,
        cores=cores,
        other_demand=0.15 if cores else 0.0,
    )
    run, _ = simulated_run(tmp_path / "run", plant)
    found, did, config = measure(run, cores=cores)
    per_step = [one.decode_s + one.decode_sample_s * 12 for one in (plant, found)]
    assert per_step[1] == pytest.approx(per_step[0], rel=0.06)
    steps = [one.train_s + one.train_token_s * 3000 for one in (plant, found)]
    assert steps[1] == pytest.approx(steps[0], rel=0.05)
    assert found.sync_s[0] == 0.06 and found.fetch_s == pytest.approx(0.02)
    assert len(found.lengths) == 24 * 8 and set(map(len, found.lengths)) == {4}
    # ... and with these numbers the run is forecast as it was, and another one as it would have been
    [again] = play(found, [build_scenario(config)])
    assert again.steps_s == pytest.approx(did.steps_s, rel=0.05)
    assert again.lag_mean == pytest.approx(did.lag_mean, abs=0.15)
    other = msgspec.structs.replace(build_scenario(config), producers=1, max_staleness=0, depth=0)
    [forecast], truth = play(found, [other]), Simulation(plant, other).run()
    assert forecast.steps_s == pytest.approx(truth.steps_s, rel=0.08)


def test_what_was_decoded_at_once_follows_from_leases_and_arrivals() -> None:
    def lease(t: float, g: int, token: int) -> dict[str, Any]:
        return {"e": "lease", "t": t, "g": g, "token": token, "producer": "p"}

    def sample(t: float, g: int, token: int, i: int) -> dict[str, Any]:
        return {"e": "sample", "t": t, "g": g, "token": token, "i": i, "producer": "p", "length": 10}

    events = [
        lease(0, 0, 1),
        lease(0, 1, 2),
        sample(3, 0, 1, 0),
        sample(5, 0, 1, 1),
        sample(9, 1, 2, 1),
        {"e": "lost", "t": 10, "g": 1, "token": 2, "producer": "p", "why": "silent"},
    ]
    found = decoded_samples(events, slots=2, asked=2, evaluated=1)
    assert [(one.start, one.end) for one in found] == [(0, 3), (0, 5), (5, 9)]
    curve = Curve([(one.start, 1.0) for one in found] + [(one.end, -1.0) for one in found])
    assert curve.mean(0, 9) == pytest.approx((3 + 5 + 4) / 9)


def test_a_fit_is_never_negative_and_leaves_out_what_is_far_off() -> None:
    assert fit_line([1, 2, 3], [3, 2, 1], [1, 1, 1]) == (2.0, 0.0)
    x = list(range(1, 21))
    a, b = fit_line(x, [800 if number == 10 else number for number in x], [1] * 20)
    assert (a, b) == (pytest.approx(0, abs=1e-6), pytest.approx(1))
    assert fit_line([5, 5], [2, 4], [1, 1]) == (3.0, 0.0)


def test_a_short_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    with pytest.raises(ConfigError) as found:
        measure(run)
    assert found.value.code == "plan.numbers" and "5 steps" in found.value.message


def test_steps_that_were_trained_again_count_once() -> None:
    lines = [{"step": 1, "t": 1}, {"step": 2, "t": 2}, {"step": 2, "t": 5}, {"step": 3, "t": 6, "replayed": 1}]
    assert [line["t"] for line in unique_steps(lines)] == [1, 5]
    even = [
        {"step": n, "t": float(n), "step_s": 1.0, "groups": 2, "tokens": 10, "lag_mean": 1.0, "wait_s": 0.25}
        for n in range(1, 13)
    ]
    did = measure_rates(even)
    assert (did.steps_s, did.lag_mean, did.learner_wait_share, did.tokens_s) == (1.0, 1.0, 0.25, 10.0)


# ---------------------------------------------------------------- the command


def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(TEXT.format(root=tmp_path / "run"))
    return path


def test_the_command_from_numbers(tmp_path: Path) -> None:
    words = [
        "--assume",
        "engine_tokens_s=4000",
        "--assume",
        "train_token_s=1e-4",
        "--assume",
        "length_mean=60",
        "--cores",
        "0",
        "--steps",
        "4",
        "--gpus",
        "1,16",
    ]
    command = [sys.executable, "-m", "asyncrl", "plan", str(config_file(tmp_path)), *words]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    plan = json.loads(done.stdout)
    assert plan["check"] is None and plan["scenario"]["producers"] == 2
    assert 50 < plan["plant"]["lengths"]["mean"] < 70
    assert {row["producers"] for row in plan["search"]} >= {1, 2, 4} and 0.97 <= plan["suggested"]["of_best"] <= 1
    assert [row["devices"] for row in plan["devices"]] == [1, 16]
    assert plan["devices"][1]["learner"] + plan["devices"][1]["producers"] == 16
    assert any("nothing was measured" in note for note in plan["notes"])


def test_the_command_from_a_run(tmp_path: Path) -> None:
    plant = Plant(0.004, 0.0003, 0.3, 0.0003, lengths(), sync_s=(0.06,))
    run, _ = simulated_run(tmp_path / "run", plant)
    settings = ("sampling.max_new_tokens=150",)
    planned = plan_for(Options(config_file(tmp_path), settings, run.root, ("swap_s=0.5",), steps=8, cores=0.0))
    assert planned.checked is not None and planned.plant.swap_s == 0.5
    did, got = planned.checked
    assert got.steps_s == pytest.approx(did.steps_s, rel=0.05)
    assert max(length for row in planned.plant.lengths for length in row) == 150
    assert [note for note in planned.notes if "cut at sampling.max_new_tokens = 150" in note]
    text = "\n".join(format_plan(planned))
    assert "suggested" in text and "check     the run itself" in text and "one buffer is enough" in text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "decode_sample_s or engine_tokens_s, train_token_s, length_mean"),
        (["--assume", "speed=3"], "'speed' is none of"),
        (["--assume", "reward_s=-1"], "at least 0"),
        (["--from", "/nowhere"], "no config.toml in it"),
        (["--gpus", "0"], "1 to 1000000"),
    ],
)
def test_mistakes_are_said(tmp_path: Path, words: list[str], what: str) -> None:
    command = [sys.executable, "-m", "asyncrl", "plan", str(config_file(tmp_path)), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and what in done.stderr


@pytest.mark.parametrize("engine", ["vllm_http", "sglang"])
def test_weights_of_servers_have_a_time(engine: str, tmp_path: Path) -> None:
    shape = {"model_type": "qwen2", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = parse(TEXT.format(root=tmp_path))
    served = msgspec.structs.replace(config.producers, engine=engine, url=("http://a",))
    model = msgspec.structs.replace(config.model, path=str(tmp_path))
    (note,) = _weight_notes(msgspec.structs.replace(config, producers=served, model=model))
    assert "an engine commits in" in note


# ---------------------------------------------------------------- many devices


def test_devices_are_divided_and_the_batch_grows_with_them(tmp_path: Path) -> None:
    config = parse(TEXT.format(root=tmp_path) + "[producers.engine_args]\ntensor_parallel_size = 2\n")
    assert devices_per_producer(config) == 2
    plant = Plant(0.01, 0.001, 1.0, 1e-4, lengths())
    ways = splits(config, plant, devices=100, scale_batch=True)
    assert all(way.learner + 2 * way.producers in (99, 100) for way in ways)
    assert splits(config, plant, devices=2, scale_batch=True) == [], "an engine of two leaves the learner none"
    assert {(way.learner, way.producers) for way in splits(config, plant, devices=3, scale_batch=True)} == {(1, 1)}
    assert {way.scenario.batch_groups for way in ways} == {160}  # 8 groups with 1 + 2 * 2 devices
    assert {way.scenario.batch_groups for way in splits(config, plant, devices=100, scale_batch=False)} == {8}
    assert all(way.scenario.learner_speed == way.learner for way in ways)
    several = msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, learner_hosts=4))
    ways = splits(several, plant, devices=100, scale_batch=True)
    assert all(way.scenario.learner_speed == way.learner / 4 for way in ways), "measured on four hosts"
    assert {way.scenario.batch_groups for way in ways} == {100}  # 8 groups with 4 + 2 * 2 devices
    args = {"tensor_parallel_size": 2, "pipeline-parallel-size": 2}
    vllm = msgspec.structs.replace(config.producers, engine="vllm", engine_args=args)
    assert devices_per_producer(msgspec.structs.replace(config, producers=vllm)) == 4
    assert levels(500, 2) == 8 and levels(500, 0) == 500
    assert buffers_for(1000.0, 0.0) == 1 and buffers_for(1e5, 1e3) == 96
    assert settings_for(Scenario(asked_samples=10, group_size=8)).over_issue == 2


def test_jobs_of_a_cluster_multiply_their_producers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cluster.producers` jobs of `producers.count` each: that many generate, and whole jobs are suggested."""

    def give_one_each(_: Plant, scenarios: Sequence[Scenario]) -> list[Forecast]:
        return [Forecast(one.name, 8, 1.0, min(one.producers, 7.9), 1.0, 1.0, 0.0, {}, 0.0, 0.0) for one in scenarios]

    monkeypatch.setattr("asyncrl.planner.forecast.play", give_one_each)
    assume = ("engine_tokens_s=4000", "train_token_s=1e-4", "length_mean=60")
    options = Options(config_file(tmp_path), ("cluster.producers=4",), None, assume, steps=4, cores=0.0)
    planned = plan_for(options)
    assert planned.scenario.producers == 8 and {one.producers for one in planned.found} == {2, 4, 6, 8, 12, 16}
    assert "--set cluster.producers=4 --set" in "\n".join(format_plan(planned))
    config = parse(TEXT.format(root=tmp_path), overrides=["cluster.producers=4"])
    assert shared_cores(config) == 0.0 < shared_cores(parse(TEXT.format(root=tmp_path))), "jobs run on other hosts"
    ways = splits(config, planned.plant, devices=90, scale_batch=True)
    assert {way.scenario.batch_groups for way in ways} == {80}  # 8 groups with 1 + 4 * 2 devices
