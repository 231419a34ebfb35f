"""Digests of weights: the same value at the learner, during the transfer and in the generator's model.

Guarantees:
1. a tensor is cut into pieces of `PIECE_BYTES` (the last one is shorter, an empty tensor has none); the digest of a
   bucket is blake3-128 over the blake3-128 of its pieces, tensor by tensor in plan order; padding is left out, so an
   engine can compute it from its own tensors, and pieces can be digested on all cores, in any order;
2. the digest of a version is blake3-128 over the ASCII of its bucket digests in order, for an adapter followed by a
   line with the digest of its base and one with its configuration.
With transport `direct` the digest of a bucket is that of `weightsync.plan.sum_digest`; its prefix tells.
No torch; accepts any object with the buffer protocol. blake3 is nearly as fast as a copy, and still cryptographic. The
borders of tensors are not part of it: the plan's digest covers them.

Example: a bucket of tensors of 2.5 MiB and 100 B has four pieces (1, 1 and 0.5 MiB, 100 B); 64 bytes are hashed last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from blake3 import blake3

from asyncrl.wire import Buffer, Tensor
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.sum_digest import SUM, SumDigest

DIGEST_BYTES = 16
PIECE_BYTES = 1 << 20


class Digest:
    """The digest of one bucket, tensor by tensor."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def update(self, tensor: Buffer) -> None:
        """Add the bytes of the next tensor, whole: another cut gives another digest. Other threads run meanwhile."""
        view = memoryview(tensor).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            self._pieces.append(blake3(view[start : start + PIECE_BYTES]).digest(length=DIGEST_BYTES))

    def hexdigest(self) -> str:
        """The digest so far, 32 characters."""
        return join_pieces(self._pieces)


def join_pieces(pieces: Iterable[bytes]) -> str:
    """Digest of a bucket from those of its pieces, in order."""
    return blake3(b"".join(pieces)).hexdigest(length=DIGEST_BYTES)


def new_digest(like: str = "") -> Digest | SumDigest:
    """An empty digest of the kind that this published digest of a bucket has."""
    return SumDigest() if like.startswith(SUM) else Digest()


def bucket_digest(tensors: Iterable[Tensor], bucket: Buffer, *, like: str = "") -> str:
    """Digest of one bucket from its bytes; `tensors` are those in it. `like`: as in `new_digest`."""
    view = memoryview(bucket).cast("B")
    digest = new_digest(like)
    for tensor in tensors:
        digest.update(view[tensor.offset : tensor.offset + tensor.nbytes])
    return digest.hexdigest()


def version_digest(bucket_digests: Sequence[str], *, base: str = "", adapter: str = "") -> str:
    """Digest of a version from those of its buckets; `base` and `adapter` as in a manifest."""
    digest = blake3("".join(bucket_digests).encode())
    if base or adapter:
        digest.update(f"\n{base}\n{adapter}".encode())
    return digest.hexdigest(length=DIGEST_BYTES)


def digest_tensors(tensors: Sequence[Tensor], get_bytes: Callable[[str], Buffer]) -> tuple[tuple[str, ...], str]:
    """Bucket digests and the digest of the whole, from the bytes of each tensor by name.

    Raises:
        ValueError: the size of a tensor is not the planned one.
    """
    buckets = 1 + max((tensor.bucket for tensor in tensors), default=-1)
    digests = []
    for group in group_by_bucket(tensors, buckets):
        digest = Digest()
        for tensor in group:
            view = memoryview(get_bytes(tensor.name))
            if view.nbytes != tensor.nbytes:
                raise ValueError(f"{tensor.name}: {view.nbytes} bytes, planned {tensor.nbytes}")
            digest.update(view)
        digests.append(digest.hexdigest())
    return tuple(digests), version_digest(digests)
