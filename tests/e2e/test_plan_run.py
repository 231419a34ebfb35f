"""The planner against real runs: two settings forecast from the logs of a third."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run

from asyncrl.forecast import play
from asyncrl.forecast_measure import measure
from asyncrl.forecast_search import scenario_of
from asyncrl.rundir import RunDir

STEPS = 14


def done(run: Run, *settings: str) -> RunDir:
    """A run to its end."""
    common = ["sampling.group_size=8", "sampling.max_new_tokens=96", "buffer.batch_groups=8",
              "learner.checkpoint_every=99", f"learner.steps={STEPS}", "producers.slots=32"]  # fmt: skip
    ended = run.launch(*common, *settings, timeout=400)
    assert ended.returncode == 0, ended.stdout + run.logs()
    return RunDir(run.dir)


@pytest.mark.long
def test_another_setting_is_forecast_from_the_logs_of_one(
    tmp_path: Path, tiny_model: Path, figure: Callable[[str], None]
) -> None:
    """Throughput within 25 % (10 % is measured by benchmarks/plan_accuracy.py on a quiet machine), lag likewise."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    runs = [Run(first, tiny_model), Run(second, tiny_model)]
    try:
        plant, _, _ = measure(done(runs[0]))
        _, did, config = measure(done(runs[1], "producers.count=1", "buffer.max_staleness=0"))
    finally:
        for run in runs:
            run.close()
    [got] = play(plant, [scenario_of(config, steps=STEPS)])
    figure(f"{got.steps_s:.2f} steps/s forecast, {did.steps_s:.2f} made; lag {got.lag_mean:.2f}, {did.lag_mean:.2f}")
    assert got.steps_s == pytest.approx(did.steps_s, rel=0.25)
    assert got.lag_mean == pytest.approx(did.lag_mean, abs=0.25)
