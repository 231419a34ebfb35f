"""Whole runs that agents play: the unmodified OpenAI client in processes of its own, at the producer's endpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import agent_openai  # noqa: E402, RUF100

pytestmark = pytest.mark.slow


def prepare(run: Any, *, steps: int) -> None:
    """The benchmark's configuration in this run's folder."""
    text = agent_openai.configuration(run.folder, run.folder / "model", steps=steps)
    agent_openai.make_model(run.folder / "model")
    run.config.write_text(text)


def complete(run: Any, *, groups: int) -> dict[str, Any]:
    audit: dict[str, Any] = run.audit()
    assert audit["exit"] == 0, audit
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, groups)
    assert audit["spans"] == audit["spans_matched"] > 0, "every token has the digest of the weights that made it"
    assert run.living() == []
    return audit


def test_an_agent_plays_a_short_run(run: Any) -> None:
    prepare(run, steps=2)
    done = run.launch(
        "buffer.batch_groups=2", "sampling.group_size=2", "environment.agent.max_processes=2", "log.archive=true"
    )
    assert done.returncode == 0, done.stdout + run.logs()
    complete(run, groups=4)
    lines = [line for line in run.lines("metrics/learner.jsonl") if "reward_mean" in line]
    assert len(lines) == 2 and {line["role"] for line in run.lines("processes.jsonl")} == {
        "buffer",
        "weightsync",
        "producer",
        "learner",
    }, "the agent scores: no reward workers"
    assert all(0 <= line["reward_mean"] <= 1 for line in lines)
    assert all(line["observed_share"] > 0 for line in lines), "what the agent added between two turns is not trained"


@pytest.mark.chaos
def test_the_openai_client_trains_a_policy(run: Any, figure: Any) -> None:
    prepare(run, steps=20)
    done = run.launch(timeout=400)
    assert done.returncode == 0, done.stdout + run.logs()
    complete(run, groups=160)
    first, last = agent_openai.ends(agent_openai.curve(run.dir))
    figure(f"reward {first:.3f} -> {last:.3f} in 20 steps of 64 sessions")
    assert last > first + 0.2


def test_the_results_on_file_are_a_run_that_learned() -> None:
    found = json.loads(Path(agent_openai.RESULTS).read_text())
    assert found["reward_last"] > found["reward_first"] + 0.2
    assert (found["lost"], found["doubled"]) == (0, 0) and found["versions"]["openai"]
