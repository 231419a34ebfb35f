"""Several processes of one host write a version into one slot: each copies the bytes that it holds to their places.

Guarantees:
1. bytes and digests are those of `weightsync.staging.Staging.fill`;
2. a piece of a tensor (`weightsync.plan.digest`) that one process holds whole is digested while it is copied, of its
   source. One that several hold is digested in the slot, when all have written;
3. digests are made only if as many bytes were written as the plan has.

Example: a tensor of 2.5 MiB, half of it in each of two processes. The first one digests piece 0 and copies the first
quarter of piece 1, the second one digests piece 2; piece 1 is digested by `join_written`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.wire import Tensor
from weightsync.copy_digest import Crew, Pieces
from weightsync.plan.buckets import Plan, bucket_starts
from weightsync.plan.digest import DIGEST_BYTES, PIECE_BYTES, join_pieces

WAITING_BYTES = 64 << 20  # of chunks that wait to be copied

Bytes = npt.NDArray[np.uint8]
Place = tuple[str, int]  # a tensor of the plan, and the first of its bytes
#: Chunks of bytes by place. It gets a function that returns when all that it yielded is copied.
Lend = Callable[[Callable[[], None]], Iterable[tuple[Place, Bytes]]]


class Written(msgspec.Struct, frozen=True):
    """What one process wrote."""

    nbytes: int
    numbers: bytes  # uint32: the pieces that it digested, numbered through the tensors of the plan
    digests: bytes  # of these


class Layout:
    """The tensors of a plan in a slot."""

    def __init__(self, plan: Plan) -> None:
        starts, _ = bucket_starts(plan.bucket_bytes)
        counts = [-(-tensor.nbytes // PIECE_BYTES) for tensor in plan.tensors]
        ends = np.cumsum(counts)
        self.tensors = plan.tensors
        self.index = {tensor.name: number for number, tensor in enumerate(plan.tensors)}
        self.first_piece = ends - counts
        self.starts = [starts[tensor.bucket] + tensor.offset for tensor in plan.tensors]
        self.pieces = int(ends[-1])

    def bytes_at(self, slot: Bytes, piece: int) -> Bytes:
        """The bytes of a piece."""
        number = int(np.searchsorted(self.first_piece, piece, side="right")) - 1
        first = (piece - int(self.first_piece[number])) * PIECE_BYTES
        last = min(first + PIECE_BYTES, self.tensors[number].nbytes)
        return slot[self.starts[number] + first : self.starts[number] + last]


def write_rows(plan: Plan, slot: memoryview, lend: Lend, *, threads: int | None = None) -> Written:
    """Copy chunks into the slot.

    Raises:
        ValueError: a chunk is not of a tensor of the plan, or leaves it.
    """
    layout, target = Layout(plan), np.frombuffer(slot, np.uint8)
    nbytes, digested = 0, []
    with Crew(threads) as crew:
        for (name, start), data in lend(crew.settle):
            number = layout.index.get(name, -1)
            if number < 0 or start + data.size > layout.tensors[number].nbytes:
                raise ValueError(f"{data.size} bytes from {start} of {name} are not in the plan")
            there = target[layout.starts[number] + start :][: data.size]
            head, tail = _whole_pieces(layout.tensors[number], start, data.size)
            there[:head], there[tail:] = data[:head], data[tail:]
            if head < tail:
                pieces = Pieces()
                crew.copy(there[head:tail], data[head:tail], pieces)
                digested.append((int(layout.first_piece[number]) + (start + head) // PIECE_BYTES, pieces))
            nbytes += data.size
            crew.settle(WAITING_BYTES)
        crew.settle()
    numbers = [first + np.arange(len(pieces.digests), dtype=np.uint32) for first, pieces in digested]
    digests = b"".join(digest for _, pieces in digested for digest in pieces.digests)
    return Written(nbytes, np.concatenate([*numbers, np.zeros(0, np.uint32)]).astype(np.uint32).tobytes(), digests)


def _whole_pieces(tensor: Tensor, start: int, size: int) -> tuple[int, int]:
    """The part of a chunk that consists of whole pieces of its tensor; empty at its end if there are none."""
    head = min(-start % PIECE_BYTES, size)
    at_end = start + size == tensor.nbytes
    tail = size if at_end else size - (start + size) % PIECE_BYTES
    return (head, tail) if head < tail else (size, size)


def join_written(plan: Plan, slot: memoryview, parts: Sequence[Written]) -> tuple[str, ...]:
    """The digests of the buckets, when all have written.

    Raises:
        ValueError: bytes are missing.
    """
    wanted, written = sum(tensor.nbytes for tensor in plan.tensors), sum(part.nbytes for part in parts)
    if wanted != written:
        raise ValueError(f"{written} bytes were written, {wanted} planned")
    layout = Layout(plan)
    table = np.zeros((layout.pieces, DIGEST_BYTES), np.uint8)
    missing = np.ones(layout.pieces, bool)
    for part in parts:
        numbers = np.frombuffer(part.numbers, np.uint32)
        table[numbers] = np.frombuffer(part.digests, np.uint8).reshape(-1, DIGEST_BYTES)
        missing[numbers] = False
    rest = Pieces()
    with Crew() as crew:
        source = np.frombuffer(slot, np.uint8)
        for piece in np.flatnonzero(missing):
            crew.copy(None, layout.bytes_at(source, int(piece)), rest)
        crew.settle()
    table[missing] = np.frombuffer(b"".join(rest.digests), np.uint8).reshape(-1, DIGEST_BYTES)
    return tuple(_bucket_digests(plan, layout, table))


def _bucket_digests(plan: Plan, layout: Layout, table: Bytes) -> Iterator[str]:
    bounds = {tensor.bucket: int(layout.first_piece[number]) for number, tensor in reversed([*enumerate(plan.tensors)])}
    ends = [*(bounds[bucket] for bucket in range(1, len(plan.bucket_bytes))), layout.pieces]
    for bucket, end in enumerate(ends):
        yield join_pieces([table[bounds[bucket] : end].tobytes()])
