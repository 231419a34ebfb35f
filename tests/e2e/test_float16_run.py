"""A run in float16: its loss scale survives a restart, and its replay has the same bits."""

from __future__ import annotations

import json

import pytest
from e2e_run import Run, run, tiny_model

from learners.backends.fsdp2.loss_scale import START

assert run and tiny_model  # fixtures

pytestmark = pytest.mark.chaos
#: Advantages of the size of the rewards: gradients overflow at the first scale.
HALF = (
    "model.dtype=float16",
    "log.archive=true",
    "learner.algorithm.advantage=dr_grpo",
    "learner.algorithm.aggregation=seq-mean-token-sum-norm",
)


def test_a_resumed_run_in_float16_replays_bitwise(run: Run) -> None:
    text = run.config.read_text()
    run.config.write_text(text.replace('length_reward"\n', 'length_reward"\nweight = 1e4\n'))
    for steps in (2, 4):
        done = run.launch(*HALF, f"learner.steps={steps}")
        assert done.returncode == 0, done.stdout + run.logs()
    lines = {line["step"]: line for line in run.lines("metrics/learner.jsonl")}
    assert sorted(lines) == [1, 2, 3, 4]
    assert all(line["loss_scale"] >= 1 and line["grad_norm"] > 0 for line in lines.values())
    assert lines[1]["grad_overflows"] > 0 and lines[4]["loss_scale"] < START  # a resume from the start would show
    assert run.audit()["exit"] == 0
    for words in ((), ("--from", "2")):
        done = run.command("replay", str(run.dir), "--json", "--out", str(run.folder / f"replay{len(words)}"), *words)
        assert done.returncode == 0, done.stdout
        assert json.loads(done.stdout[done.stdout.index("{") :])["ok"]
