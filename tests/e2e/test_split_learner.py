"""Whole runs whose learner splits rows or matrices over its ranks: they publish, commit and export as any other."""

import json

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["sequence", "tensor"])
def test_two_ranks_of_one_share_train(run, layout: str) -> None:  # type: ignore[no-untyped-def]
    done = run.launch("learner.ranks=2", f"learner.parallel.{layout}=2", "learner.steps=3")
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 12), audit
    assert len([line for line in run.lines("processes.jsonl") if line["role"] == "learner"]) == 2
    lines = run.lines("metrics/learner.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    # Engine and learner compute the same log-probs from what was published: no share was counted twice.
    assert all(line["lag/0/logprob_gap_mean"] < 1e-4 for line in lines if "lag/0/logprob_gap_mean" in line)
    assert (run.dir / "export" / "model.safetensors").exists()
    assert json.loads((run.dir / "result.json").read_text())["steps"] == 3
