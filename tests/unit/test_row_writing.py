"""Several writers of one slot leave the bytes and digests of one that has everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import PIECE_BYTES
from weightsync.row_writing import Lend, Written, join_written, write_rows
from weightsync.staging import Staging

SIZES = (3, 0, PIECE_BYTES, 2 * PIECE_BYTES + 5, PIECE_BYTES // 2, 1)
PLAN = plan_buckets(
    [TensorSpec(f"t{number}", "U8", (size,)) for number, size in enumerate(SIZES)], bucket_bytes=PIECE_BYTES + 9
)
DATA = {
    tensor.name: np.random.default_rng(number).integers(0, 256, tensor.nbytes, np.uint8)
    for number, tensor in enumerate(PLAN.tensors)
}
CUTS = st.lists(st.sampled_from([0, 1, 7, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES]), max_size=3)


def chunks(cuts: list[int], rank: int) -> Lend:
    """This rank's part of every tensor, cut at these bytes; the bytes are lent."""

    def lend(settle: object) -> list[tuple[tuple[str, int], np.ndarray]]:
        found = []
        for name, data in DATA.items():
            bounds = [0, *sorted(min(cut, data.size) for cut in cuts), data.size]
            first, end = bounds[rank], bounds[rank + 1]
            found.append(((name, first), data[first:end]))
        return found

    return lend


@given(cuts=CUTS)
def test_bytes_and_digests_are_those_of_one_writer(cuts: list[int]) -> None:
    slot = memoryview(bytearray(PLAN.nbytes + 64 * len(PLAN.bucket_bytes)))
    parts = [write_rows(PLAN, slot, chunks(cuts, rank), threads=2) for rank in range(len(cuts) + 1)]
    digests = join_written(PLAN, slot, parts)
    assert (digests, bytes(slot[: len(WHOLE)])) == (WHOLE_DIGESTS, WHOLE)


def one_writer() -> tuple[tuple[str, ...], bytes]:
    staging = Staging(Path("/nowhere"), folders=[Path("/dev/shm")])
    try:
        slot, digests = staging.fill(PLAN, DATA.items())
        return digests, bytes(slot.view)
    finally:
        staging.close()


WHOLE_DIGESTS, WHOLE = one_writer()


def test_a_fault_of_the_copy_does_not_change_the_digest_of_a_whole_piece() -> None:
    """Readers notice it: the digest is that of the source."""
    slot = memoryview(bytearray(len(WHOLE)))
    part = write_rows(PLAN, slot, chunks([], 0))
    numbers = np.frombuffer(part.numbers, np.uint32)
    assert numbers.tolist() == list(range(len(part.digests) // 16)) and numbers.size == 7
    slot[5] ^= 1
    assert join_written(PLAN, slot, [part]) == WHOLE_DIGESTS


def test_a_version_with_missing_bytes_has_no_digest() -> None:
    slot = memoryview(bytearray(len(WHOLE)))
    parts = [write_rows(PLAN, slot, chunks([9], 0)), Written(0, b"", b"")]
    with pytest.raises(ValueError, match="bytes were written"):
        join_written(PLAN, slot, parts)


@pytest.mark.parametrize("place", [("other", 0), ("t0", 1)])
def test_a_chunk_outside_of_the_plan_is_refused(place: tuple[str, int]) -> None:
    slot = memoryview(bytearray(len(WHOLE)))
    with pytest.raises(ValueError, match="not in the plan"):
        write_rows(PLAN, slot, lambda settle: [(place, np.zeros(3, np.uint8))])
    assert bytes(slot) == bytes(len(WHOLE))
