"""F26: two learners by mistake. The second names the first and ends; with --takeover the first one is fenced.

The first is a zombie: it is stopped, misses its own replacement, and wakes with a message (or a rename) under way.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from learner_lab import Recorded
from test_f09_learner_outlives_the_store import STEPS, stopped

from learners.checkpoints import checkpoint

#: Where a zombie stops; when it wakes, its next word to anybody is late.
PLACES = [
    "before_commit",
    "checkpoint_rename",
    "before_checkpointed",
    "after_claim",
    "checkpoint_begin",
    "after_commit",
]


@pytest.mark.slow
def test_f26_the_second_one_names_the_first(recorded: Recorded, tmp_path: Path) -> None:
    with recorded.lab(tmp_path, steps=STEPS).serve() as lab:
        first = lab.learner(failpoint="learner.after_claim:3:2")  # it trains slowly, its heart beats
        lab.wait("its registration", lambda: bool(lab.history("register")))
        second = lab.learner()
        assert lab.end_of(second) == 75, lab.tail()
        said = lab.said()
        assert "error[learner.duplicate]" in said and f"pid {first} on" in said and "was heard from" in said
        assert lab.end_of(first) == 0, lab.tail()
        lab.assert_accounted(learner_starts=1)


@pytest.mark.long
@pytest.mark.slow
def test_f26_zombies_wake_fenced(recorded: Recorded, tmp_path: Path) -> None:
    wanted = recorded.reference(tmp_path, steps=STEPS)
    lab = recorded.lab(tmp_path / "zombies", steps=STEPS).serve()
    zombies: list[int] = []
    try:
        for place in PLACES:
            words = ["--takeover"] if zombies else []
            pid = lab.learner(*words, failpoint=f"learner.{place}:stop:1")
            lab.wait(f"the stop at {place}", lambda at=pid: stopped(lab, at))
            zombies.append(pid)
            if len(zombies) > 1:  # the one before wakes while this one owns the run
                before = checkpoint.newest(lab.run.checkpoints)
                os.kill(zombies[-2], signal.SIGCONT)
                assert lab.end_of(zombies[-2]) == 75, (PLACES[len(zombies) - 2], lab.tail())
                assert checkpoint.newest(lab.run.checkpoints) == before  # it has not touched what is not its own
        last = lab.learner("--takeover")
        assert lab.end_of(last) == 0, lab.tail()
        os.kill(zombies[-1], signal.SIGCONT)
        assert lab.end_of(zombies[-1]) == 75, lab.tail()
        assert lab.said().count("error[fenced]") == len(zombies)
        epochs = [line["epoch"] for line in lab.history("register", "claim", "commit")]
        assert epochs == sorted(epochs)  # no word of an older epoch was taken
        lab.assert_accounted(learner_starts=len(PLACES) + 1)
        assert lab.result() == wanted
        print(f"{len(zombies)} zombies, {len(zombies)} exits with 75, same bits")
    finally:
        lab.close()
