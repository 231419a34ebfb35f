"""Learner and engine take turns on one simulated device: the peak of both together is that of the larger one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from device_run import HERE, DeviceRun, install
from test_device_runs import HALF

CONFIG = """
[run]
dir = "{folder}/run"
[model]
path = "{model}"
dtype = "{dtype}"
[data]
path = "unused.jsonl"
max_prompt_tokens = 16
[sampling]
max_new_tokens = 24
[producers]
device = "npu"
slots = 32
[learner]
device = "npu"
[cluster]
devices = "turns"
[weightsync]
in_place = true
[[reward]]
function = "unused:unused"
"""


MASK = 2048 * 2048  # bytes of the causal mask that transformers keeps for attention in half precision on an NPU


@pytest.mark.timeout(280)
@pytest.mark.long_except("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_both_is_that_of_the_larger(
    library: Path, tmp_path: Path, tiny_model: Path, dtype: str, figure: Callable[[str], None]
) -> None:
    package = install(tmp_path / "npu", library, devices=1)
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(folder=tmp_path, model=tiny_model, dtype=dtype))
    root = HERE.parents[2]
    paths = os.pathsep.join(map(str, (package, root, root / "tests")))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("one_device.py")), str(config)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found: dict[str, int] = json.loads(line.removeprefix("found "))
    figure(f"{dtype}: {found}")
    alone = max(found["learner"], found["engine"] - found["between"])
    together = max(found[name] for name in ("learner", "learner again", "engine", "engine again"))
    assert together <= 1.1 * alone, found
    constants = MASK if dtype == "bfloat16" else 0
    assert found["between"] - constants < 0.1 * found["version"], "neither keeps its weights on the device"


@pytest.mark.chaos
def test_whole_runs_take_turns_and_are_killed(npu_run: DeviceRun, monkeypatch: pytest.MonkeyPatch) -> None:
    npu_run.devices = 1
    monkeypatch.setenv("ASYNCRL_FAILPOINT", "learner.after_step:kill:2,producer.awake:kill:4")
    monkeypatch.setenv("ASYNCRL_FAILPOINT_ONCE", str(npu_run.folder))
    turns = ("cluster.devices=turns", "weightsync.in_place=true", "learner.ranks=1", "producers.count=1")
    done = npu_run.train(*turns, "buffer.max_staleness=1", HALF)
    assert done.returncode == 0, done.stdout + npu_run.logs()
    audit = npu_run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 20), audit
    assert len(list(npu_run.folder.glob("*.kill.*"))) == 2
