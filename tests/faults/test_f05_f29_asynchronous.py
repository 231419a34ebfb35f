"""F5 and F29 with asynchronous checkpoints: kill -9 and SIGTERM while one is written beside the training.

The bits are those of a run with checkpoints within the step, in which nothing was killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from learner_lab import Recorded

from learners.checkpoints import checkpoint

Figure = Callable[[str], None]
ASYNC = "learner.checkpoint_async=true"
STAGES = ["begin", "shard", "state", "manifest", "rename", "renamed"]
STEPS = 10
GRACE_S = 20.0  # of Kubernetes: 30 s


@pytest.mark.slow
def test_f05_killed_at_every_stage_of_a_background_write(recorded: Recorded, tmp_path: Path, figure: Figure) -> None:
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "killed", steps=STEPS, extra=ASYNC).serve() as lab:
        assert lab.end_of(lab.learner(failpoint="learner.after_checkpointed:kill:1")) == -9
        root = lab.run.checkpoints
        beyond = 0  # kills that met a step after the one that was written
        for stage in STAGES:
            assert lab.end_of(lab.learner(failpoint=f"learner.checkpoint_{stage}:kill:1")) == -9, lab.tail()
            assert f"failpoint learner.checkpoint_{stage}: kill" in lab.said()
            found = checkpoint.newest(root, say=pytest.fail)
            assert found is not None and found[0].step == (4 if stage == "renamed" else 2), stage
            hidden = root / ".step_000004.tmp"
            assert hidden.exists() is (stage != "renamed")
            if stage in ("state", "manifest", "rename"):
                whole = (hidden / "shard_00000.safetensors").read_bytes()  # what the next learner must not trust
                (hidden / "shard_00000.safetensors").write_bytes(whole[: len(whole) // 2])
            beyond += lab.history("claim", "commit")[-1]["step"] > 4
        lab.assert_ends(lab.learner(), wanted)
        assert not list(root.glob(".step_*"))
    starts = [line["step"] for line in lab.history("register")]
    figure(f"killed at {len(STAGES)} stages of a background write, {beyond} times in a later step, starts {starts}")
    assert starts == [0, *[2] * len(STAGES), 4]


@pytest.mark.slow
def test_f29_sigterm_while_one_is_written(recorded: Recorded, tmp_path: Path, figure: Figure) -> None:
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "asked", steps=STEPS, extra=ASYNC + ";learner.checkpoint_every=3").serve() as lab:
        pid = lab.learner(failpoint="learner.checkpoint_manifest:2.0:1")  # a slow disk
        lab.wait("a background write", (lab.run.checkpoints / ".step_000003.tmp" / "state.json").exists)
        os.kill(pid, signal.SIGTERM)
        asked = time.monotonic()
        assert lab.end_of(pid, GRACE_S) == 0, lab.tail()
        took = time.monotonic() - asked
        committed = lab.committed()
        found = checkpoint.newest(lab.run.checkpoints, say=pytest.fail)
        assert found is not None and found[0].step == committed >= 3
        assert 3 in checkpoint.steps_in(lab.run.checkpoints)  # the one under way was waited for
        lab.finish()
        lab.assert_accounted(replayed_steps=0)
        assert lab.result() == wanted
    figure(f"SIGTERM in a background write: exit 0 after {took:.1f} s, checkpoint of step {committed}, 0 replayed")
