"""F5: a checkpoint that was cut off or damaged is not used, the loader says why, and the one before it serves.

Kills at the six stages of writing stand in test_f03_f04_f06_learner_killed.py.
"""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest
from learner_lab import Recorded, seed_of

from asyncrl.errors import AsyncRLError
from learners.checkpoints import checkpoint

STEPS = 8
FILES = ("shard_00000.safetensors", "state.json", "manifest.json")


def damages(data: bytes, rng: random.Random) -> dict[str, bytes | None]:
    """Ways to spoil a file; None: it is gone."""
    place = rng.randrange(len(data))
    flipped = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    return {
        "cut": data[: rng.randrange(len(data))],
        "emptied": b"",
        "flipped": flipped,
        "longer": data + b"\0",
        "gone": None,
        "zeroed": bytes(len(data)),
    }


@pytest.mark.slow
def test_f05_the_one_before_serves_and_the_bits_are_the_same(recorded: Recorded, tmp_path: Path) -> None:
    rng = seed_of("damage")
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "damaged", steps=STEPS).serve() as lab:
        assert lab.end_of(lab.learner(failpoint="learner.before_checkpointed:kill:2")) == -9
        root = lab.run.checkpoints
        assert checkpoint.steps_in(root) == [4, 2]
        tried = 0
        for name in FILES:
            path = root / "step_000004" / name
            whole = path.read_bytes()
            for how, data in damages(whole, rng).items():
                path.unlink() if data is None else path.write_bytes(data)
                said: list[str] = []
                found = checkpoint.newest(root, say=said.append)
                assert found is not None and found[0].step == 2, (name, how)
                assert len(said) == 1 and "step_000004 is skipped" in said[0], (name, how)
                path.write_bytes(whole)
                tried += 1
        manifest = root / "step_000004" / "manifest.json"
        whole = manifest.read_bytes()
        for place, bit in itertools.product(range(len(whole)), range(8)):
            manifest.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
            assert checkpoint.find_problem(manifest.parent), (place, bit)
        manifest.write_bytes(whole)
        assert checkpoint.find_problem(manifest.parent) == ""
        (root / "step_000004" / rng.choice(FILES)).write_bytes(b"\0" * 100)
        lab.finish()  # a real learner: it starts at step 2, the buffer still has the batches of 3 and 4
        assert "checkpoint step_000004 is skipped" in lab.said()
        assert [line["step"] for line in lab.history("register")] == [0, 2]
        lab.assert_accounted()
        assert lab.result() == wanted
        print(f"{tried} damages of {len(FILES)} files, each noticed")
        for step in checkpoint.steps_in(root):  # where all are damaged, nobody starts afresh in silence
            shutil.copy(root / f"step_{step:06d}" / "state.json", root / f"step_{step:06d}" / "manifest.json")
        with pytest.raises(AsyncRLError) as caught:
            checkpoint.newest(root, say=str)
        assert caught.value.code == "learner.checkpoint"
        assert lab.end_of(lab.learner()) == 1 and "error[learner.checkpoint]" in lab.said()
