"""F23: the disk is full: training goes on, the failure is loud, earlier checkpoints are whole; several end it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from learner_lab import Recorded

from learners.checkpoints import checkpoint

STEPS = 8


@pytest.mark.slow
def test_f23_one_failure_costs_nothing(recorded: Recorded, tmp_path: Path) -> None:
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "once", steps=STEPS).serve() as lab:
        code = lab.end_of(lab.learner(failpoint="learner.checkpoint_shard:enospc:2,learner.checkpoint_state:enospc:2"))
        assert code == 0, lab.tail()
        failures = {line["step"]: line["checkpoint_failures"] for line in lab.lines()}
        # A line is written before the checkpoint of its step: a failure shows in the next one.
        assert [failures[step] for step in (3, 4, 5, 7)] == [0, 0, 1, 2]
        assert lab.said().count("ERROR: checkpoint of step") == 2
        assert "No space left on device" in lab.said() and "The newest checkpoint is of step 2" in lab.said()
        assert checkpoint.steps_in(lab.run.checkpoints) == [8, 2]  # the failed ones left nothing behind
        assert sorted(path.name for path in lab.run.checkpoints.iterdir()) == ["step_000002", "step_000008"]
        lab.assert_accounted()
        assert lab.result() == wanted


@pytest.mark.slow
def test_f23_three_in_a_row_end_the_learner(recorded: Recorded, tmp_path: Path) -> None:
    """By the kernel: no file of this process may grow beyond a size that a checkpoint's tensors exceed."""
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "limit", steps=STEPS, extra="learner.checkpoint_failures=2").serve() as lab:
        assert lab.end_of(lab.learner(failpoint="learner.after_checkpointed:kill:1")) == -9
        whole = {path.name: path.read_bytes() for path in (lab.run.checkpoints / "step_000002").iterdir()}
        limit = len(whole["shard_00000.safetensors"]) * 3 // 4
        code = lab.end_of(lab.learner(limits={"RLIMIT_FSIZE": limit}))
        assert code == 69, lab.tail()
        assert "error[disk.full]" in lab.said() and "free space in the run folder" in lab.said()
        assert "File too large" in lab.said() and "Traceback" not in lab.said()
        assert lab.committed() == 6  # it trained on between the failures at steps 4 and 6
        left = lab.run.checkpoints / "step_000002"
        assert {path.name: path.read_bytes() for path in left.iterdir()} == whole
        assert [path.name for path in lab.run.checkpoints.iterdir()] == ["step_000002"]
        lab.assert_ends(lab.learner(), wanted)


@pytest.mark.slow
def test_f23_a_small_file_system(recorded: Recorded, tmp_path: Path) -> None:
    """By a real full disk, where this machine lets us mount one."""
    wanted = recorded.reference(tmp_path, steps=STEPS)
    lab = recorded.lab(tmp_path / "small", steps=STEPS, extra="learner.checkpoint_keep=1").serve()
    shard = 0
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(lab.run.checkpoints)]
    if subprocess.run(mount, capture_output=True, timeout=60, check=False).returncode:
        lab.close()
        pytest.skip("no right to mount a file system")
    try:
        assert lab.end_of(lab.learner(failpoint="learner.after_checkpointed:kill:1")) == -9
        shard = checkpoint.folder_size(lab.run.checkpoints / "step_000002")
        filler = lab.run.checkpoints / "filler"
        filler.write_bytes(bytes((4 << 20) - shard - shard // 2))  # the pre-check sees that another one has no room
        pid = lab.learner()
        lab.wait("a failure", lambda: "bytes are free, the last checkpoint has" in lab.said())
        filler.unlink()
        lab.assert_ends(pid, wanted)
    finally:
        lab.close()
        subprocess.run(["umount", str(lab.run.checkpoints)], capture_output=True, timeout=60, check=False)
