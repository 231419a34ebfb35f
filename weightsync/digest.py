"""Digests of weights: the same number at the learner, on the way and in the generator's model.

Called by the publisher (while it copies), the receiver (before it commits) and engines (over what their model holds
after the commit). Guarantees:
1. the digest of a bucket is blake2b-128 over the bytes of its tensors in plan order; padding is left out, so an engine
   can compute it from its own tensors;
2. the digest of a version is blake2b-128 over the ASCII of its bucket digests in order.
No torch; anything with the buffer protocol is accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from asyncrl.wire import Buffer, Tensor
from weightsync.plan import by_bucket

DIGEST_BYTES = 16


def bucket_digest(tensors: Iterable[Tensor], bucket: Buffer) -> str:
    """Digest of one bucket from its bytes; `tensors` are those that lie in it."""
    view = memoryview(bucket).cast("B")
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        digest.update(view[tensor.offset : tensor.offset + tensor.nbytes])
    return digest.hexdigest()


def whole_digest(bucket_digests: Sequence[str]) -> str:
    """Digest of a version from those of its buckets."""
    return hashlib.blake2b("".join(bucket_digests).encode(), digest_size=DIGEST_BYTES).hexdigest()


def digest_tensors(tensors: Sequence[Tensor], bytes_of: Callable[[str], Buffer]) -> tuple[tuple[str, ...], str]:
    """Bucket digests and the digest of the whole, from the bytes of each tensor by name.

    Raises:
        ValueError: a tensor has another size than planned.
    """
    buckets = 1 + max((tensor.bucket for tensor in tensors), default=-1)
    digests = []
    for group in by_bucket(tensors, buckets):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for tensor in group:
            view = memoryview(bytes_of(tensor.name))
            if view.nbytes != tensor.nbytes:
                raise ValueError(f"{tensor.name}: {view.nbytes} bytes, planned {tensor.nbytes}")
            digest.update(view)
        digests.append(digest.hexdigest())
    return tuple(digests), whole_digest(digests)
