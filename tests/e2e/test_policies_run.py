"""A run of two policies: both learn a game, and `kill -9` of either learner costs neither anything."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_run import ROOT, Run

pytestmark = pytest.mark.long
KUHN = ROOT / "examples" / "kuhn"
SMALL = (
    "sampling.group_size=4",
    "learner.steps=8",
    "learner.checkpoint_every=2",
    "producers.slots=16",
    "log.archive=true",
)


@pytest.fixture
def game(run: Run) -> Iterator[Run]:
    """The example with random models, in the folder of the test."""
    sys.path.insert(0, str(KUHN))
    try:
        import kuhn
    finally:
        sys.path.remove(str(KUHN))
    for file in ("kuhn.py", "kuhn.toml"):
        shutil.copy(KUHN / file, run.folder)
    run.config = run.folder / "kuhn.toml"
    kuhn.WARM_STEPS = 0
    kuhn.main(run.folder / "runs" / "kuhn-parts")
    run.dir = run.folder / "runs" / "kuhn"
    yield run
    for name in kuhn.SEATS:
        of(run, name).close()


def of(game: Run, name: str) -> Run:
    """The run of one policy."""
    inner = copy.copy(game)
    inner.dir = game.dir / name
    return inner


def learners(run: Run) -> list[int]:
    return [int(line["pid"]) for line in run.lines("processes.jsonl") if line["role"] == "learner"]


def test_kill_9_of_one_learner_and_then_of_the_other(game: Run) -> None:
    first, second = of(game, "first"), of(game, "second")
    words = [word for setting in SMALL for word in ("--set", setting)]
    launcher = game.start("launch", "all", str(game.config), *words)
    first.wait("two steps of the first policy", lambda: len(first.steps()) >= 2, timeout=300)
    os.kill(first.pid("learner"), signal.SIGKILL)
    first.wait("its new learner", lambda: len(learners(first)) == 2, timeout=120)
    second.wait("a step of the second policy", lambda: len(second.steps()) >= 1, timeout=300)
    os.kill(second.pid("learner"), signal.SIGKILL)  # it cannot have ended: the first policy is not done
    out, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, out + first.logs() + second.logs()

    done = game.command("audit", str(game.dir), "--json", timeout=60)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0 and found["ok"] and list(found["policies"]) == ["first", "second"]
    for name, run in (("first", first), ("second", second)):
        ledger = found["policies"][name]
        assert ledger["done"] and ledger["learner_starts"] >= 2
        assert ledger["trained"] == 8 * 6 and ledger["doubled"] == ledger["lost"] == ledger["over_bound"] == 0
        assert ledger["spans"] == ledger["spans_matched"]
        other = "second" if name == "first" else "first"
        turns = [turn for line in run.lines("samples.jsonl") for turn in line["others"]]
        assert turns and {policy for _, policy, _ in turns} == {other}
        published = {
            version
            for line in of(game, other).lines("metrics/weightsync.jsonl")
            if "version" in line
            for version in [line["version"]]
        }
        assert {version for _, _, runs in turns for version, _ in runs} <= published
    group = first.lines("samples.jsonl")[-1]["group"]
    story = game.command("trace", str(first.dir), str(group), timeout=60).stdout
    assert "a turn of policy second after" in story
    refused = game.command("status", str(game.dir), timeout=60)
    assert refused.returncode and "name the run of one" in refused.stdout


@pytest.mark.chaos
def test_a_stop_of_the_folder_stops_both_and_the_same_command_goes_on(game: Run) -> None:
    first, second = of(game, "first"), of(game, "second")
    words = [word for setting in SMALL for word in ("--set", setting)]
    launcher = game.start("launch", "all", str(game.config), *words)
    first.wait("a step of the first policy", lambda: len(first.steps()) >= 1, timeout=300)
    assert game.command("stop", str(game.dir), timeout=300).returncode == 0
    assert launcher.wait(timeout=60) == 0
    assert not first.living() and not second.living()
    again = game.command("launch", "all", str(game.config), *words, timeout=600)
    assert again.returncode == 0, again.stdout + first.logs() + second.logs()
    assert game.command("audit", str(game.dir), timeout=60).returncode == 0


@pytest.mark.chaos
def test_a_producer_that_restarts_gets_the_last_weights_of_a_policy_that_is_done(game: Run) -> None:
    """The first policy has one step and waits for the second, whose producer is killed after that."""
    first, second = of(game, "first"), of(game, "second")
    words = [word for setting in (*SMALL, "policies.first.learner.steps=1") for word in ("--set", setting)]
    launcher = game.start("launch", "all", str(game.config), *words)
    first.wait("its last checkpoint", (first.dir / "checkpoints" / "step_000001").exists, timeout=300)
    os.kill(second.pid("producer"), signal.SIGKILL)
    out, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, out + first.logs() + second.logs()
    assert len(second.steps()) == 8
    used = {version for line in second.lines("samples.jsonl") for _, _, runs in line["others"] for version, _ in runs}
    assert used <= {0, 1} and 1 in used
    assert game.command("audit", str(game.dir), timeout=60).returncode == 0
    assert Path(first.dir / "export").is_dir()


THREE = '''
"""The first letter of each other policy after the trained one's; a point for each that is the same."""
NAMES = ("first", "second", "third")


async def play(chat, row):
    own = await chat.say(max_new_tokens=1)
    points = 0
    for name in NAMES:
        if name != chat.policy:
            other = chat.other(name)
            other.show(row["prompt"])
            points += (await other.say(own.text, max_new_tokens=1)).text == own.text
    return float(points)
'''


@pytest.mark.chaos
def test_three_policies_in_one_run(game: Run) -> None:
    parts = game.folder / "runs" / "kuhn-parts"
    shutil.copytree(parts / "models" / "second", parts / "models" / "third")
    shutil.copy(parts / "second.jsonl", parts / "third.jsonl")
    (game.folder / "kuhn.py").write_text(THREE)
    paths = 'model.path = "runs/kuhn-parts/models/third"\ndata.path = "runs/kuhn-parts/third.jsonl"\n'
    game.config.write_text(f"{game.config.read_text()}\n[policies.third]\n{paths}")
    words = [word for setting in (*SMALL, "learner.steps=3") for word in ("--set", setting)]
    done = game.command("launch", "all", str(game.config), *words, timeout=900)
    assert done.returncode == 0, done.stdout
    found = json.loads(game.command("audit", str(game.dir), "--json", timeout=60).stdout)
    assert found["ok"] and {name: one["trained"] for name, one in found["policies"].items()} == dict.fromkeys(
        ("first", "second", "third"), 3 * 6
    )
    for name in found["policies"]:
        turns = [policy for line in of(game, name).lines("samples.jsonl") for _, policy, _ in line["others"]]
        assert set(turns) == set(found["policies"]) - {name}, "each sample hears both others"
