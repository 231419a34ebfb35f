"""A version as a generator keeps it in host memory, to pass it on to others.

Made by the receiver while it takes a version over a network, offered through an outbox (`weightsync.transports.base`).
Guarantees:
1. its bytes had the digests of the manifest when they were taken; readers check them again;
2. until `end` nothing changes it; after that nothing more is handed out. The receiver ends every version but the one in
   force before its engine makes room for the next.
Where the engine lent its room (`asyncrl.plugins.Lending`) these are the engine's own bytes and cost nothing. Else it is
one copy of the weights in host memory, two while the next version arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyncrl.wire import Buffer, Hop, Manifest, Tensor


class HeldVersion:
    """`buckets[k]` are the bytes of bucket k; `encoded[h][k]` the blob of hop h that belongs to it."""

    def __init__(
        self,
        manifest: Manifest,
        tensors: tuple[Tensor, ...],
        hops: tuple[Hop, ...],
        buckets: Sequence[Buffer],
        encoded: Sequence[Sequence[bytes]],
    ) -> None:
        self.manifest = manifest
        self.tensors = tensors
        self.hops = hops
        self._buckets: tuple[Buffer, ...] | None = tuple(buckets)
        self._encoded = tuple(tuple(blobs) for blobs in encoded)

    @contextmanager
    def blobs(self, hops: Sequence[Hop]) -> Iterator[list[memoryview] | None]:
        """The buckets, or with hops the blobs of these; None where they are not the last ones of its own."""
        count, buckets = len(hops), self._buckets
        if buckets is None:
            yield None
        elif not count:
            yield [memoryview(bucket) for bucket in buckets]
        elif tuple(hops) == self.hops[-count:]:
            yield [memoryview(blob) for blobs in self._encoded[-count:] for blob in blobs]
        else:
            yield None

    def gone(self) -> bool:
        """Whether `end` was called."""
        return self._buckets is None

    def end(self) -> None:
        """Its bytes will change, or are not needed any more. Views that were handed out may show others from now on."""
        self._buckets, self._encoded = None, ()
