"""The planner against real runs: one setting forecast from its own logs, another from the logs of the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_run import Run

from asyncrl.config import Config
from asyncrl.planner.forecast import play
from asyncrl.planner.measure import Observed, measure
from asyncrl.planner.model import Plant
from asyncrl.planner.search import build_scenario
from asyncrl.runtime.run_dir import RunDir

STEPS = 14


def done(folder: Path, model: Path, *settings: str) -> tuple[Plant, Observed, Config]:
    """A run to its end, and what it shows."""
    folder.mkdir(parents=True)
    run = Run(folder, model)
    common = [
        "sampling.group_size=8",
        "sampling.max_new_tokens=96",
        "buffer.batch_groups=8",
        "learner.checkpoint_every=99",
        f"learner.steps={STEPS}",
        "producers.slots=32",
    ]
    try:
        ended = run.launch(*common, *settings, timeout=400)
        assert ended.returncode == 0, ended.stdout + run.logs()
        return measure(RunDir(run.dir))
    finally:
        run.close()


@pytest.mark.long
@pytest.mark.alone
def test_a_run_and_another_setting_are_forecast_from_the_logs_of_the_run(
    tmp_path: Path, tiny_model: Path, figure: Callable[[str], None]
) -> None:
    """The lags, and roughly the speed, on a busy machine too; `benchmarks/plan_accuracy.py` measures to 10 %."""
    plant, *first = done(tmp_path / "first", tiny_model)
    _, *second = done(tmp_path / "second", tiny_model, "producers.count=1", "buffer.max_staleness=0")
    forecasts = []
    for did, config in (first, second):
        [got] = play(plant, [build_scenario(config, steps=STEPS)])
        forecasts.append(got)
        figure(
            f"{got.steps_s:.2f} steps/s forecast, {did.steps_s:.2f} made; lag {got.lag_mean:.2f}, {did.lag_mean:.2f}"
        )
        assert did.steps_s / 2 < got.steps_s < did.steps_s * 2
        assert abs(got.lag_mean - did.lag_mean) < 1
    ahead, synchronous = forecasts
    assert ahead.lag_mean > 0.5 and synchronous.lag_mean == second[0].lag_mean == 0
    assert synchronous.steps_s < ahead.steps_s
