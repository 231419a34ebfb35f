"""The planner against real runs: one setting forecast from its own logs, another from the logs of the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_run import Run

from asyncrl.config import Config
from asyncrl.planner.forecast import play
from asyncrl.planner.measure import Observed, measure
from asyncrl.planner.model import Forecast, Plant
from asyncrl.planner.search import build_scenario
from asyncrl.runtime.run_dir import RunDir

STEPS = 20
WITHIN = 0.10
LAG = 0.15  # steps; of small lags 10 % says nothing
TRIES = 3  # of times on a machine that may be busy with other things


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


def close(got: Forecast, did: Observed) -> bool:
    """Within 10 % of the speed, and within 10 % of the mean lag or 0.15 steps."""
    lag = max(LAG, WITHIN * did.lag_mean)
    return abs(got.steps_s / did.steps_s - 1) <= WITHIN and abs(got.lag_mean - did.lag_mean) <= lag


@pytest.mark.long
@pytest.mark.alone
def test_a_run_and_another_setting_are_forecast_from_the_logs_of_the_run(
    tmp_path: Path, tiny_model: Path, figure: Callable[[str], None]
) -> None:
    for number in range(TRIES):
        plant, *first = done(tmp_path / f"first-{number}", tiny_model)
        _, *second = done(tmp_path / f"second-{number}", tiny_model, "producers.count=1", "buffer.max_staleness=0")
        pairs = []
        for did, config in (first, second):
            [got] = play(plant, [build_scenario(config, steps=STEPS)])
            pairs.append((got, did))
            figure(
                f"{got.steps_s:.2f} steps/s forecast, {did.steps_s:.2f} made; lag {got.lag_mean:.2f}, "
                f"{did.lag_mean:.2f}"
            )
        if all(close(got, did) for got, did in pairs):
            return
    pytest.fail(f"in none of {TRIES} tries were both within {WITHIN:.0%}")
