"""Encoding `delta`: the difference between the bytes of one bucket in two versions, in both directions.

Guarantees:
1. exact for every dtype: elements are compared and XORed as integers of their size, so -0.0, the payload of a NaN and
   the bits of an fp8 are kept;
2. its own inverse: decoding the same blob twice restores the base;
3. `decode` is all or nothing: a damaged or malformed blob (checksum, header, counts, sizes, bytes left over, streams
   that unpack to more than announced) raises `TransportError` before a byte is written; no stream unpacks to more bytes
   than there are elements left, and nothing is written outside the tensors;
4. thread-safe; comparison, gathering and zstd run without the interpreter's lock, so several buckets at a time use
   several cores.
It does not know whether `into` is the base of the blob: digests of the result show that.

The blob: a header (magic with the format's number, checksum of the rest, size of the bucket, number of sections), then
sections. Elements of one size are numbered through the bucket in the order of its tensors; a section lists the changes
among `BLOCK_BYTES` of them at most: a stream of positions as gaps (a byte `g < 255` skips g elements and names the
next one, 255 skips 255), then one stream of XORed values per byte of the element, lowest byte first, because the high
bytes of a small step are nearly always zero. A stream is stored unpacked if zstd does not make it smaller. A part with
more changes than `DENSE` of its elements lists all of them (a zero changes nothing), which is cheaper than gathering.

Example: a bucket of one BF16 tensor `[1000]` in which elements 3 and 600 changed from 1.0 (0x3F80) to 1.0078 (0x3F81)
and from 0.0 to -0.0: gaps `3, 255, 255, 86`, low bytes `01 00`, high bytes `00 80`: 61 bytes instead of 2,000.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from asyncrl.wire import Buffer, Tensor
from weightsync.plan.buckets import ITEM_BYTES
from weightsync.transports.base import TransportError

MAGIC = b"ADL\x01"  # the last byte is the number of the format
#: Small unordered numbers have no long repeated strings: the entropy coder of level 1 is enough, and a small table of
#: matches saves time.
ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=10)
#: Compared at a time: both sides and the flags stay in a cache, and the interpreter's lock is taken rarely enough that
#: waits for the training thread stay short.
CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 16 << 20  # of one section: bounds the memory of the encoder
DENSE = 0.3
ESCAPE = 255
APPLY = 1 << 18  # positions at a time

_SEAL = struct.Struct("<4sQ")  # magic, xxh3_64 of what follows
_HEAD = struct.Struct("<QI")  # bytes of the bucket, sections
_SECTION = struct.Struct("<BQII")  # bytes per element, first element, changes, length of the gaps
_SIZE = struct.Struct("<I")  # stored bytes of one stream

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]  # unsigned integers of the size of an element


def encode(old: Buffer, new: Buffer, tensors: Sequence[Tensor]) -> bytes:
    """The blob that turns `old` into `new`, and `new` into `old`.

    Args:
        old, new: the bytes of one bucket in two versions of one plan.
        tensors: those in it, in the order of the plan; padding between them is left out.

    Raises:
        ValueError: the buckets differ in size, or the tensors are not in order or not aligned in them.
    """
    before, after = memoryview(old).cast("B"), memoryview(new).cast("B")
    if before.nbytes != after.nbytes:
        raise ValueError(f"buckets of {before.nbytes} and {after.nbytes} bytes")
    packer = zstandard.ZstdCompressor(compression_params=ZSTD)
    sections = [
        section
        for item, spans in _spans(tensors, before.nbytes).items()
        for section in _encode_items(_views(before, item, spans), _views(after, item, spans), item, packer)
    ]
    body = b"".join([_HEAD.pack(before.nbytes, len(sections)), *sections])
    return _SEAL.pack(MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def decode(blob: Buffer, into: memoryview, tensors: Sequence[Tensor]) -> None:
    """Turn the base's bytes of one bucket into those of the next version, in place.

    Args:
        blob: from `encode`.
        into: writable, the bytes of the bucket in the version that the blob was made from (or for: to undo it).
        tensors: those in it, in the order of the plan.

    Raises:
        TransportError: the blob does not fit a bucket of this layout; nothing was written.
    """
    target = into.cast("B")
    if target.readonly:
        raise ValueError("the bucket cannot be written")
    try:
        spans = _spans(tensors, target.nbytes)
        views = {item: _views(target, item, ranges) for item, ranges in spans.items()}
        sections = _read_sections(memoryview(blob).cast("B"), target.nbytes, views)
    except (ValueError, struct.error, zstandard.ZstdError) as error:
        raise TransportError(f"delta: {error}") from None
    for section in sections:
        _apply(section, views[section.item])


# ---------------------------------------------------------------- layout


def _spans(tensors: Sequence[Tensor], nbytes: int) -> dict[int, list[tuple[int, int]]]:
    """Item size -> byte ranges of its tensors, neighbours joined."""
    found: dict[int, list[tuple[int, int]]] = {}
    end = 0
    for tensor in tensors:
        item = ITEM_BYTES.get(tensor.dtype, 0)
        if not item or tensor.offset % item or tensor.nbytes % item or tensor.nbytes < 0:
            raise ValueError(f"{tensor.name} is no {tensor.dtype} at {tensor.offset}")
        start, stop = tensor.offset, tensor.offset + tensor.nbytes
        if start < end or stop > nbytes:
            raise ValueError(f"{tensor.name} leaves its bucket of {nbytes} bytes or overlaps")
        end = stop
        ranges = found.setdefault(item, [])
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        elif stop > start:
            ranges.append((start, stop))
    return found


def _views(bucket: memoryview, item: int, spans: Sequence[tuple[int, int]]) -> list[Words]:
    return [np.frombuffer(bucket[start:stop], dtype=f"<u{item}") for start, stop in spans]


# ---------------------------------------------------------------- encoding


def _encode_items(old: list[Words], new: list[Words], item: int, packer: zstandard.ZstdCompressor) -> Iterator[bytes]:
    """The sections of all elements of one size."""
    block = BLOCK_BYTES // item
    at: list[Words] = []
    values: list[Words] = []
    first = done = 0
    for positions, changed, count in _scan(old, new, CHUNK_BYTES // item):
        if done - first + count > block:
            if at:
                yield _section(np.concatenate(at), np.concatenate(values), item, first, packer)
            at, values, first = [], [], done
        if len(positions):
            at.append(np.add(positions, done - first, dtype=np.uint32, casting="unsafe"))
            values.append(changed)
        done += count
    if at:
        yield _section(np.concatenate(at), np.concatenate(values), item, first, packer)


def _scan(old: list[Words], new: list[Words], chunk: int) -> Iterator[tuple[Words, Words, int]]:
    """Chunk by chunk: positions of changed elements, their XORed values, and the number of compared elements."""
    flags = np.empty(chunk, dtype=np.bool_)
    for before, after in zip(old, new, strict=True):
        for start in range(0, len(before), chunk):
            left, right = before[start : start + chunk], after[start : start + chunk]
            differs = np.not_equal(left, right, out=flags[: len(left)])
            if np.count_nonzero(differs) > DENSE * len(left):
                yield np.arange(len(left)), left ^ right, len(left)
            else:
                found = np.flatnonzero(differs)
                yield found, np.take(left, found) ^ np.take(right, found), len(left)


def _section(at: Words, values: Words, item: int, first: int, packer: zstandard.ZstdCompressor) -> bytes:
    gaps = _gaps(at)
    planes = values.view(np.uint8).reshape(len(values), item)
    streams = [gaps, *(np.ascontiguousarray(planes[:, byte]) for byte in range(item))]
    stored = [_smaller(stream, packer) for stream in streams]
    sizes = b"".join(_SIZE.pack(len(stream)) for stream in stored)
    return b"".join([_SECTION.pack(item, first, len(at), len(gaps)), sizes, *stored])


def _gaps(at: Words) -> Bytes:
    """Increasing positions as bytes."""
    skipped = np.diff(at, prepend=at.dtype.type(0))
    skipped[1:] -= 1
    if not len(skipped) or skipped.max() < ESCAPE:
        return skipped.astype(np.uint8)
    escapes, rest = np.divmod(skipped, at.dtype.type(ESCAPE))
    ends = np.cumsum(escapes + 1, dtype=np.int64)
    gaps = np.full(int(ends[-1]), ESCAPE, dtype=np.uint8)
    gaps[ends - 1] = rest
    return gaps


def _smaller(stream: Bytes, packer: zstandard.ZstdCompressor) -> bytes:
    packed = packer.compress(stream.data)
    return packed if len(packed) < stream.nbytes else stream.tobytes()


# ---------------------------------------------------------------- decoding


@dataclass(frozen=True)
class _Section:
    """Changes of one section; `gaps` and `planes` are checked against each other and against the elements."""

    item: int
    first: int
    gaps: Bytes
    planes: list[Bytes]


def _read_sections(blob: memoryview, nbytes: int, views: dict[int, list[Words]]) -> list[_Section]:
    """The sections of a blob. Raises ValueError, struct.error or ZstdError if anything does not fit."""
    magic, checksum = _SEAL.unpack_from(blob)
    if magic != MAGIC:
        raise ValueError(f"begins with {bytes(magic)!r}, not {MAGIC!r}")
    body = blob[_SEAL.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise ValueError("the checksum does not match")
    announced, count = _HEAD.unpack_from(body)
    if announced != nbytes:
        raise ValueError(f"for a bucket of {announced} bytes, this one has {nbytes}")
    unpacker = zstandard.ZstdDecompressor()
    free = {item: (0, sum(map(len, parts))) for item, parts in views.items()}  # item size -> elements not yet passed
    sections, position = [], _HEAD.size
    for _ in range(count):
        section, position, last = _read_section(body, position, free, unpacker)
        free[section.item] = (last + 1, free[section.item][1])
        sections.append(section)
    if position != body.nbytes:
        raise ValueError(f"{body.nbytes - position} bytes after the last section")
    return sections


def _read_section(
    body: memoryview, position: int, free: dict[int, tuple[int, int]], unpacker: zstandard.ZstdDecompressor
) -> tuple[_Section, int, int]:
    """A section, where the next one begins, and the last element it changes."""
    item, first, changes, length = _SECTION.unpack_from(body, position)
    position += _SECTION.size
    start, stop = free.get(item, (0, 0))
    left = stop - first
    if not start <= first < stop or not 0 < changes <= left or not changes <= length <= changes + left // ESCAPE:
        raise ValueError(f"{changes} changes in {length} bytes from element {first} of {start}..{stop}")
    stored = struct.unpack_from(f"<{1 + item}I", body, position)
    position += _SIZE.size * len(stored)
    streams = []
    for number, size in enumerate(stored):
        wanted = changes if number else length
        if not 0 < size <= wanted or position + size > body.nbytes:
            raise ValueError(f"a stream of {size} bytes for {wanted}")
        streams.append(_unpack(body[position : position + size], wanted, unpacker))
        position += size
    gaps, *planes = streams
    # The sum of all steps is the distance to the last change; every step is at least 1, so those before it are inside.
    last = first - 1 + int(gaps.sum(dtype=np.int64)) + changes
    if np.count_nonzero(gaps != ESCAPE) != changes or gaps[-1] == ESCAPE or last >= stop:
        raise ValueError(f"the positions are not {changes} within {left} elements")
    return _Section(item, first, gaps, planes), position, last


def _unpack(stored: memoryview, size: int, unpacker: zstandard.ZstdDecompressor) -> Bytes:
    """A stream of exactly `size` bytes; it is stored unpacked if it has as many bytes."""
    if stored.nbytes == size:
        return np.frombuffer(stored, dtype=np.uint8)
    if zstandard.frame_content_size(stored) != size:  # checked first: memory is allocated by the frame's own size
        raise ValueError(f"a stream does not unpack to {size} bytes")
    plain = unpacker.decompress(stored, allow_extra_data=False)
    if len(plain) != size:
        raise ValueError(f"a stream of {len(plain)} bytes for {size}")
    return np.frombuffer(plain, dtype=np.uint8)


def _apply(section: _Section, views: list[Words]) -> None:
    """XOR the changes into the elements."""
    item, done, reached = section.item, 0, section.first - 1
    for start in range(0, len(section.gaps), APPLY):
        gaps = section.gaps[start : start + APPLY]
        named = gaps != ESCAPE
        steps = np.cumsum(np.add(gaps, named, dtype=np.int64))
        at = steps[named] + reached
        reached += int(steps[-1])
        values = np.empty((len(at), item), dtype=np.uint8)
        for byte, plane in enumerate(section.planes):
            values[:, byte] = plane[done : done + len(at)]
        done += len(at)
        _xor(views, at, values.view(f"<u{item}").reshape(-1))


def _xor(views: list[Words], at: Words, values: Words) -> None:
    """`elements[at] ^= values` over the views as one array; `at` increases."""
    begin = 0
    low = 0
    for view in views:
        high = low + int(np.searchsorted(at[low:], begin + len(view)))
        if high > low:
            places = at[low:high] - begin
            if int(places[-1]) - int(places[0]) == high - low - 1:  # contiguous
                view[int(places[0]) : int(places[-1]) + 1] ^= values[low:high]
            else:
                view[places] ^= values[low:high]
        low, begin = high, begin + len(view)
