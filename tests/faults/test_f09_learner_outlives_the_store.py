"""F9, the learner's side: the buffer forgets everything, or goes back in time, while the learner trains on.

The learner makes its weights durable, registers again with what they hold, and goes on: nothing is trained twice, only
generation is done again. Another learner that took over is something else: that is F26.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from learner_lab import B, Lab, Recorded

STEPS = 9


def stopped(lab: Lab, pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop_at(lab: Lab, place: str, *counts: int) -> int:
    """A learner that stops itself (SIGSTOP) when it passes the place for these times; here it has for the first."""
    pid = lab.learner(failpoint=",".join(f"learner.{place}:stop:{count}" for count in counts))
    lab.wait("the learner to stop", lambda: stopped(lab, pid))
    return pid


#: place -> (its pass, step of the weights by the time the buffer is asked again)
PLACES = {"after_claim": (5, 5), "before_commit": (5, 5), "after_commit": (5, 5), "before_checkpointed": (2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_f09_all_is_lost_and_the_learner_goes_on(recorded: Recorded, tmp_path: Path, place: str) -> None:
    wanted = recorded.reference(tmp_path, steps=STEPS)
    count, step = PLACES[place]
    with recorded.lab(tmp_path / "lost", steps=STEPS).serve() as lab:
        pid = stop_at(lab, place, count)
        lab.lose_store()
        lab.serve("buffer")
        assert lab.status()["ledger"]["issued"] == 0
        os.kill(pid, signal.SIGCONT)
        lab.wait("the second registration", lambda: len(lab.history("register")) == 2)
        again = lab.history("register")[1]
        assert (again["epoch"], again["step"], again["pid"]) == (2, step, pid)
        assert f"step_{step:06d}" in {path.name for path in lab.run.checkpoints.iterdir()}  # durable before it was said
        assert lab.status()["ledger"]["retired"] == step * B
        lab.produce(version=step, count=(STEPS - step) * B)
        lab.assert_ends(pid, wanted, learner_starts=2)  # the contents of a group depend on its number alone


@pytest.mark.slow
def test_f09_an_older_copy_of_the_store_is_noticed(recorded: Recorded, tmp_path: Path) -> None:
    """As a Redis that lost its last seconds: the epoch is the same, the committed step is lower."""
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "older", steps=STEPS, extra="learner.checkpoint_every=100").serve() as lab:
        pid = stop_at(lab, "after_commit", 2, 4)
        lab.kill_service("buffer")
        older = tmp_path / "copy"
        for name in ("store", "segments"):
            shutil.copytree(lab.run.root / name, older / name)
        lab.serve("buffer")
        os.kill(pid, signal.SIGCONT)  # it stops itself again, two steps later
        lab.wait("two steps more", lambda: lab.committed() == 4 and stopped(lab, pid))
        lab.kill_service("buffer")
        for name in ("store", "segments"):
            shutil.rmtree(lab.run.root / name)
            shutil.copytree(older / name, lab.run.root / name)
        lab.serve("buffer")
        assert lab.status()["version"] == 2
        os.kill(pid, signal.SIGCONT)
        assert lab.end_of(pid) == 0, lab.tail()
        registered = lab.history("register")
        assert len(registered) == 2 and registered[1]["step"] >= 4 and registered[1]["epoch"] == 2
        lab.assert_accounted()
        assert lab.result() == wanted


@pytest.mark.slow
def test_f09_lost_with_the_learner_too(recorded: Recorded, tmp_path: Path) -> None:
    """Store and learner are gone: the checkpoint's ledger alone keeps what was trained from being trained again."""
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "both", steps=STEPS).serve() as lab:
        assert lab.end_of(lab.learner(failpoint="learner.after_commit:kill:5")) == -9  # the checkpoint is of step 4
        assert lab.end_of(lab.learner(failpoint="learner.after_register:kill:1")) == -9  # epoch 2 is in no checkpoint
        lab.lose_store()
        lab.serve("buffer")
        pid = lab.learner()
        lab.wait("the registration", lambda: len(lab.history("register")) == 3)
        assert lab.history("register")[2]["epoch"] == 3  # the new store knows of no epoch, the run folder does
        lab.produce(version=4, count=(STEPS - 4) * B)
        lab.assert_ends(pid, wanted)
