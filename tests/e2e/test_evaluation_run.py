"""Evaluations in whole runs of real processes: killed roles, the account, figures that come out again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest

from asyncrl.evaluation.ids import is_evaluation
from asyncrl.evaluation.statistics import Outcome, figures, metric_names

pytestmark = pytest.mark.slow
ROWS, K = 10, 4


def held_out(run) -> list[str]:  # type: ignore[no-untyped-def]
    """Settings of an evaluation after every third step, of rows that training does not have."""
    rows = [
        {
            "prompt": f"{100 + n}+{n}=",
            "data_source": "even" if n % 2 == 0 else "odd",
            "reward_model": {"ground_truth": "0"},
        }
        for n in range(ROWS)
    ]
    path = run.folder / "held.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"evaluation.path={path}",
        "evaluation.every=3",
        f"evaluation.samples={K}",
        "evaluation.temperature=1.0",
        "evaluation.max_new_tokens=12",
    ]


def recomputed(run, line: dict[str, Any], longest: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """The figures of a line of metrics from the recorded samples: the last line of each sample counts."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for sample in run.lines(f"evaluations/step-{line['step']}.jsonl"):
        if sample["round"] == line["round"]:
            found[sample["row"], sample["index"]] = sample
    outcomes = []
    for row in range(ROWS):
        mine = [found[row, index] for index in range(K) if (row, index) in found]
        if len(mine) == K:
            version = line["evaluation_version"]
            assert all(0 < sample["length"] <= longest and sample["versions"] == [version] * 2 for sample in mine)
            rewards = tuple(min(len(sample["text"]), 20) / 20 for sample in mine)  # what the reward function does
            assert rewards == tuple(sample["reward"] for sample in mine)
            outcomes.append(Outcome(mine[0]["data_source"], rewards, tuple(sample["text"].strip() for sample in mine)))
    assert len(outcomes) == line["evaluation_scored"]
    return metric_names(figures(outcomes, correct_above=0.5), k=K)


def check(  # type: ignore[no-untyped-def]
    run, steps: Iterable[int], *, trained: int, size: int = 4, longest: int = 12
) -> dict[str, Any]:
    """Audit, account and figures of all evaluations; nothing of them in training."""
    audit: dict[str, Any] = run.audit()
    assert audit["exit"] == 0, audit
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, trained * size)
    assert audit["evaluations"] == list(steps)
    lines = run.lines("metrics/evaluation.jsonl")
    assert [line["step"] for line in lines] == list(steps)
    for line in lines:
        counts = [line[f"evaluation_{name}"] for name in ("scored", "failed", "missing")]
        assert line["evaluation_prompts"] == ROWS == sum(counts), line
        told = {name: value for name, value in line.items() if name.startswith("val-")}
        assert told == pytest.approx(recomputed(run, line, longest)), line["step"]
        version = line["evaluation_version"]
        assert version == line["evaluation_version_min"] == line["evaluation_version_max"] >= line["step"], line
    batches = [event["groups"] for event in run.lines("history.jsonl") if event["e"] in ("claim", "commit")]
    assert not any(is_evaluation(number) for batch in batches for number in batch)
    for sample in run.lines("samples.jsonl"):
        assert not is_evaluation(sample["group"])
    return audit


def test_evaluations_beside_training_survive_a_killed_producer_and_buffer(run) -> None:  # type: ignore[no-untyped-def]
    settings = [*held_out(run), "evaluation.at_start=true", "learner.steps=8", "log.tensorboard=true"]
    child = run.start("launch", "all", str(run.config), *[word for one in settings for word in ("--set", one)])

    def events(name: str) -> list[dict[str, Any]]:
        return [event for event in run.lines("history.jsonl") if event["e"] == f"eval_{name}"]

    run.wait("a held-out sample of step 3", lambda: any(event["step"] == 3 for event in events("begin")))
    os.kill(run.pid("producer-0"), signal.SIGKILL)
    run.wait("an evaluation under way", lambda: len(events("score")) > ROWS * K + 4)
    os.kill(run.pid("buffer"), signal.SIGKILL)
    out, _ = child.communicate(timeout=150)
    assert child.returncode == 0, out + run.logs()
    steps = [line["step"] for line in run.lines("metrics/evaluation.jsonl")]
    assert steps[0] == 0 and 3 in steps and steps[-1] == 8
    check(run, steps, trained=8)
    last = run.lines("metrics/evaluation.jsonl")[-1]
    assert (last["evaluation_scored"], last["why"]) == (ROWS, "")
    assert (last["evaluation_version_min"], last["evaluation_version_max"]) == (8, 8), "the weights of the last step"
    assert {"even", "odd"} == set(last["sources"])
    assert "evaluation of step 8" in out and "<h3>Evaluations</h3>" in (run.dir / "report.html").read_text()
    curves = b"".join(path.read_bytes() for path in (run.dir / "tensorboard").glob("events*"))
    assert b"val-core/even/reward/mean@4" in curves


@pytest.mark.long
def test_a_slow_evaluation_ends_at_its_time_and_training_is_the_same_in_form(run) -> None:  # type: ignore[no-untyped-def]
    """Rewards of held-out prompts hang: the run ends all the same, and says what is missing."""
    (run.folder / "my_rewards.py").write_text(
        "import time\n"
        "def length_reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if data_source == 'odd':\n        time.sleep(60)\n"
        "    return min(len(solution_str), 20) / 20\n"
    )
    done = run.launch(
        *held_out(run),
        "evaluation.timeout_s=6",
        "evaluation.every=0",
        "reward_workers.count=2",
        "evaluation.max_new_tokens=40",
        "reward_workers.timeout_s=30",
        "learner.steps=4",
    )
    assert done.returncode == 0, done.stdout + run.logs()
    (line,) = run.lines("metrics/evaluation.jsonl")
    assert (line["step"], line["why"]) == (4, "time")
    assert line["evaluation_missing"] + line["evaluation_scored"] == ROWS and line["missing"]["waits for scores"] >= 1
    assert 6 <= line["evaluation_s"] < 15
    audit = run.audit()
    assert audit["exit"] == 0 and audit["issued"] == 16 == audit["trained"], audit
    learner = run.lines("metrics/learner.jsonl")
    assert all(one["lag_max"] <= 2 for one in learner) and len(learner) == 4
    assert "missing: waits for scores" in done.stdout
    lengths = [event["length"] for event in run.lines("history.jsonl") if event["e"] == "eval_sample"]
    assert max(lengths) > 24, "longer than sampling.max_new_tokens, which bounds training alone"


def test_evaluators_of_their_own_measure_one_version_and_producers_only_train(run) -> None:  # type: ignore[no-untyped-def]
    done = run.launch(*held_out(run), "evaluation.lane=evaluators", "evaluation.at_start=true", "learner.steps=8")
    assert done.returncode == 0, done.stdout + run.logs()
    steps = [line["step"] for line in run.lines("metrics/evaluation.jsonl")]
    assert steps[0] == 0 and steps[-1] == 8
    check(run, steps, trained=8)
    leases = [event for event in run.lines("history.jsonl") if event["e"] in ("lease", "eval_lease")]
    by_kind = {(event["e"], event["producer"].rpartition("-")[0]) for event in leases}
    assert by_kind == {("lease", "producer"), ("eval_lease", "evaluator")}
    syncs = [line for line in run.lines("metrics/roles.jsonl") if line["name"] == "evaluator-0"]
    assert syncs, "an evaluator has heartbeats of its own"


def test_a_second_set_of_weights_measures_one_version_while_its_engine_trains_the_next(run) -> None:  # type: ignore[no-untyped-def]
    """Long answers, one prompt at a time: the learner is ahead of every evaluation but the last."""
    settings = [*held_out(run), "evaluation.temperature=0", "evaluation.max_new_tokens=80", "evaluation.share=0.01"]
    lane = ["evaluation.lane=second_weights", "evaluation.at_start=true", "evaluation.every=4", "learner.steps=8"]
    done = run.launch(*settings, *lane)
    assert done.returncode == 0, done.stdout + run.logs()
    steps = [line["step"] for line in run.lines("metrics/evaluation.jsonl")]
    assert steps[0] == 0 and steps[-1] == 8
    check(run, steps, trained=8, longest=80)
    assert not any(line["evaluation_refused"] for line in run.lines("metrics/evaluation.jsonl"))
    newest: dict[str, int] = {}  # version with which a producer trains
    beside = 0
    for event in run.lines("history.jsonl"):
        if event["e"] == "lease":
            newest[event["producer"]] = event["w"]
        elif event["e"] == "eval_sample":
            ((version, _),) = event["runs"]
            beside += newest.get(event["producer"], version) > version  # one may measure before it first trains
    assert beside, "no engine moved on during an evaluation"
