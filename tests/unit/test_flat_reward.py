"""A reward that does not move for 20 steps: the launcher names the likely cause, once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, parse
from asyncrl.launcher import progress as progress_module
from asyncrl.launcher.progress import Progress
from asyncrl.monitor.flat_reward import STEPS, flat_reward
from asyncrl.runtime.run_dir import RunDir


def config(**changes: str) -> Config:
    settings = {"model.path": "m", "data.path": "d", "reward": '[{function = "a:b"}]'} | changes
    return parse("", overrides=[f"{key}={value}" for key, value in settings.items()])


def lines(count: int = STEPS, *, reward: float = 0.1, slope: float = 0.0, **more: float) -> list[dict[str, Any]]:
    return [{"step": step, "reward_mean": reward + slope * step + 0.01 * (step % 2), **more} for step in range(count)]


@pytest.mark.parametrize(
    ("made", "changes", "said"),
    [
        (lines(zero_advantage_share=0.9), {}, "90% of the groups have one reward for all their samples"),
        (lines(truncated_share=0.6, zero_advantage_share=0.8), {}, "60% of the answers are cut"),
        (lines(), {}, "learner.optim.lr = 1e-06 is for billions"),
        (lines(), {"learner.optim.lr": "1e-4"}, "look at what is rewarded"),
    ],
)
def test_the_likely_cause_is_named(made: list[dict[str, Any]], changes: dict[str, str], said: str) -> None:
    hint = flat_reward(made, config(**changes))
    assert hint.startswith("the reward has not moved in 20 steps (0.105): ") and said in hint


@pytest.mark.parametrize(
    "made",
    [
        lines(STEPS - 1),
        lines(slope=0.02),
        lines(slope=-0.02),
        lines(reward=0.97),
        lines(10, slope=0.05) + lines(reward=0.7),
        [{"step": 1}] * STEPS,
    ],
)
def test_there_is_no_hint_without_a_reason(made: list[dict[str, Any]]) -> None:
    assert flat_reward(made, config()) == ""


def test_steps_before_that_were_no_other_do_not_hide_it() -> None:
    assert flat_reward(lines(STEPS + 15), config()).startswith("the reward has not moved in 20 steps")


def test_only_rl_has_a_reward() -> None:
    changes = {"learner.mode": "sft", "producers.engine": "dataset", "sampling.group_size": "1", "reward": "[]"}
    assert flat_reward(lines(), config(**changes)) == ""


def test_the_launcher_says_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LOOK_S", 0.0)
    run, out = RunDir(tmp_path).create(), io.StringIO()
    progress = Progress(run, steps=99, plain=True, out=out, hint=lambda last: flat_reward(last, config()))
    for line in lines(30):
        with (run.metrics / "learner.jsonl").open("a") as file:
            file.write(json.dumps({"t": 1.0, **line}) + "\n")
        progress.tick()
    assert out.getvalue().count("[launch] hint: the reward has not moved in 20 steps") == 1


def test_before_the_first_step_it_says_what_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress_module.time, "time", lambda: 5.0)
    run, out = RunDir(tmp_path).create(), io.StringIO()
    progress = Progress(run, steps=9, plain=True, out=out)
    for _ in range(12):
        now[0] += 1
        progress.tick()
    (run.metrics / "roles.jsonl").write_text(
        json.dumps({"t": 4.0, "name": "producer-0", "waiting_for": "version 0"}) + "\n"
    )
    for _ in range(10):
        now[0] += 1
        progress.tick()
    assert out.getvalue().splitlines() == [
        "[launch] no step yet after 10 s: the processes load the model",
        "[launch] no step yet after 20 s: producer-0: version 0",
    ]
