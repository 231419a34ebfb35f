"""An engine that loads versions from its publisher's slots: locks, links, and what is left of a killed reader."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import WorkError
from asyncrl.wire import Manifest
from producers.engines.staged_weights import PREFIX, StagedWeights
from weightsync.plan.buckets import TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import version_digest
from weightsync.staging import MOST_SLOTS, Slot, Staging

PLAN = plan_buckets([TensorSpec("a", "F32", (5,)), TensorSpec("b", "BF16", (30,))], bucket_bytes=32)
READER = """
import sys, time
from producers.engines.staged_weights import MappedSlot
from pathlib import Path
slot = MappedSlot(Path(sys.argv[1]), int(sys.argv[2]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    made = Staging(tmp_path / "run", folders=[tmp_path / "shm"])
    yield made
    made.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[StagedWeights]:
    made = StagedWeights(tmp_path / "scratch", folders=[tmp_path / "shm"])
    yield made
    made.close()


def fill(staging: Staging, value: int) -> tuple[Slot, Manifest]:
    slot, digests = staging.fill(PLAN, [(one.name, np.full(one.nbytes, value, np.uint8)) for one in PLAN.tensors])
    return slot, Manifest(value, PLAN.digest, PLAN.bucket_bytes, digests, version_digest(digests))


def take(engine: StagedWeights, slot: Slot, manifest: Manifest) -> None:
    """What a transfer does before the commit."""
    assert engine.begin_mapped(slot.path, manifest, PLAN.tensors)
    for number, digest in enumerate(manifest.bucket_digests):
        assert engine.room(number) is None
        assert engine.apply(number, b"") == digest


def own_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{PREFIX}*") if path.stat().st_nlink == 1]


def bytes_of(engine: StagedWeights) -> set[int]:
    update = engine.complete()
    data, groups = update.path.read_bytes(), group_by_bucket(PLAN.tensors, len(PLAN.bucket_bytes))
    return {value for group in groups for one in group for value in data[update.place(one) :][: one.nbytes]}


def test_a_slot_is_kept_until_the_commit_and_used_again_after_it(
    staging: Staging, engine: StagedWeights, tmp_path: Path
) -> None:
    first, manifest = fill(staging, 1)
    take(engine, first, manifest)
    assert not own_files(tmp_path / "shm"), "no copy"
    others = [fill(staging, value)[0] for value in (2, 3, 4)]
    assert first not in others and bytes_of(engine) == {1}
    engine.commit()
    into = memoryview(bytearray(PLAN.bucket_bytes[0]))
    assert engine.read(0, into) and set(into) == {1}
    assert fill(staging, 5)[0] is first
    assert not engine.read(0, into), "its bytes are of another version now"
    take(engine, *fill(staging, 6))
    engine.abort()
    assert len(list((tmp_path / "shm").glob(f"{PREFIX}*"))) == 1, "that of the current version"


def test_a_slot_that_readers_keep_is_replaced_at_the_limit(staging: Staging, tmp_path: Path) -> None:
    """Such as those of generators that are stopped: their memory is theirs, the publisher goes on."""
    readers = [StagedWeights(tmp_path / "scratch", folders=[tmp_path / "shm"]) for _ in range(MOST_SLOTS)]
    slots = []
    for number, reader in enumerate(readers, start=1):
        slot, manifest = fill(staging, number)
        take(reader, slot, manifest)
        slots.append(slot)
    for value in (7, 8):
        fill(staging, value)
    assert [bytes_of(reader) for reader in readers] == [{1}, {2}, {3}, {4}]
    assert not slots[0].path.exists() and slots[-1].path.exists()
    for reader in readers:
        reader.commit()
        reader.close()
    assert len(list((tmp_path / "shm").iterdir())) == MOST_SLOTS


def test_a_slot_that_is_written_cannot_be_read(staging: Staging, engine: StagedWeights) -> None:
    slot, manifest = fill(staging, 1)
    fill(staging, 2)
    assert staging.take(PLAN) is slot
    with pytest.raises(WorkError, match="overwriting"):
        engine.begin_mapped(slot.path, manifest, PLAN.tensors)
    assert not list(slot.path.parent.glob(f"{PREFIX}*"))


def test_what_is_no_slot_is_copied(staging: Staging, engine: StagedWeights, tmp_path: Path) -> None:
    slot, manifest = fill(staging, 1)
    elsewhere, small = tmp_path / "asyncrl-elsewhere", slot.path.with_name("asyncrl-small")
    elsewhere.write_bytes(slot.path.read_bytes())
    small.write_bytes(b"x")
    link = slot.path.with_name("asyncrl-link")
    link.symlink_to(slot.path)
    for path in (elsewhere, small, link, slot.path.with_name("asyncrl-none")):
        assert not engine.begin_mapped(path, manifest, PLAN.tensors)
    assert not list(slot.path.parent.glob(f"{PREFIX}*"))


def test_own_files_are_removed_once_slots_are_used(staging: Staging, engine: StagedWeights, tmp_path: Path) -> None:
    for value in (1, 2):
        slot, manifest = fill(staging, value)
        engine.begin(manifest, PLAN.tensors)
        for number, data in enumerate(slot.buckets(PLAN.bucket_bytes)):
            assert engine.apply(number, data) == manifest.bucket_digests[number]
        engine.commit()
    assert len(own_files(tmp_path / "shm")) == 2
    take(engine, *fill(staging, 3))
    engine.commit()
    assert not own_files(tmp_path / "shm")


def test_a_killed_reader_keeps_no_slot(staging: Staging) -> None:
    slot, _ = fill(staging, 1)
    command = [sys.executable, "-c", READER, str(slot.path), str(slot.size)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "locked\n"
        fill(staging, 2)
        assert fill(staging, 3)[0] is not slot
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
        assert fill(staging, 4)[0] is slot
    finally:
        child.kill()
