"""`launch all` with two judges, and `launch rewards --judge` beside it: who works for whom, and what status, metrics,
trace and rescore tell of it.
"""

from __future__ import annotations

import json
import os
import signal

import pytest
from e2e_run import Run

REWARDS = """
import time
def length_reward(data_source, solution_str, ground_truth, extra_info=None):
    return min(len(solution_str), 20) / 20
async def style(sample):
    time.sleep(0.05)
    return {"score": 0.5 if sample.finish == "stop" else 0.25, "letters": len(sample.response)}
"""
JUDGES = (
    'reward=[{function="my_rewards:length_reward"}, {function="my_rewards:style", judge="style", weight=2.0}]',
    'judge=[{name="style", count=2, timeout_s=20, batch_samples=4}]',
    "evaluation.every=0",
    "learner.steps=2000",
    "producers.count=1",
    "log.archive=true",
    "log.heartbeat_s=0.3",
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_with_two_judges(run: Run) -> None:
    (run.folder / "my_rewards.py").write_text(REWARDS)
    words = [word for setting in JUDGES for word in ("--set", setting)]
    main = run.start("launch", "all", str(run.config), *words)
    run.wait("step 1", lambda: 1 in run.steps())
    joined = run.start("launch", "rewards", str(run.dir / "config.toml"), "--judge", "style")
    run.wait(
        "a score of who joined",
        lambda: any(
            line["e"] == "judged" and line["worker"] not in ("reward-0", "reward-style-0", "reward-style-1")
            for line in run.lines("history.jsonl")
        ),
    )
    status = json.loads(run.command("status", str(run.dir), "--json", timeout=60).stdout)
    judges = {one["judge"]: one for one in status["buffer"]["judges"]}
    assert set(judges) == {"default", "style"} and judges["style"]["workers"] == 4
    assert all(one["scored"] > 0 and one["failures"] == 0 for one in judges.values())
    assert {worker["judge"] for worker in status["buffer"]["rewards"]} == {"default", "style"}
    step = max(run.steps()) + 2
    run.wait("two steps more", lambda: max(run.steps()) >= step)
    os.kill(joined.pid, signal.SIGINT)
    assert joined.wait(60) == 130
    os.kill(main.pid, signal.SIGINT)
    out, _ = main.communicate(timeout=90)
    assert main.returncode == 130, out + run.logs()
    assert "4 reward workers" not in out and "3 reward workers (1 default, 2 style)" in out
    audit = run.audit()
    assert audit["exit"] == 0 and audit["lost"] == audit["doubled"] == 0
    line = run.lines("metrics/buffer.jsonl")[-1]
    assert line["judge/style/scored"] > 0 and line["judge/default/waiting"] >= 0
    commit = [event for event in run.lines("history.jsonl") if event["e"] == "commit"][-1]
    told = run.command("trace", str(run.dir), str(commit["groups"][0]), timeout=60).stdout
    assert " by reward-0, version " in told and "; style " in told
    again = json.loads(run.command("rescore", str(run.dir), "--judge", "style", "--json", timeout=120).stdout)
    assert (again["changed_samples"], again["failed"]) == (0, {}) and again["functions"] == ["my_rewards:style"]
    other = json.loads(
        run.command(
            "rescore", str(run.dir), "--judge", "style", "--reward", "my_rewards:length_reward", "--json", timeout=120
        ).stdout
    )
    assert other["changed_samples"] > 0 and other["failed"] == {}
    head, *groups = [json.loads(text) for text in (run.folder / "run-scores.jsonl").read_text().splitlines()]
    assert head["judge"] == "style"
    for group in groups:  # the default judge's part stays, the other one is replaced by the same number
        for index, reward in group["rewards"].items():
            parts = group["parts"][index]
            assert reward == pytest.approx(parts["length_reward"] + parts["my_rewards:length_reward"])
            assert parts["length_reward"] == pytest.approx(parts["my_rewards:length_reward"])
