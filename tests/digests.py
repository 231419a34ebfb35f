"""Digests of a version from the bytes of its tensors, to compare with those of manifests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.wire import Buffer, Tensor
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import Digest, version_digest


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
