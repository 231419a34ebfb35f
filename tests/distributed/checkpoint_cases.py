"""Asynchronous checkpoints of a gang: writers that talk to each other while their ranks train.

`ranks` runs `run_all` on two ranks, `test_checkpoint_ranks.py` on one. The writer of the last rank is held at its shard
until its rank has trained the next step, collectives and all; then it fails once, alone.
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import backend_contract as contract
import pytest

from asyncrl.runtime.run_dir import RunDir
from learners.checkpoints import checkpoint
from learners.checkpoints.saving import Checkpoints
from learners.gang.gang import Gang
from learners.step.update import train_step


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Four steps with a checkpoint after each of the first three; that of step 2 fails on the last rank."""
    config = contract.make_config(
        model, extra=f"learner.checkpoint_async=true;learner.checkpoint_keep=4;run.dir={out / 'run'}"
    )
    backend = contract.make_backend(config, gang)
    durable, said, fails = list[int](), list[str](), {2: OSError(errno.ENOSPC, "No space left on device")}
    saver = Checkpoints(
        config, gang=gang, backend=backend, durable=lambda state: durable.append(state.step), say=said.append
    )
    trained, now = threading.Event(), [0]

    def failpoint(name: str) -> None:
        if name != "learner.checkpoint_shard" or gang.rank != gang.size - 1:
            return
        assert trained.wait(60)
        if now[0] in fails:
            raise fails.pop(now[0])

    def train(step: int) -> None:
        share = contract.cut(14, step, config, gang)
        train_step(share, backend=backend, gang=gang, config=config.learner, step=step)

    failures, running = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "failpoint", failpoint)
        train(1)
        for step in (1, 2, 3):
            trained.clear()
            now[0] = step
            state = checkpoint.State(step=step, ledger=f"ledger {step}", ranks=gang.size) if gang.lead else None
            saver.save(step, state, fence=lambda: None)
            train(step + 1)
            gang.barrier()
            running.append(not saver.has_ended())
            trained.set()
            saver.settle()
            failures.append([int(text) for text in gang.gather(str(saver.failures).encode())])
    saver.close()
    root = RunDir(config.run_dir).checkpoints
    return {
        "durable": durable,
        "said": said,
        "failures": failures,
        "running": running,
        "steps": checkpoint.steps_in(root),
        "files": sorted(path.name for path in root.iterdir()),
    }
