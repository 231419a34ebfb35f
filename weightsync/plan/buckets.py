"""Plans how tensors become buckets. Pure: no torch, no I/O.

Guarantees:
1. tensors keep the order they are given in; a tensor lies whole in one bucket, at a multiple of its item size;
2. a bucket holds at most `bucket_bytes`, unless one tensor alone is larger;
3. the plan digest covers names, dtypes, shapes, buckets, offsets and bucket sizes: equal digests, equal layouts;
4. `check_layout` accepts no layout with a tensor outside of its bucket.

Example: with `bucket_bytes=16`, tensors a F32 `[2]` (8 B), b U8 `[3]`, c F32 `[1]`, d F32 `[3]` lie at
a 0:0, b 0:8, c 0:12 (aligned up from 11), d 1:0; `bucket_bytes` of the plan is `(16, 12)`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import msgspec

from asyncrl.errors import HandshakeError
from asyncrl.wire import ALIGNMENT, Manifest, Tensor

#: (start, stop) for each axis of a tensor.
Box = tuple[tuple[int, int], ...]
#: Bytes per element by safetensors dtype name.
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor to send. `dtype` is a safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Plan(msgspec.Struct, frozen=True):
    """The layout of all versions of one model; `digest` identifies it."""

    tensors: tuple[Tensor, ...]
    bucket_bytes: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Size of one copy of the weights, with the padding between tensors."""
        return sum(self.bucket_bytes)


def full_box(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple((0, side) for side in shape)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def plan_buckets(specs: Iterable[TensorSpec], *, bucket_bytes: int) -> Plan:
    """Place the tensors. Raises ValueError on an unknown dtype, a repeated name or no tensor at all."""
    tensors: list[Tensor] = []
    sizes: list[int] = []
    names: set[str] = set()
    for spec in specs:
        if spec.dtype not in ITEM_BYTES or spec.name in names or any(side < 0 for side in spec.shape):
            raise ValueError(f"{spec.name}: dtype {spec.dtype}, shape {spec.shape}; or the name repeats")
        names.add(spec.name)
        offset = sizes[-1] + -sizes[-1] % ITEM_BYTES[spec.dtype] if sizes else 0
        if not sizes or (offset and offset + spec.nbytes > bucket_bytes):
            sizes.append(0)
            offset = 0
        tensors.append(Tensor(spec.name, spec.dtype, spec.shape, len(sizes) - 1, offset, spec.nbytes))
        sizes[-1] = offset + spec.nbytes
    if not tensors:
        raise ValueError("no tensors to plan")
    return Plan(tuple(tensors), tuple(sizes), plan_digest(tensors, sizes))


def plan_digest(tensors: Sequence[Tensor], bucket_bytes: Sequence[int]) -> str:
    """Digest of a layout: blake2b-128 hex of its msgpack form."""
    return hashlib.blake2b(msgspec.msgpack.encode((tensors, bucket_bytes)), digest_size=16).hexdigest()


def bucket_starts(bucket_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The start of each bucket in a staging slot (aligned to 64 bytes), and the size of the slot."""
    starts, end = [], 0
    for size in bucket_bytes:
        starts.append(end)
        end += size + -size % ALIGNMENT
    return tuple(starts), max(end, 1)


def group_by_bucket(tensors: Sequence[Tensor], buckets: int) -> list[list[Tensor]]:
    """The tensors of each bucket, in plan order."""
    groups: list[list[Tensor]] = [[] for _ in range(buckets)]
    for tensor in tensors:
        groups[tensor.bucket].append(tensor)
    return groups


def check_layout(manifest: Manifest, tensors: Sequence[Tensor]) -> None:
    """Raise `sync.plan` unless the tensors are the layout of the manifest and none leaves its bucket or overlaps."""

    def refuse(what: str) -> HandshakeError:
        return HandshakeError("sync.plan", f"version {manifest.version}: {what}", where="weightsync")

    if len(manifest.bucket_digests) != len(manifest.bucket_bytes):
        raise refuse(f"{len(manifest.bucket_digests)} digests for {len(manifest.bucket_bytes)} buckets")
    if plan_digest(tensors, manifest.bucket_bytes) != manifest.plan:
        raise refuse("the tensors are not those of the plan digest")
    end = (0, 0)
    for tensor in tensors:
        if tensor.dtype not in ITEM_BYTES or tensor.nbytes != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
            raise refuse(f"{tensor.name}: {tensor.nbytes} bytes do not fit {tensor.dtype} {tensor.shape}")
        place = (tensor.bucket, tensor.offset)
        inside = 0 <= tensor.bucket < len(manifest.bucket_bytes) and tensor.offset >= 0
        if not inside or tensor.offset + tensor.nbytes > manifest.bucket_bytes[tensor.bucket] or place < end:
            raise refuse(f"{tensor.name} leaves its bucket or overlaps")
        end = (tensor.bucket, tensor.offset + tensor.nbytes)
