"""F3, F4, F6: the learner is killed once at each of its fail-points; the run ends with the bits of an intact one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from learner_lab import Lab, Recorded

from asyncrl.runtime.failpoints import SITES

ROUND = 6  # steps that one round of kills gets into checkpoints
#: Checkpoints are made every 2 steps: what is written is behind the kill, or not.
BEFORE_STEP = ["at_register", "after_register", "writing_rows", "after_claim"]
BEFORE_CHECKPOINT = ["after_step", "before_commit", "after_commit"]
WRITING = ["begin", "shard", "state", "manifest", "rename", "renamed"]
AFTER_CHECKPOINT = ["before_checkpointed", "after_checkpointed"]
AT_THE_END = ["at_export", "at_goodbye"]
TURNS = {"learner.at_turn", "learner.after_turn"}  # tests/e2e/test_device_turns.py kills there

Figure = Callable[[str], None]


def kill_at(lab: Lab, site: str) -> None:
    """One learner that does not get past this place."""
    before = lab.said().count(f"failpoint learner.{site}: kill")
    code = lab.end_of(lab.learner(failpoint=f"learner.{site}:kill:1"))
    assert code == -9, f"{site}: {code}\n{lab.tail()}"
    assert lab.said().count(f"failpoint learner.{site}: kill") == before + 1


def claims_of(lab: Lab, epoch: int) -> list[dict[str, Any]]:
    return [line for line in lab.history("claim") if line["epoch"] == epoch]


@pytest.mark.slow
def test_f03_f04_f06_killed_at_every_place(recorded: Recorded, tmp_path: Path, figure: Figure) -> None:
    killed_everywhere(recorded, tmp_path, figure, rounds=1)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_f03_f04_f06_killed_at_every_place_ten_times(recorded: Recorded, tmp_path: Path, figure: Figure) -> None:
    killed_everywhere(recorded, tmp_path, figure, rounds=10)


def killed_everywhere(recorded: Recorded, tmp_path: Path, figure: Figure, *, rounds: int) -> None:
    steps = ROUND * rounds + 2
    wanted = recorded.reference(tmp_path, steps=steps)
    lab = recorded.lab(tmp_path / "killed", steps=steps).serve()
    places = [*BEFORE_STEP, *BEFORE_CHECKPOINT, *(f"checkpoint_{stage}" for stage in WRITING), *AFTER_CHECKPOINT]
    assert {f"learner.{place}" for place in (*places, *AT_THE_END)} == {
        name for name in SITES.keys() - TURNS if name.startswith("learner.")
    }
    try:
        for place in places * rounds:
            kill_at(lab, place)
            saved = max((int(path.name[5:]) for path in lab.run.checkpoints.glob("step_*")), default=0)
            epoch = max((line["epoch"] for line in lab.history("register")), default=0)
            status = lab.status()
            if place == "after_claim":  # F3: it is in a batch, nothing was trained
                assert (status["version"], status["ledger"]["claimed"]) == (saved, 2)
            if place == "after_commit":  # F4: trained, not in a checkpoint
                assert (status["version"], status["ledger"]["trained"]) == (saved + 1, 2)
            if place in ("checkpoint_renamed", "before_checkpointed"):  # F6: in a checkpoint, the buffer does not know
                assert status["ledger"]["trained"] == 4 and saved == status["version"]
                kill_at(lab, "after_claim")
                assert [line["replayed"] for line in claims_of(lab, epoch + 1)] == [False]
            elif place in ("after_claim", *BEFORE_CHECKPOINT, "checkpoint_shard"):
                kill_at(lab, "after_claim")  # what the dead one had claimed comes back first, as it was
                first = claims_of(lab, epoch + 1)[0]
                assert first["replayed"] and first["step"] == saved + 1
                assert first["groups"] == next(line["groups"] for line in claims_of(lab, epoch))
        for place in AT_THE_END:
            kill_at(lab, place)
        lab.assert_ends(lab.learner(), wanted)
        figure(f"killed at {len(places) + len(AT_THE_END)} places x {rounds}, {len(lab.learners)} learners, same bits")
    finally:
        lab.close()
