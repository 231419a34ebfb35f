"""A version as a generator keeps it in host memory, to pass it on to others.

Made by the receiver while it takes a version over a network, offered through an outbox (`weightsync.transports.base`).
Guarantees:
1. its bytes had the digests of the manifest when they were taken; readers check them again;
2. nothing changes it after it was made; it lives as long as somebody holds it or one of its views.
It costs one copy of the weights in host memory (two while the next version arrives).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncrl.wire import Hop, Manifest, Tensor


class HeldVersion:
    """`buckets[k]` are the bytes of bucket k; `encoded[h][k]` the blob of hop h that belongs to it."""

    def __init__(
        self, manifest: Manifest, tensors: tuple[Tensor, ...], hops: tuple[Hop, ...], buckets: Sequence[bytes],
        encoded: Sequence[Sequence[bytes]],
    ) -> None:  # fmt: skip
        self.manifest = manifest
        self.tensors = tensors
        self.hops = hops
        self._buckets = tuple(buckets)
        self._encoded = tuple(tuple(blobs) for blobs in encoded)

    @contextmanager
    def blobs(self, hops: Sequence[Hop]) -> Iterator[list[memoryview] | None]:
        """The buckets, or with hops the blobs of these; None where they are not the last ones of its own."""
        count = len(hops)
        if not count:
            yield [memoryview(bucket) for bucket in self._buckets]
        elif tuple(hops) == self.hops[-count:]:
            yield [memoryview(blob) for blobs in self._encoded[-count:] for blob in blobs]
        else:
            yield None
