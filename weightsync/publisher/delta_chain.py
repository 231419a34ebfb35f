"""The publisher's versions and the hops between them: members with an older version take hops instead of the weights.

`DeltaChain` encodes the hop to the newest version on the publisher's encoding thread, never on the training thread.
Guarantees:
1. a hop is made of two versions that were not overwritten meanwhile, or it is dropped;
2. hops are contiguous and lead to their version: the last one starts at the version before, or, if versions come faster
   than they are encoded, at the last one that was encoded;
3. at most `limit` hops are kept, and never more bytes than one copy of the weights; the oldest go first. A hop that is
   not smaller than the weights, or not encoded within `deadline_s`, is dropped with all before it (`why`);
4. the version that the next hop starts from stays in its slot until that hop is encoded.

Example (limit 4): versions 5, 6, 7 of 1 GB that differ in 1 % each: version 7 has the hops 5->6 and 6->7 of about 20
MB. Version 8 comes while 6->7 is encoded, and 9 too: then 7->9 is next, and a member with 8 takes the whole weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from asyncrl.wire import Hop, Manifest, Tensor
from weightsync.encoding.delta import encode
from weightsync.plan.buckets import Plan, group_by_bucket
from weightsync.staging import Slot, Staging


@dataclass(eq=False)
class Staged:
    """A version in its slot; None while it was only sent `direct`. `order` is the number of the slot's filling; `round`
    is 0 until the service took it; `ready` once its hops are final."""

    manifest: Manifest
    plan: Plan
    staging: Staging
    slot: Slot | None
    order: int
    round: int = 0
    ready: bool = False
    hops: tuple[Hop, ...] = ()
    encoded: tuple[tuple[bytes, ...], ...] = ()  # of each hop, by bucket
    tensors: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = self.plan.tensors

    def is_gone(self) -> bool:
        """Never while a reader is served: `blobs` holds the slot."""
        return False

    @contextmanager
    def blobs(self, hops: Sequence[Hop]) -> Iterator[list[memoryview] | None]:
        """As in `transports.base.Version`. If all slots are held, the oldest is overwritten: digests show it."""
        count = len(hops)
        if count:
            known = count <= len(self.hops) and self.hops[-count:] == tuple(hops)
            yield [memoryview(blob) for hop in self.encoded[-count:] for blob in hop] if known else None
            return
        with self.staging.hold(self.slot, self.order) as intact:
            yield self.buckets() if intact else None

    def buckets(self) -> list[memoryview]:
        """The bytes in its slot; hold it meanwhile."""
        assert self.slot is not None
        return self.slot.buckets(self.manifest.bucket_bytes)


class DeltaChain:
    """The hops to the newest version. Used by one thread; `stop` by any."""

    def __init__(self, *, limit: int, deadline_s: float, threads: int) -> None:
        self.why = "no version before"  # why the newest version has no hop; empty if it has one
        self.encode_s = 0.0  # of the last hop
        self._limit = limit
        self._deadline_s = deadline_s
        self._threads = max(1, threads)
        self._steps: list[tuple[Hop, tuple[bytes, ...]]] = []  # oldest first
        self._end: Staged | None = None  # end of the last hop, start of the next one
        self._hold = ExitStack()  # holds the slot of `_end`
        self._stopped = False

    @property
    def hop_bytes(self) -> int:
        """Size of the last hop; 0 if there is none."""
        return sum(self._steps[-1][0].nbytes) if self._steps else 0

    def extend(self, version: Staged, *, wanted: bool = True) -> None:
        """Add the hops to a version; none if they are not wanted. The next hop starts from it.

        A version that was overwritten before it could be encoded changes nothing.
        """
        with ExitStack() as hold:
            if not hold.enter_context(version.staging.hold(version.slot, version.order)):
                return
            started = time.monotonic()
            self.why = self.why if wanted else "no member takes hops"
            step = self._step(version) if self._end is not None and wanted else None
            self.encode_s = time.monotonic() - started
            self._steps = self._trim(version, [*self._steps, step]) if step is not None else []
            version.hops = tuple(hop for hop, _ in self._steps)
            version.encoded = tuple(blobs for _, blobs in self._steps)
            self._hold.close()
            self._hold, self._end = hold.pop_all(), version

    def _trim(self, version: Staged, steps: list[tuple[Hop, tuple[bytes, ...]]]) -> list[tuple[Hop, tuple[bytes, ...]]]:
        steps = steps[-self._limit :] if self._limit else []
        while sum(sum(hop.nbytes) for hop, _ in steps) >= version.plan.nbytes:
            steps.pop(0)
        return steps

    def _step(self, version: Staged) -> tuple[Hop, tuple[bytes, ...]] | None:
        base = self._end
        assert base is not None
        if (base.plan.digest, base.manifest.encoding, "full") != (
            version.plan.digest,
            "full",
            version.manifest.encoding,
        ):
            self.why = "the version before has another layout"
            return None
        blobs = self._encode(base, version)
        if blobs is not None and not base.staging.is_intact(base.slot, base.order):
            self.why, blobs = "the version before was overwritten", None
        if blobs is not None and not version.staging.is_intact(version.slot, version.order):
            self.why, blobs = "it was overwritten", None
        if blobs is None:
            return None
        self.why = ""
        hop = Hop(base.manifest.version, base.manifest.digest, tuple(map(len, blobs)))
        return hop, tuple(blobs)

    def _encode(self, base: Staged, version: Staged) -> list[bytes] | None:
        """The blobs of all buckets; None if they are too large, or take too long."""
        old, new = base.buckets(), version.buckets()
        until = time.monotonic() + self._deadline_s
        with ThreadPoolExecutor(self._threads, thread_name_prefix="weightsync-encode") as pool:
            parts = [
                pool.submit(encode, *of)
                for of in zip(old, new, group_by_bucket(version.tensors, len(new)), strict=True)
            ]
            try:
                return self._collect(parts, version.plan.nbytes, until)
            finally:
                for part in parts:
                    part.cancel()

    def _collect(self, parts: list[Future[bytes]], most: int, until: float) -> list[bytes] | None:
        blobs: list[bytes] = []
        for part in parts:
            try:
                blobs.append(part.result(max(0.0, until - time.monotonic())))
            except (FutureTimeout, CancelledError):
                self.why = f"not encoded within {self._deadline_s:g} s"
                return None
            if self._stopped or sum(map(len, blobs)) >= most:
                self.why = "the end" if self._stopped else "not smaller than the weights"
                return None
        return blobs

    def stop(self) -> None:
        """End the current encoding soon."""
        self._stopped = True

    def close(self) -> None:
        self._hold.close()
