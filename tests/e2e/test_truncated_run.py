"""A run whose draws are cut: engine and learner have the same log-probs, and its replay has the same bits."""

from __future__ import annotations

import json

import pytest
from e2e_run import Run, run, tiny_model

assert run and tiny_model  # fixtures

pytestmark = pytest.mark.long
GAP = 1e-5  # float32


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=5"])
def test_a_run_with_cut_draws_is_exact_and_replays_bitwise(run: Run, cut: str) -> None:
    done = run.launch(f"sampling.{cut}", "learner.steps=4", "log.archive=true", "producers.checkpoint_tokens=8")
    assert done.returncode == 0, done.stdout + run.logs()
    lines = run.lines("metrics/learner.jsonl")
    gaps = [line["lag/0/logprob_gap_max"] for line in lines if "lag/0/logprob_gap_max" in line]
    means = [line["lag/0/logprob_gap_mean"] for line in lines if "lag/0/logprob_gap_mean" in line]
    assert len(lines) == 4 and gaps and max(gaps) <= 1e-4 and max(means) < GAP, (gaps, means)  # the first is a bucket
    assert run.audit()["exit"] == 0
    done = run.command("replay", str(run.dir), "--json", "--out", str(run.folder / "replayed"))
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout[done.stdout.index("{") :])["ok"]
