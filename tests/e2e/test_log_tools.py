"""Replay, what-if, rescoring and fork of a real run, and what `asyncrl trace` says of its groups.

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
from e2e_run import Run

ODD = """
def odd_reward(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "raise":
        raise ValueError("this prompt has no answer")
    return min(len(solution_str), 20) / 20
def no_fives(rewards, lengths, parts, group):
    return "a five" if group == 5 else ""
"""
STRICT = """
from odd_rewards import odd_reward
def strict(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0 if "7" in solution_str else odd_reward(data_source, solution_str, ground_truth)
def nervous(sample):
    if "7" in sample.response:
        raise ValueError("a seven")
    return 1.0
"""
SETTINGS = [
    "log.archive=true",
    "learner.checkpoint_every=2",
    "learner.checkpoint_keep=3",
    "reward_workers.retries=0",
    'buffer.filters=["odd_rewards:no_fives"]',
    'reward=[{function="odd_rewards:odd_reward"}]',
    "data.shuffle=false",
    "learner.optim.lr=1e-3",
    "learner.steps=2000",
    "producers.count=1",
]


def dead_group(run: Run) -> int:
    return next(line["g"] for line in run.lines("history.jsonl") if line["e"] == "dead")


def tree(folder: Path) -> dict[str, str]:
    """Digest of every file."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Run]:
    """A run that was tuned, and ended by Ctrl-C after a few steps."""
    run = Run(tmp_path_factory.mktemp("log-tools"), tiny_model)
    (run.folder / "odd_rewards.py").write_text(ODD)
    (run.folder / "strict_rewards.py").write_text(STRICT)
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
        again = run.command("rescore", str(run.dir), "--json", "--out", str(run.folder / "early.jsonl"), timeout=120)
        (run.folder / "early.json").write_text(again.stdout)
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


@pytest.mark.long
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
    found = replay(
        done,
        "--from",
        str(last - 3),
        "--set",
        "learner.optim.lr=0.01",
        "--set",
        "learner.algorithm.tis_cap=0.5",
        "--set",
        "learner.optim.weight_decay=0.1",
    )
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


def test_a_running_run_is_scored_again_by_its_own_functions(done: Run) -> None:
    early = json.loads((done.folder / "early.json").read_text())
    assert early["samples"] == 4 * early["groups"] > 0 and early["functions"] == ["odd_rewards:odd_reward"]
    assert (early["changed_samples"], early["failed"]) == (0, {}) and early["mean_before"] == early["mean_after"]
    assert set(early["versions"].values()) == set(early["recorded"]), "the same files are the same version"


def test_a_changed_verifier_shows_its_groups_and_the_learner_is_replayed_on_them(done: Run, figure: Any) -> None:
    before = tree(done.dir)
    scores = done.folder / "strict.jsonl"
    told = done.command(
        "rescore", str(done.dir), "--reward", "strict_rewards:strict", "--out", str(scores), "--json", timeout=120
    )
    assert told.returncode == 0, told.stdout
    found = json.loads(told.stdout)
    head, *lines = [json.loads(line) for line in scores.read_text().splitlines()]
    assert head["functions"] == ["strict_rewards:strict"] and head["versions"][""] not in head["recorded"]
    archived = {group for line in done.lines("history.jsonl") if line["e"] == "claim" for group in line["groups"]}
    assert {line["group"] for line in lines} <= archived and found["groups"] == len(lines) == 4 * found["steps"]
    changed = {line["group"] for line in lines if line["rewards"] != line["before"]}
    assert 0 < len(changed) == found["changed_groups"] < len(lines)
    assert {value for line in lines for index, value in line["rewards"].items() if value != line["before"][index]} == {
        0.0
    }
    assert found["mean_after"] < found["mean_before"]
    trained = {step["step"]: step["groups"] for step in done.lines("history.jsonl") if step["e"] == "commit"}
    replayed = replay(done, "--rewards", str(scores))
    expected = {str(step): [number for number in groups if number in changed] for step, groups in trained.items()}
    assert replayed["rescored"] == {step: groups for step, groups in expected.items() if groups}
    first = min(map(int, replayed["rescored"]))
    for step in replayed["steps"]:
        assert step["changed"] == (step["step"] >= first)
        assert step["equal"] == (step["step"] < first), "exact until the first other reward, other weights from then on"
    assert replayed["ok"] and 0 < replayed["weights"]["relative"] < 1
    text = (done.folder / "run-replay" / "replay.txt").read_text()
    assert f"rewards of {scores}" in text and f"  step {first}: groups" in text
    assert tree(done.dir) == before, "nothing is written into the run"
    figure(
        f"rescore: {found['changed_samples']} of {found['samples']} samples in {found['changed_groups']} groups, "
        f"mean {found['mean_before']:.3f} -> {found['mean_after']:.3f}; replayed from step {first} on"
    )


def test_samples_that_cannot_be_scored_are_counted_and_their_groups_keep_their_rewards(done: Run) -> None:
    scores = done.folder / "nervous.jsonl"
    told = done.command(
        "rescore", str(done.dir), "--reward", "strict_rewards:nervous", "--out", str(scores), timeout=120
    )
    assert told.returncode == 1 and "samples: raised" in told.stdout and str(scores) in told.stdout, told.stdout
    lines = [json.loads(line) for line in scores.read_text().splitlines()][1:]
    failed = {line["group"] for line in lines if line["failed"]}
    assert failed and all("ValueError: a seven" in why for line in lines for why in line["failed"].values())
    assert all(len(line["rewards"]) + len(line["failed"]) == 4 for line in lines)
    replayed = replay(done, "--rewards", str(scores), "--from", "2", "--to", "4")
    assert all(step["equal"] and not step["changed"] for step in replayed["steps"] if step["step"] <= 2)
    assert not failed & {group for groups in replayed["rescored"].values() for group in groups}
    assert any("could not be scored and keep the rewards" in note for note in replayed["notes"])


def test_what_cannot_be_scored_again_is_one_clear_error(done: Run) -> None:
    for words, part in (
        (["rescore", str(done.dir), "--judge", "slow"], "error[reward.judge] --judge: 'slow': this run has default"),
        (["rescore", str(done.dir), "--reward", "nowhere:f"], "No module named 'nowhere'"),
        (["rescore", str(done.dir), "--out", str(done.dir / "x.jsonl")], "scores go outside of the run"),
        (["replay", str(done.dir), "--rewards", str(done.config)], "error[rescore.file]"),
        (["replay", str(done.dir), "--rewards", "absent.jsonl"], "error[rescore.file]"),
    ):
        told = done.command(*words, timeout=60)
        assert told.returncode != 0 and part in told.stdout and "Traceback" not in told.stdout, told.stdout


def test_a_fork_goes_on_from_its_checkpoint_as_a_run_of_its_own(done: Run) -> None:
    last = max(done.steps())
    kept = sorted(int(path.name[5:]) for path in (done.dir / "checkpoints").glob("step_*"))
    step = kept[-2]
    assert step < last
    before = tree(done.dir)
    refused = done.command("fork", str(done.dir), str(done.folder / "none"), "--step", "1", timeout=60)
    assert refused.returncode == 2 and f"there are: {', '.join(map(str, kept))}" in refused.stdout
    made = done.command(
        "fork",
        str(done.dir),
        str(done.folder / "fork"),
        "--step",
        str(step),
        "--set",
        f"learner.steps={step + 3}",
        timeout=60,
    )
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
    audit = done.audit()
    assert audit["exit"] == 0 and audit["anchors"] > len(commits) / 2  # of checkpoints and archived batches


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
