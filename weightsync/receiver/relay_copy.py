"""Relaying: a generator keeps versions that came over a network in host memory and serves them to others.

Guarantees:
1. the bytes of a copy had the digests of the manifest when they were taken; readers check them again;
2. nothing changes a copy before `end`; after that its bytes are not handed out. Every copy except the one in force ends
   before the engine makes room for the next version.
If the engine lent its memory (`asyncrl.plugins.Lending`), a copy is the engine's own memory and costs nothing. Else it
is one copy of the weights in host memory, two while the next version arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from asyncrl.wire import Buffer, Hop, Manifest, Tensor
from weightsync.transports.base import Outbox


class RelayCopy:
    """`buckets[k]` are the bytes of bucket k; `encoded[h][k]` is the blob of hop h for it."""

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
        """The buckets, or with hops the blobs of these; None if they are not the last ones of this version."""
        count, buckets = len(hops), self._buckets
        if buckets is None:
            yield None
        elif not count:
            yield [memoryview(bucket) for bucket in buckets]
        elif tuple(hops) == self.hops[-count:]:
            yield [memoryview(blob) for blobs in self._encoded[-count:] for blob in blobs]
        else:
            yield None

    def is_gone(self) -> bool:
        return self._buckets is None

    def end(self) -> None:
        """Stop serving: the bytes will change. Views that were handed out may change from now on."""
        self._buckets, self._encoded = None, ()


class Relay:
    """Offers copies through one outbox, which is made for the first of them."""

    def __init__(self, make_outbox: Callable[[], Outbox]) -> None:
        self.address = ""  # of the version in force; empty: it is not relayed
        self.copies: list[RelayCopy] = []  # offered and not ended
        self.outbox: Outbox | None = None
        self._make_outbox = make_outbox

    async def offer(self, copy: RelayCopy | None) -> None:
        """Serve the version in force; None: it is not relayed. Raises AsyncRLError if the outbox fails."""
        self.address = ""
        if copy is None:
            return
        self.copies.append(copy)
        if self.outbox is None:
            self.outbox = self._make_outbox()
        self.address = await asyncio.to_thread(self.outbox.offer, copy)

    def end_older(self, digest: str) -> None:
        """End all copies except that of the version in force."""
        current = [copy for copy in self.copies[-1:] if copy.manifest.digest == digest]
        for copy in self.copies[: len(self.copies) - len(current)]:
            copy.end()
        self.copies = current

    async def close(self) -> None:
        if self.outbox is not None:
            await asyncio.to_thread(self.outbox.close)
