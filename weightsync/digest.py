"""Digests of weights: the same number at the learner, on the way and in the generator's model.

Called by the publisher (while it copies), the receiver (before it commits) and engines (over what their model holds
after the commit). Guarantees:
1. the digest of a bucket is blake3-128 over the bytes of its tensors in plan order; padding is left out, so an engine
   can compute it from its own tensors;
2. the digest of a version is blake3-128 over the ASCII of its bucket digests in order, for an adapter followed by a
   line with the digest of its base and one with its configuration.
No torch; anything with the buffer protocol is accepted. blake3, because it runs at nearly the speed of a copy and yet
nobody can make other weights with the same digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from blake3 import blake3

from asyncrl.wire import Buffer, Tensor
from weightsync.plan import by_bucket

DIGEST_BYTES = 16


class Digest:
    """A running blake3-128."""

    def __init__(self) -> None:
        self._state = blake3()

    def update(self, data: Buffer) -> None:
        """Take more bytes; other threads run meanwhile."""
        self._state.update(data)

    def hexdigest(self) -> str:
        """The digest so far, 32 characters."""
        return self._state.hexdigest(length=DIGEST_BYTES)


def bucket_digest(tensors: Iterable[Tensor], bucket: Buffer) -> str:
    """Digest of one bucket from its bytes; `tensors` are those that lie in it."""
    view = memoryview(bucket).cast("B")
    digest = Digest()
    for tensor in tensors:
        digest.update(view[tensor.offset : tensor.offset + tensor.nbytes])
    return digest.hexdigest()


def whole_digest(bucket_digests: Sequence[str], *, base: str = "", adapter: str = "") -> str:
    """Digest of a version from those of its buckets; `base` and `adapter` as in a manifest."""
    digest = Digest()
    digest.update("".join(bucket_digests).encode())
    if base or adapter:
        digest.update(f"\n{base}\n{adapter}".encode())
    return digest.hexdigest()


def digest_tensors(tensors: Sequence[Tensor], bytes_of: Callable[[str], Buffer]) -> tuple[tuple[str, ...], str]:
    """Bucket digests and the digest of the whole, from the bytes of each tensor by name.

    Raises:
        ValueError: a tensor has another size than planned.
    """
    buckets = 1 + max((tensor.bucket for tensor in tensors), default=-1)
    digests = []
    for group in by_bucket(tensors, buckets):
        digest = Digest()
        for tensor in group:
            view = memoryview(bytes_of(tensor.name))
            if view.nbytes != tensor.nbytes:
                raise ValueError(f"{tensor.name}: {view.nbytes} bytes, planned {tensor.nbytes}")
            digest.update(view)
        digests.append(digest.hexdigest())
    return tuple(digests), whole_digest(digests)
