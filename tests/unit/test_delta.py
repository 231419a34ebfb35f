"""Encoding delta: exact, its own inverse, and nothing malformed writes a byte."""

import struct
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.wire import Tensor
from weightsync.encoding import delta
from weightsync.encoding.delta import decode, encode
from weightsync.plan.buckets import ITEM_BYTES, TensorSpec, group_by_bucket, plan_buckets
from weightsync.transports.base import TransportError


def layout(dtypes: list[str], counts: list[int]) -> tuple[tuple[Tensor, ...], int]:
    """Tensors of one bucket and its size."""
    specs = [TensorSpec(f"t{i}", dtype, (count,)) for i, (dtype, count) in enumerate(zip(dtypes, counts, strict=True))]
    plan = plan_buckets(specs, bucket_bytes=1 << 40)
    return plan.tensors, plan.bucket_bytes[0]


def random_bytes(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def changed(old: np.ndarray, tensors: tuple[Tensor, ...], share: float, seed: int) -> np.ndarray:
    """A copy in which about this share of the bytes of the tensors has another value."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    for tensor in tensors:
        part = new[tensor.offset : tensor.offset + tensor.nbytes]
        part[rng.random(len(part)) < share] ^= rng.integers(1, 256, dtype=np.uint8)
    return new


def sealed(body: bytes, magic: bytes = delta.MAGIC) -> bytes:
    """A blob with the right checksum around a body of our making."""
    return struct.pack("<4sQ", magic, xxhash.xxh3_64_intdigest(body)) + body


def section(
    first: int, gaps: bytes, *planes: bytes, item: int = 2, changes: int | None = None, length: int | None = None
) -> bytes:
    """A section; what its head announces is what there is, unless it is given."""
    announced = len(planes[0]) if changes is None else changes, len(gaps) if length is None else length
    sizes = struct.pack(f"<{1 + len(planes)}I", len(gaps), *map(len, planes))
    return struct.pack("<BQII", item, first, *announced) + sizes + gaps + b"".join(planes)


def blob_of(nbytes: int, *sections: bytes, count: int | None = None) -> bytes:
    head = struct.pack("<QI", nbytes, len(sections) if count is None else count)
    return sealed(head + b"".join(sections))


BF16, BF16_BYTES = layout(["BF16"], [1000])


def test_the_example_of_the_docstring() -> None:
    old = np.zeros(1000, dtype=np.uint16)
    old[3] = 0x3F80
    new = old.copy()
    new[3], new[600] = 0x3F81, 0x8000
    blob = encode(old, new, BF16)
    assert blob == blob_of(2000, section(0, bytes([3, 255, 255, 86]), b"\x01\x00", b"\x00\x80")) and len(blob) == 61
    decode(blob, memoryview(old), BF16)
    assert old.tobytes() == new.tobytes()


@settings(deadline=None, max_examples=120)
@given(
    tensors=st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(0, 700)), min_size=1, max_size=8),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([64, 1000, 256 << 10]),
    block=st.sampled_from([64, 2048, 16 << 20]),
)
def test_exact_and_its_own_inverse_for_every_dtype(
    tensors: list[tuple[str, int]], share: float, seed: int, chunk: int, block: int
) -> None:
    placed, nbytes = layout([dtype for dtype, _ in tensors], [count for _, count in tensors])
    old = random_bytes(nbytes, seed)
    new = changed(old, placed, share, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_BYTES", chunk)
        patch.setattr(delta, "BLOCK_BYTES", max(block, chunk))
        blob = encode(old, new, placed)
        assert encode(new, old, placed) == blob, "a delta has no direction"
    held = old.copy()
    decode(blob, memoryview(held), placed)
    assert held.tobytes() == new.tobytes()
    decode(blob, memoryview(held), placed)
    assert held.tobytes() == old.tobytes()


def test_bits_that_compare_equal_or_never_equal_are_carried() -> None:
    placed, nbytes = layout(["F32", "F64", "BF16", "F8_E4M3", "F8_E5M2", "BOOL"], [4, 2, 4, 4, 4, 4])
    old, new = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    words = {t.dtype: (old[t.offset : t.offset + t.nbytes], new[t.offset : t.offset + t.nbytes]) for t in placed}
    words["F32"][0].view("<u4")[:] = [0, 0x7FC00001, 0x7F800001, 0xFFC00000]
    words["F32"][1].view("<u4")[:] = [0x80000000, 0x7FC00002, 0x7F800001, 0x7FC00000]  # -0.0, another NaN, same, sign
    words["F64"][0].view("<u8")[:] = [0x7FF8000000000001, 1]
    words["F64"][1].view("<u8")[:] = [0x7FF8000000000002, 0x8000000000000001]
    words["BF16"][1].view("<u2")[:] = [0x8000, 0x7FC1, 0, 1]
    words["F8_E4M3"][0][:], words["F8_E4M3"][1][:] = [0x7F, 0, 1, 0x80], [0xFF, 0x80, 1, 0]
    words["F8_E5M2"][0][:], words["F8_E5M2"][1][:] = [0x7D, 0x7E, 0x7F, 0], [0x7E, 0x7E, 0xFF, 0x80]
    words["BOOL"][1][:] = [1, 0, 1, 0]
    held = old.copy()
    decode(encode(old, new, placed), memoryview(held), placed)
    assert held.tobytes() == new.tobytes()


def test_what_lies_between_tensors_is_not_carried() -> None:
    placed, nbytes = layout(["U8", "F32"], [3, 2])
    assert placed[1].offset == 4
    old, new = np.zeros(nbytes, np.uint8), np.full(nbytes, 7, np.uint8)
    decode(encode(old, new, placed), memoryview(old), placed)
    assert old.tolist() == [7, 7, 7, 0] + [7] * 8


def test_an_identical_bucket_costs_a_few_bytes() -> None:
    placed, nbytes = layout(["BF16"], [4 << 20])
    data = random_bytes(nbytes, 0)
    blob = encode(data, data.copy(), placed)
    assert len(blob) == 24
    held = data.copy()
    decode(blob, memoryview(held), placed)
    assert held.tobytes() == data.tobytes()


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.02), (0.0001, 0.0004), (1.0, 1.001)])
def test_size_follows_the_changes(share: float, most: float) -> None:
    """Random changes of bf16: about one byte for the place and two for the value; never much more than all of it."""
    placed, nbytes = layout(["BF16"], [1 << 20])
    old = random_bytes(nbytes, 0)
    new = old.copy().view(np.uint16)
    where = np.random.default_rng(1).random(len(new)) < share
    new[where] ^= np.random.default_rng(2).integers(1, 1 << 16, int(where.sum()), dtype=np.uint16)
    assert len(encode(old, new, placed)) <= most * nbytes


def test_a_large_bucket_has_several_sections() -> None:
    """Positions run on over chunks and sections; one change at either end of each."""
    count = (delta.BLOCK_BYTES * 5) // 2
    placed, nbytes = layout(["U8"], [count])
    old = np.zeros(nbytes, np.uint8)
    new = old.copy()
    edges = [0, delta.CHUNK_BYTES - 1, delta.CHUNK_BYTES, delta.BLOCK_BYTES - 1, delta.BLOCK_BYTES, count - 1]
    new[edges] = 1
    blob = encode(old, new, placed)
    assert struct.unpack_from("<QI", blob, 12) == (nbytes, 3) and len(blob) < 1000
    decode(blob, memoryview(old), placed)
    assert np.flatnonzero(old).tolist() == edges


def test_threads_share_nothing() -> None:
    plan = plan_buckets([TensorSpec(f"t{i}", "BF16", (50_000,)) for i in range(16)], bucket_bytes=100_000)
    groups = group_by_bucket(plan.tensors, len(plan.bucket_bytes))
    old = [random_bytes(size, 2 * i) for i, size in enumerate(plan.bucket_bytes)]
    new = [changed(data, tuple(group), 0.05, 1) for data, group in zip(old, groups, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        blobs = list(pool.map(encode, old, new, groups))
        assert blobs == [encode(*row) for row in zip(old, new, groups, strict=True)]
        list(pool.map(lambda row: decode(row[0], memoryview(row[1]), row[2]), zip(blobs, old, groups, strict=True)))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(old, new, strict=True))


def test_other_threads_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan gives the interpreter's lock up by itself: another thread gets its turns though none is forced."""
    monkeypatch.setattr(delta, "CHUNK_BYTES", 4 << 20)  # long enough for a busy machine to wake the other thread
    placed, nbytes = layout(["BF16"], [16 << 20])
    old = random_bytes(nbytes, 0)
    new = changed(old, placed, 0.002, 1)
    turns, stop = [0], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    other = threading.Thread(target=take_turns)
    try:
        other.start()
        sys.setswitchinterval(60.0)
        before = turns[0]
        encode(old, new, placed)
        assert turns[0] > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        other.join(timeout=60)


# ---------------------------------------------------------------- what is refused


ZEROS = b"\0" * 2
BOMB = zstandard.compress(bytes(64 << 20))
GOOD = section(0, b"\x03\x04", b"\x01\x02", ZEROS)

BAD = {
    "nothing": b"",
    "no head": sealed(b""),
    "magic": sealed(struct.pack("<QI", 2000, 0), b"ADL\x02"),
    "checksum": blob_of(2000, GOOD)[:-1] + b"\x07",
    "cut": blob_of(2000, GOOD)[:-1],
    "another size": blob_of(1998, GOOD),
    "bytes left over": blob_of(2000, GOOD, b"\0", count=1),
    "a section missing": blob_of(2000, GOOD, count=2),
    "a section more": blob_of(2000, GOOD, GOOD),
    "sections out of order": blob_of(
        2000, section(500, b"\0", b"\x01", b"\0"), section(100, b"\0", b"\x01", b"\0")
    ),
    "sections overlap": blob_of(2000, section(0, b"\x09", b"\x01", b"\0"), section(9, b"\0", b"\x01", b"\0")),
    "item size of no tensor": blob_of(2000, section(0, b"\x03", *[b"\x01"] * 4, item=4)),
    "item size of nothing": blob_of(2000, section(0, b"\x03", *[b"\x01"] * 3, item=3)),
    "item size 0": blob_of(2000, section(0, b"\x03", b"\x01", b"\x01", item=0)),
    "first is outside": blob_of(2000, section(1000, b"\0", b"\x01", b"\0")),
    "first is far outside": blob_of(2000, section((1 << 64) - 1, b"\0", b"\x01", b"\0")),
    "last is outside": blob_of(2000, section(999, b"\0\0", b"\x01\x01", ZEROS)),
    "an escape leads outside": blob_of(2000, section(0, b"\xff\xff\xff\xeb", b"\x01", b"\0")),
    "no changes": blob_of(2000, section(0, b"\0", b"", b"")),
    "more changes than elements": blob_of(2000, section(998, b"\0\0\0", b"\1\1\1", b"\1\1\1")),
    "ends with an escape": blob_of(2000, section(0, b"\x03\xff", b"\x01", b"\0")),
    "fewer positions than changes": blob_of(2000, section(0, b"\x03\xff\x01", b"\1\1\1", b"\1\1\1")),
    "more positions than changes": blob_of(2000, section(0, b"\x03\x01", b"\x01", b"\0")),
    "more escapes than elements": blob_of(2000, section(0, b"\xff" * 5 + b"\0", b"\x01", b"\0")),
    "a plane too long": blob_of(2000, section(0, b"\x03\x01", b"\x01\x01", b"\0\0\0")),
    "a plane too short": blob_of(2000, section(0, b"\x03\x01", b"\x01\x01", b"\0")),
    "an empty plane": blob_of(2000, section(0, b"\x03\x01", b"\x01\x01", b"")),
    "no zstd frame": blob_of(2000, section(0, bytes(900), bytes(900), b"nonsense of some length", changes=900)),
    "a frame of too much": blob_of(
        2000, section(0, bytes(900), bytes(900), zstandard.compress(bytes(901)), changes=900)
    ),
    "a frame of too little": blob_of(
        2000, section(0, bytes(900), bytes(900), zstandard.compress(bytes(899)), changes=900)
    ),
    "two frames": blob_of(2000, section(0, bytes(900), bytes(900), zstandard.compress(bytes(900)) * 2, changes=900)),
    "bytes after a frame": blob_of(
        2000, section(0, bytes(900), bytes(900), zstandard.compress(bytes(900)) + b"\0", changes=900)
    ),
    "a frame that is cut": blob_of(
        2000, section(0, bytes(900), bytes(900), zstandard.compress(random_bytes(600, 0).tobytes() + bytes(300))[:-9],
                      changes=900),
    ),
    "a frame of unknown size": blob_of(
        2000, section(0, bytes(900), bytes(900),
                      zstandard.ZstdCompressor(write_content_size=False).compress(bytes(900)), changes=900),
    ),
    "a frame that asks for 64 MB": blob_of(
        2000, section(0, bytes(900), bytes(900), BOMB[:800], changes=900)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_malformed_blobs_write_nothing(what: str) -> None:
    held = random_bytes(BF16_BYTES, 0)
    before = held.tobytes()
    with pytest.raises(TransportError) as raised:
        decode(BAD[what], memoryview(held), BF16)
    assert raised.value.code == "sync.failed" and held.tobytes() == before


def test_the_cases_above_are_one_step_from_a_good_one() -> None:
    held = np.zeros(BF16_BYTES, np.uint8)
    decode(blob_of(2000, GOOD, section(10, b"\0", b"\x01", b"\0")), memoryview(held), BF16)
    assert held.view(np.uint16)[[3, 8, 10]].tolist() == [1, 2, 1] and np.count_nonzero(held) == 3
    decode(
        blob_of(2000, section(0, bytes(900), bytes(900), zstandard.compress(bytes(900)), changes=900)),
        memoryview(held),
        BF16,
    )


def test_a_good_section_before_a_bad_one_is_not_applied() -> None:
    held = np.zeros(BF16_BYTES, np.uint8)
    with pytest.raises(TransportError):
        decode(blob_of(2000, GOOD, section(999, b"\x01", b"\x01", b"\0")), memoryview(held), BF16)
    assert not held.any()


def test_a_bomb_takes_no_room() -> None:
    """A frame of 64 MB where 9,000 bytes are announced, and announcements of 64 MB for a bucket of 10,000."""
    placed, nbytes = layout(["U8"], [10_000])
    size = 64 << 20
    assert len(BOMB) < 9000
    blobs = {
        "a plane": section(0, bytes(9000), BOMB, item=1, changes=9000),
        "the gaps": section(0, BOMB, bytes(9000), item=1, changes=9000, length=9000),
        "escapes": section(0, BOMB, b"\1", item=1, changes=1, length=size),
        "changes": section(0, BOMB, BOMB, item=1, changes=size, length=size),
    }
    held = bytearray(nbytes)
    for what, bomb in blobs.items():
        tracemalloc.start()
        try:
            with pytest.raises(TransportError):
                decode(blob_of(nbytes, bomb), memoryview(held), placed)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, what
        finally:
            tracemalloc.stop()
    assert not any(held)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 20),
    flips=st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4),
    resealed=st.booleans(),
    cut=st.integers(0, 40),
)
def test_flipped_bytes(seed: int, flips: list[tuple[int, int]], resealed: bool, cut: int) -> None:
    """A damaged blob is refused by its checksum; one that was damaged on purpose is refused or stays in the tensors."""
    placed, nbytes = layout(["BF16", "U8", "F32", "BF16"], [3000, 501, 300, 2000])
    old = random_bytes(nbytes, seed)
    new = changed(old, placed, 0.01 * (1 + seed % 5), seed + 1)
    blob = bytearray(encode(old, new, placed))
    for at, value in flips:
        blob[at % len(blob)] ^= value
    del blob[len(blob) - cut * (seed % 2) :]
    if resealed:
        blob = bytearray(sealed(bytes(blob[12:])))
    guarded = np.full(nbytes + 128, 0xA5, np.uint8)
    guarded[64:-64] = old
    held = guarded[64:-64]
    try:
        decode(blob, memoryview(held), placed)
    except TransportError:
        assert held.tobytes() == old.tobytes()
    else:
        assert resealed or held.tobytes() == new.tobytes(), "only flips that undo each other leave a checksum as it was"
        assert held[6501:6504].tolist() == old[6501:6504].tolist(), "padding"
        decode(blob, memoryview(held), placed)
        assert held.tobytes() == old.tobytes()
    assert (guarded[:64] == 0xA5).all() and (guarded[-64:] == 0xA5).all()


def test_a_layout_that_does_not_fit_is_the_callers_mistake_or_the_peers() -> None:
    data = np.zeros(16, np.uint8)
    tensors = [
        [Tensor("a", "F32", (5,), 0, 0, 20)],
        [Tensor("a", "F32", (1,), 0, 2, 4)],
        [Tensor("a", "Q4", (4,), 0, 0, 4)],
        [Tensor("a", "U8", (4,), 0, 0, 4), Tensor("b", "U8", (4,), 0, 3, 4)],
        [Tensor("a", "U8", (4,), 0, -4, 4)],
    ]
    for placed in tensors:
        with pytest.raises(ValueError):
            encode(data, data, placed)
        with pytest.raises(TransportError):
            decode(blob_of(16), memoryview(bytearray(16)), placed)
    with pytest.raises(ValueError, match="16 and 8"):
        encode(data, data[:8], [])
    with pytest.raises(ValueError, match="cannot be written"):
        decode(blob_of(16), memoryview(bytes(16)), [])
