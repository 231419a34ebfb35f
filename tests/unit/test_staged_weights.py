"""Weights on their way into an engine of another program: files, room, digests, labels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import AsyncRLError
from asyncrl.wire import Manifest, Tensor
from producers.engines.staged_weights import PREFIX, Labels, StagedWeights
from weightsync.plan.buckets import TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest

SPECS = [
    TensorSpec("a", "F32", (5,)),
    TensorSpec("b", "BF16", (3,)),
    TensorSpec("c", "F32", (30,)),
    TensorSpec("d", "F32", (2, 2)),
]


def version_of(number: int, *, seed: int = 0) -> tuple[Manifest, tuple[Tensor, ...], list[bytes]]:
    plan = plan_buckets(SPECS, bucket_bytes=64)
    random = np.random.default_rng((number, seed))
    buckets = [random.integers(0, 256, size, dtype=np.uint8).tobytes() for size in plan.bucket_bytes]
    groups = group_by_bucket(plan.tensors, len(buckets))
    digests = tuple(bucket_digest(group, bucket) for group, bucket in zip(groups, buckets, strict=True))
    return Manifest(number, plan.digest, plan.bucket_bytes, digests, version_digest(digests)), plan.tensors, buckets


def staged(tmp_path: Path) -> StagedWeights:
    return StagedWeights(tmp_path / "scratch", folders=(tmp_path / "shm",))


def put(weights: StagedWeights, number: int, *, seed: int = 0, lent: bool = False) -> list[bytes]:
    manifest, tensors, buckets = version_of(number, seed=seed)
    weights.begin(manifest, tensors)
    for place, data in enumerate(buckets):
        source = memoryview(data)
        if lent:
            room = weights.room(place)
            assert room is not None
            room[:] = data
            source = room
        assert weights.apply(place, source) == manifest.bucket_digests[place]
    return buckets


@pytest.mark.parametrize("lent", [False, True])
def test_a_version_goes_into_a_file_and_is_read_back(tmp_path: Path, lent: bool) -> None:
    weights = staged(tmp_path)
    assert not weights.read(0, memoryview(bytearray(64)))
    buckets = put(weights, 3, lent=lent)
    update = weights.complete()
    raw = update.path.read_bytes()
    for tensor in update.tensors:
        assert raw[update.place(tensor) :][: tensor.nbytes] == buckets[tensor.bucket][tensor.offset :][: tensor.nbytes]
        assert update.place(tensor) % 2 == 0
    weights.commit()
    into = bytearray(len(buckets[1]))
    assert weights.read(1, memoryview(into))
    assert bytes(into) == buckets[1]
    assert not weights.read(1, memoryview(bytearray(7)))
    assert not weights.read(len(buckets), memoryview(into))


def test_what_is_lent_is_not_copied_and_damage_shows(tmp_path: Path) -> None:
    """The digest is of what lies in the file, also where somebody wrote there after the transport."""
    weights = staged(tmp_path)
    manifest, tensors, buckets = version_of(1)
    weights.begin(manifest, tensors)
    room = weights.room(0)
    assert room is not None
    room[:] = buckets[0]
    room[0] ^= 1
    assert weights.apply(0, room) != manifest.bucket_digests[0]
    room[0] ^= 1
    assert weights.apply(0, room) == manifest.bucket_digests[0]
    assert weights.pending_version().path.read_bytes()[: len(buckets[0])] == buckets[0]


def test_two_files_take_turns_and_the_older_version_stays_until_the_next_but_one(tmp_path: Path) -> None:
    weights = staged(tmp_path)
    paths = []
    rooms = []
    for number in range(5):
        first = put(weights, number, lent=True)[0]
        room = weights.room(0)
        assert room is not None
        rooms.append((room, first))
        paths.append(weights.pending_version().path)
        if number:
            assert bytes(rooms[number - 1][0]) == rooms[number - 1][1], "the version in force changed"
        weights.commit()
        if number:
            assert bytes(rooms[number - 1][0]) == rooms[number - 1][1], "it is passed on until the next update begins"
    assert len(set(paths)) == 2
    assert paths[0] == paths[2] == paths[4]
    weights.close()
    assert not list((tmp_path / "shm").iterdir())


def test_an_abort_leaves_the_version_in_force_and_gives_its_file_up(tmp_path: Path) -> None:
    weights = staged(tmp_path)
    held = put(weights, 0)
    weights.commit()
    put(weights, 1)
    weights.commit()
    late = version_of(2)[2]
    manifest, tensors, _ = version_of(2)
    weights.begin(manifest, tensors)
    path, room = weights.pending_version().path, weights.room(0)
    weights.abort()
    assert room is not None
    room[:] = late[0]  # a transport that did not hear of the abort
    assert not path.exists()
    with pytest.raises(AsyncRLError, match="no update"):
        weights.apply(0, late[0])
    held = put(weights, 2, seed=1)
    assert weights.pending_version().path != path
    weights.commit()
    into = bytearray(len(held[0]))
    assert weights.read(0, memoryview(into))
    assert bytes(into) == held[0]


def test_refusals(tmp_path: Path) -> None:
    weights = staged(tmp_path)
    manifest, tensors, buckets = version_of(0)
    with pytest.raises(AsyncRLError, match="no update is under way"):
        weights.commit()
    weights.begin(manifest, tensors)
    weights.apply(0, buckets[0])
    with pytest.raises(AsyncRLError, match="commit without buckets"):
        weights.commit()
    with pytest.raises(AsyncRLError, match="planned"):
        weights.apply(1, buckets[1][:-1])
    with pytest.raises(AsyncRLError, match="no bucket 9"):
        weights.room(9)
    adapter = Manifest(
        1, manifest.plan, manifest.bucket_bytes, manifest.bucket_digests, manifest.digest, encoding="adapter"
    )
    with pytest.raises(AsyncRLError) as refused:
        weights.begin(adapter, tensors)
    assert refused.value.code == "sync.plan"


def test_no_room_is_an_error_and_the_next_folder_is_tried(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    manifest, tensors, _ = version_of(0)
    with pytest.raises(AsyncRLError) as refused:
        StagedWeights(tmp_path, folders=(blocked,)).begin(manifest, tensors)
    assert refused.value.code == "disk.full"
    weights = StagedWeights(tmp_path, folders=(blocked, tmp_path / "scratch"))
    weights.begin(manifest, tensors)
    assert weights.pending_version().path.parent == tmp_path / "scratch"


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    folder = tmp_path / "shm"
    folder.mkdir()
    stale = folder / f"{PREFIX}{os.getuid()}-{gone.pid}-1-1"
    mine = folder / f"{PREFIX}{os.getuid()}-{os.getpid()}-1-1"
    for path in (stale, mine):
        path.write_bytes(b"x")
    staged(tmp_path)
    assert not stale.exists()
    assert mine.exists()


def test_labels_are_unique_and_spans_become_runs() -> None:
    labels = Labels()
    first, second, again = labels.new(7), labels.new(8), labels.new(7)
    assert len({first, second, again}) == 3
    assert labels.runs([(first, 0, 2), (second, 2, 3), (again, 3, 5)], 5) == ((7, 2), (8, 1), (7, 2))
    assert labels.runs([(first, 0, 2), (again, 2, 5)], 5) == ((7, 5),)
    assert labels.runs([], 0) == ()
    for spans in (
        [(first, 0, 2)],
        [(first, 0, 2), (second, 3, 5)],
        [(first, 0, 3), (second, 2, 5)],
        [("9.9", 0, 5)],
        [(first, 0, 6)],
    ):
        with pytest.raises(AsyncRLError) as broken:
            labels.runs(spans, 5)
        assert broken.value.code == "engine.broken"
