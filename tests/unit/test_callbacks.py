"""Callbacks: your own code at steps, evaluations and checkpoints, in a process that cannot hurt the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import dump, parse
from asyncrl.errors import ConfigError
from asyncrl.plugins import TrackerRun
from asyncrl.preflight.machine import check_trackers
from asyncrl.process_plan.plan import onlookers
from asyncrl.runtime.run_dir import RunDir
from learners.trackers.callbacks import Callbacks

ROOT = Path(__file__).parents[2]
WATCH = """
import json
from pathlib import Path

def note(*words):
    with Path("told.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\\n")

class Watch:
    def on_step(self, values, step):
        note("step", step, values["reward_mean"])
        if step == 2:
            raise ValueError("not today")
    def on_evaluation(self, values, step):
        note("evaluation", step, values["val-core/add/acc/mean@4"])
    def on_checkpoint(self, folder, step):
        note("checkpoint", step, Path(folder).name)

def each(values, step):
    note("function", step)
"""
TEXT = """
run.dir = "{root}"
model.path = "m"
data.path = "d"
[[reward]]
function = "a:b"
[trackers]
use = ["callbacks"]
every_s = 0.1
options.callbacks.call = ["watch.py:Watch", "watch.py:each"]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watch.py").write_text(WATCH)
    made = RunDir(tmp_path / "run").create()
    made.config.write_text(dump(parse(TEXT.format(root=made.root))))
    return made


def told() -> list[Any]:
    file = Path("told.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def checkpoint(run: RunDir, step: int, *, whole: bool = True) -> None:
    folder = run.checkpoints / f"step_{step:06d}"
    folder.mkdir()
    if whole:
        (folder / "manifest.json").write_text("{}")


def make(run: RunDir, **options: Any) -> Callbacks:
    folder = run.root / "trackers" / "callbacks"
    folder.mkdir(parents=True, exist_ok=True)
    given: Mapping[str, Any] = {"run": {"dir": str(run.root)}}
    return Callbacks(TrackerRun("p", "n", "id", folder, dict(given), options))


def test_steps_evaluations_and_checkpoints(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = make(run, call=["watch.py:Watch", "watch.py:each"])
    callbacks.log({"learning/reward_mean": 0.5}, step=1)
    checkpoint(run, 1)
    checkpoint(run, 2, whole=False)
    callbacks.log({"learning/reward_mean": 0.75}, step=2)
    callbacks.log({"val-core/add/acc/mean@4": 0.25}, step=2)
    assert told() == [
        ["step", 1, 0.5],
        ["function", 1],
        ["step", 2, 0.75],
        ["function", 2],  # after the error of the first callback
        ["checkpoint", 1, "step_000001"],
        ["evaluation", 2, 0.25],
    ]
    said = capsys.readouterr().out
    assert "Watch.on_step(2) failed" in said and "ValueError: not today" in said
    make(run, call=["watch.py:Watch"]).close()  # another process: a checkpoint is told once
    assert len(told()) == 6


def test_an_evaluation_without_a_score_is_no_step(run: RunDir) -> None:
    class Watch:
        def on_evaluation(self, values: Mapping[str, float], step: int) -> None:
            seen.append(("evaluation", step, dict(values)))

        def on_step(self, values: Mapping[str, float], step: int) -> None:
            seen.append(("step", step, dict(values)))

    seen: list[Any] = []
    callbacks = make(run, call=["watch.py:Watch"])
    callbacks._callbacks = [Watch()]
    callbacks.log({"faults/evaluation_failed": 3.0, "learning/evaluation_scored": 0.0}, step=4)
    callbacks.log({"learning/reward_mean": 0.5}, step=5)
    assert [one[:2] for one in seen] == [("evaluation", 4), ("step", 5)]


def test_what_is_wrong_is_said_before_the_start(run: RunDir) -> None:
    config = parse(TEXT.format(root=run.root))
    assert list(check_trackers(config)) == []
    for call, code in (('["watch.py:nothing"]', "config.extra"), ("[]", "config.missing")):
        text = TEXT.format(root=run.root).replace('["watch.py:Watch", "watch.py:each"]', call)
        assert [error.code for error in check_trackers(parse(text))] == [code]
    with pytest.raises(ConfigError, match="names no callback"):
        make(run)


def test_the_process_of_a_run(run: RunDir) -> None:
    """The real process, on metrics as a learner writes them."""
    with (run.metrics / "learner.jsonl").open("ab") as out:
        for step in (1, 2, 3):
            out.write(msgspec.json.encode({"t": 1000.0 + step, "step": step, "reward_mean": step / 4}) + b"\n")
    checkpoint(run, 2)
    [plan] = onlookers(parse(run.config.read_text()), config_path=run.config)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *plan.argv[1:]], env=environment, stdout=subprocess.PIPE, text=True) as role:
        until = time.monotonic() + 100
        while ["function", 3] not in told() and time.monotonic() < until:
            time.sleep(0.05)
        role.terminate()
        said, _ = role.communicate(timeout=60)
    assert role.returncode == 0, said
    assert [line for line in told() if line[0] == "step"] == [["step", 1, 0.25], ["step", 2, 0.5], ["step", 3, 0.75]]
    assert ["checkpoint", 2, "step_000002"] in told() and "ValueError: not today" in said
