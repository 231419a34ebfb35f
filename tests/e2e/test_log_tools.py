"""Replay, what-if and fork of a real run, and what `asyncrl trace` says of its groups.

One short run with everything in it: archived batches, a change of settings by `asyncrl tune` while it runs, a dropped
group, a dead one, and an end by Ctrl-C. Its fork is the second run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

ODD = """
def odd_reward(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "raise":
        raise ValueError("this prompt has no answer")
    return min(len(solution_str), 20) / 20
def no_fives(rewards, lengths, parts, group):
    return "a five" if group == 5 else ""
"""
SETTINGS = [
    "log.archive=true", "learner.checkpoint_every=2", "learner.checkpoint_keep=3", "reward_workers.retries=0",
    'buffer.filters=["odd_rewards:no_fives"]', 'reward=[{function="odd_rewards:odd_reward"}]', "data.shuffle=false",
    "learner.optim.lr=1e-3", "learner.steps=2000", "producers.count=1",
]  # fmt: skip


def dead_group(run: Run) -> int:
    return next(line["g"] for line in run.lines("history.jsonl") if line["e"] == "dead")


def tree(folder: Path) -> dict[str, str]:
    """Digest of every file."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Run]:
    """A run that was tuned, and ended by Ctrl-C after a few steps."""
    run = Run(tmp_path_factory.mktemp("log-tools"), tiny_model)
    (run.folder / "odd_rewards.py").write_text(ODD)
    rows = [json.loads(line) for line in (run.folder / "prompts.jsonl").read_text().splitlines()]
    rows[2]["reward_model"] = {"ground_truth": "raise"}
    (run.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    try:
        main = run.start("launch", "all", str(run.config), *words)
        run.wait("step 3", lambda: 3 in run.steps())
        told = run.command("tune", str(run.dir), "learner.algorithm.tis_cap=1.01", timeout=60)
        assert told.returncode == 0, told.stdout
        tuned = max(run.steps())
        run.wait("tuned steps", lambda: max(run.steps()) >= tuned + 4)
        os.kill(main.pid, signal.SIGINT)
        out, _ = main.communicate(timeout=60)
        assert main.returncode == 130, out + run.logs()
        yield run
    finally:
        run.close()


def replay(run: Run, *words: str, code: int = 0) -> dict[str, Any]:
    before = tree(run.dir)
    done = run.command("replay", str(run.dir), "--json", *words, timeout=120)
    assert done.returncode == code, done.stdout + run.logs()
    assert tree(run.dir) == before, "a replay writes nothing into its run"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_replay_of_the_whole_run_is_bitwise(done: Run, figure: Any) -> None:
    found = replay(done)
    steps = max(done.steps())
    figure(f"replay: {found['equal']} of {found['checked']} versions bitwise equal")
    assert (found["equal"], found["checked"], found["unknown"]) == (steps, steps, 0)
    assert found["first_different"] is None and found["ok"]
    late = [line["tis_capped_share"] for line in done.lines("metrics/learner.jsonl")][-3:]
    assert max(late) > 0, "the tuned cap had an effect, so a replay without it would not be equal"
    text = (done.folder / "run-replay" / "replay.txt").read_text()
    assert f"{steps} of {steps} versions bitwise equal" in text


def test_what_if_with_other_settings_from_a_checkpoint_on(done: Run) -> None:
    """`--set` wins over what was tuned; a setting of the optimizer rebuilds it around the same state."""
    last = max(done.steps())
    found = replay(done, "--from", str(last - 3), "--set", "learner.optim.lr=0.01", "--set",
                   "learner.algorithm.tis_cap=0.5", "--set", "learner.optim.weight_decay=0.1")  # fmt: skip
    before = [step for step in found["steps"] if not step["changed"]]
    after = [step for step in found["steps"] if step["changed"]]
    assert found["start"] <= last - 3 and found["checkpoint"], "it begins with a checkpoint"
    assert all(step["equal"] for step in before) and [step["step"] for step in after] == [last - 2, last - 1, last]
    assert not any(step["equal"] for step in after) and found["ok"]
    assert all(step["new"]["lr"] == 0.01 and step["old"]["lr"] == 0.001 for step in after)
    assert after[0]["new"]["weight_mean"] <= 0.5 < after[0]["old"]["weight_mean"]
    assert after[0]["new"]["entropy"] == after[0]["old"]["entropy"], "the first step is of the same weights"
    assert after[1]["new"]["entropy"] != after[1]["old"]["entropy"]
    assert 0 < found["weights"]["relative"] < 1 and found["weights"]["distance"] > 0
    text = (done.folder / "run-replay" / "replay.txt").read_text()
    assert f"what if, from step {last - 2} on: learner.optim.lr=0.01" in text and "final weights: distance" in text


def test_what_cannot_be_replayed_is_one_clear_error(done: Run) -> None:
    for words, part in (
        (["--set", "buffer.max_staleness=3"], "cannot be changed in a replay"),
        (["--from", "99999"], "the run has 1 to"),
        (["--from", "1", "--to", "1"], "the run has 1 to"),
        (["--out", str(done.dir / "inside")], "outside of its run"),
    ):
        told = done.command("replay", str(done.dir), *words, timeout=60)
        assert told.returncode == 2 and part in told.stdout and "Traceback" not in told.stdout, told.stdout


def test_a_fork_goes_on_from_its_checkpoint_as_a_run_of_its_own(done: Run) -> None:
    last = max(done.steps())
    kept = sorted(int(path.name[5:]) for path in (done.dir / "checkpoints").glob("step_*"))
    step = kept[-2]
    assert step < last
    before = tree(done.dir)
    refused = done.command("fork", str(done.dir), str(done.folder / "none"), "--step", "1", timeout=60)
    assert refused.returncode == 2 and f"there are: {', '.join(map(str, kept))}" in refused.stdout
    made = done.command("fork", str(done.dir), str(done.folder / "fork"), "--step", str(step), "--set",
                        f"learner.steps={step + 3}", timeout=60)  # fmt: skip
    assert made.returncode == 0, made.stdout
    fork = json.loads((done.folder / "fork" / "fork.json").read_text())
    commits = {line["step"]: line for line in done.lines("history.jsonl") if line["e"] == "commit"}
    assert (fork["step"], fork["parent"]) == (step, str(done.dir)) and fork["digest"] == commits[step]["digest"]
    other = copy.copy(done)
    other.dir, other.children = done.folder / "fork", []
    try:
        ran = other.command("launch", "all", str(other.dir / "config.toml"), timeout=200)
        assert ran.returncode == 0, ran.stdout + other.logs()
    finally:
        other.close()
    assert other.steps() == [step + 1, step + 2, step + 3]
    audit = other.audit()
    assert audit["exit"] == 0, audit["violations"]
    assert (audit["first_step"], audit["fork_of"], audit["doubled"], audit["lost"]) == (step + 1, str(done.dir), 0, 0)
    trained = {g for at, line in commits.items() if at <= step for g in line["groups"]}
    again = {g for line in other.lines("history.jsonl") if line["e"] == "commit" for g in line["groups"]}
    assert again and not again & trained, "nothing that its weights hold is trained again"
    assert tree(done.dir) == before, "the parent is untouched"
    assert done.audit()["exit"] == 0


def test_trace_of_trained_dropped_and_dead_groups(done: Run) -> None:
    commit = [line for line in done.lines("history.jsonl") if line["e"] == "commit"][-1]
    group = commit["groups"][0]
    trained = json.loads(done.command("trace", str(done.dir), str(group), "--json", timeout=60).stdout)
    assert [item["step"] for item in trained["training"]][-1] == commit["step"]
    assert len(trained["samples"]) == 4 and all(sample["runs"] for sample in trained["samples"])
    text = done.command("trace", str(done.dir), str(group), timeout=60).stdout
    assert f"step {commit['step']}" in text and "advantage" in text and "importance weight" in text
    assert "\ntext      " in text and "\ntuned     {" in text and (" stop: " in text or " length: " in text)
    assert len(trained["words"]["responses"]) == 4 and trained["words"]["prompt"]
    dropped = done.command("trace", str(done.dir), "5", timeout=60).stdout
    assert "DROPPED: filtered" in dropped
    dead = done.command("trace", str(done.dir), str(dead_group(done)), timeout=60).stdout
    assert "DEAD" in dead and "this prompt has no answer" in dead
    listed = done.command("trace", str(done.dir), "--dead", timeout=60).stdout
    assert f"group {dead_group(done):>6}" in listed
    step = done.command("trace", str(done.dir), "--step", str(commit["step"]), timeout=60).stdout
    assert all(f"group {number:>6}" in step for number in commit["groups"])
