"""Staging: copies and digests on all cores, slots that are never taken from who reads them, no room, no leftovers."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import Unavailable
from weightsync import copy_digest as copying
from weightsync.copy_digest import Crew, Pieces, copy_digest, digest_all
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import PIECE_BYTES, Digest, digest_tensors
from weightsync.staging import MOST_SLOTS, Slot, Staging

PLAN = plan_buckets([TensorSpec("a", "F32", (3,)), TensorSpec("b", "BF16", (5, 2))], bucket_bytes=16)


def chunks(value: int) -> list[tuple[str, np.ndarray]]:
    return [(tensor.name, np.full(tensor.nbytes, value, dtype=np.uint8)) for tensor in PLAN.tensors]


def stage(staging: Staging, value: int) -> Slot:
    return staging.fill(PLAN, chunks(value))[0]


def first_byte(slot: Slot) -> int:
    return slot.view[0]


def test_two_slots_take_turns_and_give_the_digests_of_the_plan(tmp_path: Path) -> None:
    staging = Staging(tmp_path, folders=[tmp_path])
    one, digests = staging.fill(PLAN, chunks(1))
    two = stage(staging, 2)
    assert one is not two
    assert digests == digest_tensors(PLAN.tensors, dict(chunks(1)).__getitem__)[0]
    first = one.order
    assert [stage(staging, value) for value in (3, 4, 5)] == [one, two, one]
    with staging.hold(one, first) as intact:
        assert not intact
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_and_the_newest_stay_and_at_the_limit_the_oldest_goes(tmp_path: Path) -> None:
    """The example of the module."""
    staging = Staging(tmp_path, folders=[tmp_path])
    slots = [stage(staging, 1), stage(staging, 2)]
    orders = [slot.order for slot in slots]
    with ExitStack() as held:
        assert held.enter_context(staging.hold(slots[0], orders[0]))
        slots.append(stage(staging, 3))
        assert held.enter_context(staging.hold(slots[1], orders[1]))
        slots.append(stage(staging, 4))
        assert len({slot.path for slot in slots}) == MOST_SLOTS == len(list(tmp_path.iterdir()))
        assert [first_byte(slot) for slot in slots] == [1, 2, 3, 4]
        assert stage(staging, 5) is slots[2], "the newest stays, what is held stays"
        assert held.enter_context(staging.hold(slots[2], slots[2].order))
        assert held.enter_context(staging.hold(slots[3], slots[3].order))
        assert stage(staging, 6) is slots[0], "all are held: the oldest is superseded"
        assert not staging.is_intact(slots[0], orders[0]) and staging.is_intact(slots[1], orders[1])
        assert len(list(tmp_path.iterdir())) == MOST_SLOTS
    assert stage(staging, 7) is slots[1]
    staging.close()


def test_slots_are_made_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(tmp_path, folders=[tmp_path])
    one = stage(staging, 1)
    staging.prepare(one.size, 2)
    staging.prepare(one.size, 2)
    assert len(list(tmp_path.iterdir())) == 2
    with staging.hold(one, one.order):
        assert stage(staging, 2) is not one, "what was prepared is taken before what holds the newest"
        staging.prepare(one.size, 9)
        assert len(list(tmp_path.iterdir())) == MOST_SLOTS
    monkeypatch.setattr(os, "posix_fallocate", full)
    staging.prepare(one.size, 9)  # no room: no error
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_room_for_a_third_slot_the_oldest_send_is_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = Staging(tmp_path, folders=[tmp_path])
    one, two = stage(staging, 1), stage(staging, 2)
    monkeypatch.setattr(os, "posix_fallocate", full)
    order = one.order
    with staging.hold(one, order), staging.hold(two, two.order):
        assert stage(staging, 3) is one and not staging.is_intact(one, order)
    staging.close()
    assert list(tmp_path.iterdir()) == []


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_another_layout_gets_slots_of_its_size(tmp_path: Path) -> None:
    staging = Staging(tmp_path, folders=[tmp_path])
    old = [stage(staging, 1), stage(staging, 2)]
    other = plan_buckets([TensorSpec("z", "U8", (1000,))], bucket_bytes=1 << 20)
    data = [("z", np.full(1000, 9, dtype=np.uint8))]
    new = [staging.fill(other, data)[0] for _ in range(2)]
    assert {slot.path for slot in new}.isdisjoint({slot.path for slot in old})
    assert sorted(tmp_path.iterdir()) == sorted(slot.path for slot in new)
    staging.close()


big = PIECE_BYTES * 2 + 12345
sizes = st.lists(
    st.sampled_from([0, 1, 100, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, big]), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=25)
@given(sizes=sizes, threads=st.integers(1, 4), stride=st.sampled_from([1000, 256 << 10, 4 << 20]))
def test_a_copy_is_exact_and_its_digest_that_of_the_source(sizes: list[int], threads: int, stride: int) -> None:
    random = np.random.default_rng(sum(sizes))
    sources = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros(size, dtype=np.uint8) for size in sizes]
    digest = Digest()
    for source in sources:
        digest.update(source.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "STRIDE_BYTES", stride)
        assert copy_digest(zip(targets, sources, strict=True), threads=threads) == digest.hexdigest()
    assert all(np.array_equal(*pair) for pair in zip(targets, sources, strict=True))


def test_the_digest_of_a_bucket_is_that_of_its_pieces_in_order() -> None:
    from blake3 import blake3

    data = np.random.default_rng(1).integers(0, 256, PIECE_BYTES + 5, dtype=np.uint8)
    digest = Digest()
    digest.update(data)
    digest.update(b"xy")
    parts = [data[:PIECE_BYTES].tobytes(), data[PIECE_BYTES:].tobytes(), b"xy"]
    inner = b"".join(blake3(part).digest(length=16) for part in parts)
    assert digest.hexdigest() == blake3(inner).hexdigest(length=16)


def test_an_engine_answers_for_what_it_holds_and_the_publisher_for_what_it_had() -> None:
    """A copy that goes wrong shows in the digest of the target, and not in that of the source."""

    class Faulty(np.ndarray):  # type: ignore[type-arg]
        def __setitem__(self, key: object, value: object) -> None:
            super().__setitem__(key, value)  # type: ignore[no-untyped-call]
            super().__setitem__(0, 77)  # type: ignore[no-untyped-call]

    source = np.ones(PIECE_BYTES + 9, dtype=np.uint8)
    target = np.zeros(source.size, dtype=np.uint8).view(Faulty)
    held = copy_digest([(target, source)], threads=1)
    digest = Digest()
    digest.update(source)
    assert held == digest_all([target.view(np.ndarray)], threads=3) != digest.hexdigest()
    pieces = Pieces()
    with Crew(1) as crew:
        crew.copy(target, source, pieces)
        crew.settle()
    assert pieces.hexdigest() == digest.hexdigest() == digest_all([source])


def test_all_threads_take_part_and_a_fault_of_one_is_raised() -> None:
    """Each of three pieces waits for the other two: one thread alone would never get there."""
    together = threading.Barrier(3, timeout=10)

    class Slow(np.ndarray):  # type: ignore[type-arg]
        def __setitem__(self, key: object, value: object) -> None:
            together.wait()
            super().__setitem__(key, value)  # type: ignore[no-untyped-call]

    source = np.ones(3 * PIECE_BYTES, dtype=np.uint8)
    target = np.zeros(source.size, dtype=np.uint8).view(Slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "STRIDE_BYTES", PIECE_BYTES)
        copy_digest([(target, source)], threads=3)
    assert target.view(np.ndarray).all()
    with Crew(2) as crew:
        crew.copy(np.zeros(5, dtype=np.uint8), np.ones(9, dtype=np.uint8), Pieces())
        with pytest.raises(ValueError, match="broadcast"):
            crew.settle()


def test_chunks_that_are_lent_are_copied_before_they_are_taken_back(tmp_path: Path) -> None:
    """As from a layer of FSDP: the bytes are overwritten once `settle` returned, and the version is whole."""
    plan = plan_buckets([TensorSpec(f"t{i}", "U8", (2 * PIECE_BYTES + i,)) for i in range(6)], bucket_bytes=5 << 20)
    staging = Staging(tmp_path, folders=[tmp_path])
    lent = np.zeros(2 * PIECE_BYTES + 6, dtype=np.uint8)
    asked_on = set()

    def layers() -> Iterator[tuple[str, np.ndarray]]:
        for number, tensor in enumerate(plan.tensors, start=1):
            asked_on.add(threading.current_thread())
            lent[:] = number
            yield tensor.name, lent[: tensor.nbytes]
            staging.settle()

    slot, digests = staging.fill(plan, layers())
    data = {tensor.name: np.full(tensor.nbytes, n, dtype=np.uint8) for n, tensor in enumerate(plan.tensors, start=1)}
    assert digests == digest_tensors(plan.tensors, lambda name: data[name].data)[0]
    for bucket, view in enumerate(slot.buckets(plan.bucket_bytes)):
        for tensor in plan.tensors:
            if tensor.bucket == bucket:
                assert bytes(view[tensor.offset : tensor.offset + tensor.nbytes]) == data[tensor.name].tobytes()
    assert asked_on == {threading.current_thread()}, "a collective iterator runs on the calling thread"
    staging.settle()  # without a fill: no effect
    staging.close()


def test_no_more_than_a_bucket_waits_to_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_buckets([TensorSpec(f"t{i}", "U8", (1 << 20,)) for i in range(20)], bucket_bytes=3 << 20)
    most = []
    settled = Crew.settle

    def watched(crew: Crew, at_most_bytes: int = 0) -> None:
        settled(crew, at_most_bytes)
        most.append(crew._waiting_bytes)

    monkeypatch.setattr(Crew, "settle", watched)
    staging = Staging(tmp_path, folders=[tmp_path])
    staging.fill(plan, [(tensor.name, np.ones(1 << 20, dtype=np.uint8)) for tensor in plan.tensors])
    assert max(most) <= 3 << 20 and len(most) == 21
    staging.close()


def test_staging_refuses_chunks_that_are_not_the_plan(tmp_path: Path) -> None:
    staging = Staging(tmp_path, folders=[tmp_path])
    good = chunks(1)
    for bad in (good[::-1], good[:1], [*good, good[0]], [(good[0][0], good[0][1][:-1]), good[1]]):
        with pytest.raises(ValueError):
            staging.fill(PLAN, bad)
    slot, _ = staging.fill(PLAN, good)
    assert slot.order == 1, "a copy that failed never counts as a version"
    staging.close()


def test_staging_falls_back_and_says_when_there_is_no_room(tmp_path: Path) -> None:
    good = tmp_path / "good"
    staging = Staging(tmp_path, folders=[Path("/proc/none"), good])
    assert staging.fill(PLAN, chunks(1))[0].path.parent == good
    staging.close()
    with pytest.raises(Unavailable) as caught:
        Staging(tmp_path, folders=[Path("/proc/none")]).fill(PLAN, chunks(1))
    assert caught.value.code == "disk.full"


def test_stale_slots_of_dead_pids_go_those_of_live_ones_stay(tmp_path: Path) -> None:
    staging = Staging(tmp_path, folders=[tmp_path])
    slot, _ = staging.fill(PLAN, chunks(1))
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    stem = slot.path.name.rsplit("-", 2)[0]
    names = {
        f"{stem}-{int(dead.stdout)}-1": False,
        f"{stem}-{os.getppid()}-1": True,
        "asyncrl-of-another-run-1-1": True,
    }
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    staging.close()
    Staging(tmp_path, folders=[tmp_path]).remove_stale()
    assert {name: (tmp_path / name).exists() for name in names} == names


def test_a_pinned_slot_stays_and_counts_for_nothing(tmp_path: Path) -> None:
    staging = Staging(tmp_path, folders=[tmp_path])
    base, _ = staging.fill(PLAN, chunks(1))
    kept = bytes(base.view)
    assert staging.pin(base, base.order)
    for value in range(2, 9):
        slot = staging.fill(PLAN, chunks(value))[0]
        with staging.hold(slot, slot.order):
            staging.fill(PLAN, chunks(value + 100))
            staging.fill(PLAN, chunks(value + 200))
    assert bytes(base.view) == kept and base.order == 1
    assert len(staging._slots) == 4 and not staging.pin(base, 2), "it does not hold that"
    staging.unpin(base)
    for version in range(20, 24):
        staging.fill(PLAN, chunks(version))
    assert base.order != 1, "it is one like the others again"
    staging.close()
