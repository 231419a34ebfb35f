"""Looks again and again whether a generator still holds the weights that it committed.

Run by the receiver beside its polls. Guarantees:
1. at most `SHARE` of the time goes into it: a look that takes 3 s is followed by none for a minute;
2. a look that a new version, or an update in place, ran into says nothing;
3. anything else than the digest of the commit is found wrong, with the digest of what is held: from then on samples
   carry that one, which nobody has published, and the buffer refuses them.
It reads what the engine holds by `engine.attest`; an engine that has none is read bucket by bucket (`read_bucket`); one
that can do neither is not looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.engine import Engine
from asyncrl.wire import Manifest, Tensor
from weightsync.plan.buckets import by_bucket
from weightsync.plan.digest import bucket_digest, whole_digest

SHARE = 0.05
EVERY_S = 60.0


async def held_digest(
    engine: Engine, manifest: Manifest, tensors: tuple[Tensor, ...], *, still: Callable[[], bool]
) -> str:
    """Digest of what the engine holds, laid out as the manifest says; empty where it cannot say, or `still` is over."""
    whole = getattr(engine, "attest", None)
    if whole is not None:
        digest: str = await whole()
        return digest if still() else ""
    if getattr(engine, "read_bucket", None) is None:
        return ""
    digests = []
    for number, group in enumerate(by_bucket(tensors, len(manifest.bucket_bytes))):
        bucket = bytearray(manifest.bucket_bytes[number])
        if not await engine.read_bucket(number, memoryview(bucket)):
            return ""
        digests.append(await asyncio.to_thread(bucket_digest, group, bucket))
        if not still():
            return ""
    return whole_digest(digests, base=manifest.base, adapter=manifest.adapter)
