"""A digest that devices compute faster than links carry weights: two position-weighted sums. For transport `direct`.

The bytes of each tensor of a bucket, padded with zeros to a multiple of four, are words w_i (int32, little-endian),
numbered through the bucket, i = c K + j with K = 2^14. Modulo 2^64, for s = 0, 1:

    S_s = sum over i of F_s(c) T_s(j) w_i,   T_s(j) = mix(2 s 2^32 + j) | 1,   F_s(c) = mix((2 s + 1) 2^32 + c) | 1

with the finalizer `mix` of splitmix64 (Steele, Lea, Flood, OOPSLA 2014). The digest is `sum:` and both sums in hex.
Guarantees:
1. sums wrap and do not round, so every order, grouping and device gives the same digest;
2. one wrong word is always seen: its difference d, 0 < |d| < 2^32, times an odd factor is not 0 modulo 2^64;
3. two or more wrong words are missed with a probability of at most 2^-126; if all differ by multiples of 2^v (v <= 31:
   only their top bits), each sum sees the low 64 - v bits of the odd factors: 2^-(126 - 2 v), so 2^-64 for v = 31. This
   takes the factors as random and independent of the fault, as swapped, lost, torn and stale words are;
4. it guards against faults, **not against forgery**: a process that knows the formula can make other
   weights with the same sums.
   The signature of the manifest protects the digest alone.
Padding between tensors is left out, as in `weightsync.plan.digest`.

Example: the words 5, -1 at the beginning of a bucket: S_s = F_s(0) (5 T_s(0) - T_s(1)) mod 2^64.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.wire import Buffer

SUM = "sum:"
CHUNK_WORDS = 1 << 14  # K
MOST_CHUNKS = 256  # at once on a device: 16 MiB, 96 MiB with products. An H200 then has 160 GB/s; with 64 chunks, 40
HOST_CHUNKS = 8  # on the host, where they stay in the cache
MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """splitmix64's finalizer of a number below 2^64."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@cache
def table(which: int) -> npt.NDArray[np.int64]:
    """T_s, int64 `[K]`."""
    value = np.arange(CHUNK_WORDS, dtype=np.uint64) + np.uint64((2 * which << 32) + 0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) | np.uint64(1)).view(np.int64)


@cache
def factors(which: int, chunks: int) -> npt.NDArray[np.int64]:
    """F_s of that many chunks, int64."""
    found = [mix(((2 * which + 1) << 32) + chunk) | 1 for chunk in range(chunks)]
    return np.array(found, np.uint64).view(np.int64)


class Span(NamedTuple):
    """A part of a tensor: `size` words from its word `start`, which are `chunks` whole chunks from `chunk` on, or (1) a
    part of that chunk from `place` on."""

    chunk: int
    place: int
    start: int
    size: int
    chunks: int


def spans(first: int, words: int, *, most: int = MOST_CHUNKS) -> list[Span]:
    """The parts, of at most `most` chunks, of a tensor of `words` words that begins at word `first` of its bucket."""
    found, done = [], 0
    while done < words:
        chunk, place = divmod(first + done, CHUNK_WORDS)
        left = words - done
        chunks = 1 if place else max(1, min(left // CHUNK_WORDS, most))
        size = min(chunks * CHUNK_WORDS - place, left)
        found.append(Span(chunk, place, done, size, chunks))
        done += size
    return found


def padded(nbytes: int) -> int:
    """The bytes of a tensor's words."""
    return -(-nbytes // 4) * 4


def enough(chunks: int) -> int:
    """A number of factors to compute at once: a power of two."""
    return 1 << max(chunks - 1, 63).bit_length()


def hexdigest(sums: tuple[int, int]) -> str:
    """The digest of a bucket with these sums."""
    return SUM + "".join(f"{value & MASK:016x}" for value in sums)


class SumDigest:
    """The digest of one bucket on the host, tensor by tensor, like `weightsync.plan.digest.Digest`."""

    def __init__(self) -> None:
        self._end = 0  # of the tensors so far
        self._sums = [0, 0]

    def update(self, tensor: Buffer) -> None:
        """Add the bytes of the next tensor, whole."""
        data = np.frombuffer(tensor, np.uint8)
        self.add(data, self._end)
        self._end += padded(data.size)

    def add(self, data: npt.NDArray[np.uint8], start: int) -> None:
        """Add bytes of a tensor that begin `start` bytes after the beginning of the bucket. The parts of a word that
        lie in several calls are added to one another, as its bytes are."""
        head = min(-start % 4, data.size)
        tail = head + (data.size - head) // 4 * 4
        if head:
            first = bytes(start % 4) + data[:head].tobytes()
            self._add(start // 4, np.frombuffer(first.ljust(4, b"\0"), np.int32))
        self._add((start + head) // 4, data[head:tail].view(np.int32))
        if tail < data.size:
            self._add((start + tail) // 4, np.frombuffer(data[tail:].tobytes().ljust(4, b"\0"), np.int32))

    def _add(self, first: int, words: npt.NDArray[np.int32]) -> None:
        for span in spans(first, words.size, most=HOST_CHUNKS):
            part = words[span.start : span.start + span.size].astype(np.int64).reshape(span.chunks, -1)
            last = span.chunk + span.chunks
            for which in (0, 1):
                weights = table(which)[span.place : span.place + part.shape[1]]
                of_chunks = (part * weights).sum(1) * factors(which, enough(last))[span.chunk : last]
                self._sums[which] = (self._sums[which] + int(of_chunks.sum())) & MASK

    @property
    def sums(self) -> tuple[int, int]:
        """S_0 and S_1, below 2^64."""
        return self._sums[0], self._sums[1]

    def hexdigest(self) -> str:
        return hexdigest(self.sums)
