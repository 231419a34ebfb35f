"""Runs whose draws are cut: engine and learner have the same log-probs in every layout, and a replay has the same
bits.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
from e2e_run import Run, run, tiny_model

assert run and tiny_model  # fixtures

pytestmark = pytest.mark.long
GAP = 1e-5  # float32


@pytest.mark.parametrize("cut", ["top_p=0.9", pytest.param("top_k=5", marks=pytest.mark.chaos)])
def test_a_run_with_cut_draws_is_exact_and_replays_bitwise(run: Run, cut: str) -> None:
    check_run(run, f"sampling.{cut}", "log.archive=true", "producers.checkpoint_tokens=8")
    done = run.command("replay", str(run.dir), "--json", "--out", str(run.folder / "replayed"))
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout[done.stdout.index("{") :])["ok"]


@pytest.mark.parametrize("split", ["sequence", pytest.param("tensor", marks=pytest.mark.chaos)])
def test_ranks_that_split_rows_or_the_vocabulary_have_the_same_numbers(run: Run, split: str) -> None:
    check_run(run, "sampling.top_p=0.9", "learner.ranks=2", f"learner.parallel.{split}=2", "learner.device=cpu")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.chaos), 2])
def test_megatron_has_the_same_numbers(run: Run, ranks: int) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("the extra megatron is not installed")
    split = ("learner.ranks=2", "learner.parallel.tensor=2") if ranks == 2 else ()
    check_run(run, "sampling.top_p=0.9", "learner.backend=megatron", "learner.device=cpu", *split)


def check_run(run: Run, *settings: str) -> None:
    done = run.launch(*settings, "learner.steps=4")
    assert done.returncode == 0, done.stdout + run.logs()
    lines = run.lines("metrics/learner.jsonl")
    gaps = [line["lag/0/logprob_gap_max"] for line in lines if "lag/0/logprob_gap_max" in line]
    means = [line["lag/0/logprob_gap_mean"] for line in lines if "lag/0/logprob_gap_mean" in line]
    assert len(lines) == 4 and gaps and max(gaps) <= 1e-4 and max(means) < GAP, (gaps, means)  # 1e-4: the first bucket
    assert run.audit()["exit"] == 0
