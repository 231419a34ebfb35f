"""The digest of transport `direct` against its formula in plain numbers, on the host and in torch."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
import torch

from weightsync.plan.sum_digest import CHUNK_WORDS, MASK, SumDigest, hexdigest, mix, padded
from weightsync.transports.device_digest import DeviceSums, sum_tensors, word_view

CPU = torch.device("cpu")
SHAPES = [(3, 5), (), (0, 4), (CHUNK_WORDS - 9,), (40,), (70 * CHUNK_WORDS + 3,), (2, CHUNK_WORDS), (CHUNK_WORDS - 31,)]


def plain(parts: list[bytes], places: range | None = None) -> str:
    """The formula of the module, word by word."""
    words: list[int] = []
    for part in parts:
        padded = part + bytes(-len(part) % 4)
        words += [value for (value,) in struct.iter_unpack("<i", padded)]
    sums = [0, 0]
    for which in (0, 1):
        for number, word in enumerate(words):
            if word:
                chunk, place = divmod(number, CHUNK_WORDS)
                odd = (mix((2 * which << 32) + place) | 1) * (mix(((2 * which + 1) << 32) + chunk) | 1)
                sums[which] = (sums[which] + odd * word) & MASK
    return f"sum:{sums[0]:016x}{sums[1]:016x}"


def on_host(parts: list[bytes]) -> str:
    found = SumDigest()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def in_torch(parts: list[bytes]) -> str:
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0) for part in parts]
    first, second = sum_tensors(tensors, CPU).tolist()
    return hexdigest((first, second))


def on_device(parts: list[bytes]) -> str:
    """As on an accelerator, with tensors of the host."""
    found = DeviceSums(CPU)
    for part in parts:
        if part:
            data = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            found._add(found._end // 4, word_view(data))
            found._end += padded(data.nbytes)
    first, second = found.sums.tolist()
    return hexdigest((first, second))


def sparse(shape: tuple[int, ...], seed: int) -> bytes:
    """float32 values, most of them 0, so that the plain formula is quick."""
    random = np.random.default_rng(seed)
    found = np.zeros(shape, np.float32).reshape(-1)
    at = random.integers(0, max(found.size, 1), 50)[: found.size]
    found[at] = random.standard_normal(len(at))
    return found.tobytes()


def test_both_forms_are_the_formula() -> None:
    parts = [sparse(shape, seed) for seed, shape in enumerate(SHAPES)] + [b"\x01\x02\xff\x80\xfe", b"\xff\xff"]
    assert on_host(parts) == in_torch(parts) == on_device(parts) == plain(parts)
    dense = [np.random.default_rng(9).bytes(4001), np.random.default_rng(8).bytes(6)]
    assert on_host(dense) == in_torch(dense) == on_device(dense) == plain(dense)
    assert on_host([]) == in_torch([]) == "sum:" + "0" * 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_and_alignment(dtype: torch.dtype) -> None:
    storage = torch.randn(1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = [storage[:333], storage[333:900].view(7, 81), storage[900:].view(1, 101)]
    parts = [one.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors]
    first, second = sum_tensors(tensors, CPU).tolist()
    assert hexdigest((first, second)) == on_host(parts) == plain(parts)


@pytest.mark.parametrize("size", [1, 7, 4096, 4 * CHUNK_WORDS + 6])
def test_parts_in_any_order_have_the_sums_of_the_whole(size: int) -> None:
    """Cut between any two bytes, as rows of several ranks are: a word may have bytes in four of them."""
    random = np.random.default_rng(size)
    data, start = np.frombuffer(random.bytes(size), np.uint8), 8 + 4 * CHUNK_WORDS
    cuts = sorted({0, size, *(int(cut) for cut in random.integers(0, size, 9)), *range(min(6, size))})
    pieces = [*itertools.pairwise(cuts)]
    random.shuffle(pieces)
    whole, on_host, in_torch = SumDigest(), SumDigest(), DeviceSums(CPU)
    whole.add(data, start)
    device = DeviceSums(CPU)
    for first, end in pieces:
        part = torch.from_numpy(data[first:end].copy())
        on_host.add(data[first:end], start + first)
        in_torch.add(part, start + first)
        device._add((start + first) // 4, word_view(part, (start + first) % 4))
    wanted = on_host.sums
    assert wanted == whole.sums
    for found in (in_torch, device):
        assert tuple(value & MASK for value in found.sums.tolist()) == wanted


def test_every_wrong_byte_and_every_wrong_order_is_another_digest() -> None:
    parts = [np.random.default_rng(1).bytes(40), np.random.default_rng(2).bytes(40)]
    good = on_host(parts)
    seen = {good}
    for bit in range(320):
        wrong = bytearray(parts[0])
        wrong[bit // 8] ^= 1 << bit % 8
        seen.add(on_host([bytes(wrong), parts[1]]))
    seen |= {on_host([parts[1], parts[0]]), on_host(parts[:1]), on_host([*parts, b"\1"])}
    swapped = bytearray(parts[0])
    swapped[0:4], swapped[4:8] = parts[0][4:8], parts[0][0:4]
    seen.add(on_host([bytes(swapped), parts[1]]))
    assert len(seen) == 1 + 320 + 4


def test_flipped_signs_of_many_words_are_seen() -> None:
    """The weakest case of the argument: all words differ in their top bit alone."""
    values = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    seen = {on_host([values.tobytes()])}
    random = np.random.default_rng(4)
    for _ in range(500):
        wrong = values.copy()
        wrong[random.random(values.size) < 0.5] *= -1
        seen.add(on_host([wrong.tobytes()]))
    assert len(seen) == 501


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_digest_of_the_host() -> None:
    device = torch.device("cuda")
    generator = np.random.default_rng(5)
    parts = [generator.bytes(size) for size in (7, 4, 65_536 * 4 - 3, 40_000, 1, 1 << 22, (1 << 22) - 9)]
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in parts]
    first, second = sum_tensors(tensors, device).tolist()
    assert hexdigest((first, second)) == on_host(parts)
    cut = DeviceSums(device)
    for start in range(0, 1 << 22, 99_999):  # pieces of a row
        cut.add(tensors[5][start : start + 99_999], start)
    alone = SumDigest()
    alone.update(parts[5])
    assert [value & MASK for value in cut.sums.tolist()] == list(alone.sums)
