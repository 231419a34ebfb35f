"""Checks again and again whether a generator still holds the weights that it committed.

Guarantees:
1. it takes at most `SHARE` of the time: a check that takes 3 s is followed by none for a minute;
2. a check that overlaps with a new version, or an update in place, has no result;
3. any other digest than that of the commit is an error and becomes the digest of that version: from then on samples
   carry it, and the buffer refuses them because it was never published.
It calls `engine.attest`; an engine without it is read by buckets (`read_bucket`); one without both is not checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.engine import Engine
from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.wire import Manifest, Tensor
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest

SHARE = 0.05
EVERY_S = 60.0
LOOK_S = 0.25


class Attestor:
    """Checks one engine at most once in `every_s`, never with 0. `committed` is set at each commit."""

    def __init__(self, engine: Engine, digests: dict[int, str], *, every_s: float, name: str) -> None:
        self.committed: tuple[Manifest, tuple[Tensor, ...]] | None = None
        self.committing = False
        self._engine = engine
        self._digests = digests
        self._every_s = every_s
        self._name = name
        self._changes = 0

    def note_change(self) -> None:
        """The engine's weights may change from here on: a check under way has no result."""
        self._changes += 1

    async def run(self, report: Callable[[AsyncRLError], Awaitable[None]]) -> None:
        """Check until the task is cancelled. Raises `engine.broken` after `report` on other weights."""
        due = time.monotonic() + self._every_s
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._every_s or time.monotonic() < due or self.committed is None or self.committing:
                continue
            started = time.monotonic()
            try:
                await self._check(*self.committed)
            except WorkError as error:
                await report(error)
                raise
            ended = time.monotonic()
            due = ended + max(self._every_s, (ended - started) / SHARE)

    async def _check(self, manifest: Manifest, tensors: tuple[Tensor, ...]) -> None:
        digest = await self._digest(manifest, tensors, self._changes)
        if digest and digest != manifest.digest:
            self._digests[manifest.version] = digest
            raise WorkError(
                "engine.broken",
                f"the weights of version {manifest.version} have changed since the commit: the model "
                f"holds {digest}, not {manifest.digest}",
                where=self._name,
            )

    async def _digest(self, manifest: Manifest, tensors: tuple[Tensor, ...], changes: int) -> str:
        """Digest of what the engine holds; empty if it cannot say, or if it changed meanwhile."""
        attest = getattr(self._engine, "attest", None)
        if attest is not None:
            digest: str = await attest()
            return digest if changes == self._changes else ""
        return await digest_buckets(self._engine, manifest, tensors, still=lambda: changes == self._changes)


async def digest_buckets(
    engine: Engine, manifest: Manifest, tensors: Sequence[Tensor], *, still: Callable[[], bool] = lambda: True
) -> str:
    """Digest of what an engine holds, read bucket by bucket; empty if it cannot be read, or once `still` is false."""
    if getattr(engine, "read_bucket", None) is None:
        return ""
    digests = []
    for number, group in enumerate(group_by_bucket(tensors, len(manifest.bucket_bytes))):
        bucket = bytearray(manifest.bucket_bytes[number])
        if not await engine.read_bucket(number, memoryview(bucket)):
            return ""
        like = manifest.bucket_digests[number]
        digests.append(await asyncio.to_thread(bucket_digest, group, bucket, like=like))
        if not still():
            return ""
    return version_digest(digests, base=manifest.base, adapter=manifest.adapter)
