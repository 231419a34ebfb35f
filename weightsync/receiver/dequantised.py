"""Decodes quantised versions (`weightsync.encoding.quantised`) for an engine, which gets plain weights.

It stands between a transfer and any engine, so that no engine knows of codes. Guarantees:
1. a bucket is copied, digested and compared with the manifest before any of it is decoded;
2. decoded buckets are digested before the engine gets them. What it holds after each bucket, after the commit and in
   later checks is compared with that; only if both are equal is the answer the published digest, which covers codes and
   scales;
3. decoded weights have the dtype of the other tensors, whatever `producers.dtype` is: one policy on all generators;
4. for deltas the codes of the committed version are kept in host memory (`keep`).
Buckets come in order, as `weightsync.receiver.transfer` brings them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
import numpy as np

from asyncrl.engine import Engine, EngineCapabilities
from asyncrl.errors import HandshakeError, WorkError
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.copy_digest import copy_digest
from weightsync.encoding.quantised import CODES, SUFFIX, decode
from weightsync.plan.buckets import TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.receiver.attestation import digest_buckets
from weightsync.transports.base import TransportError

Placed = tuple[Tensor, Tensor]  # a tensor as it is sent, and its place in the decoded plan


class Decoding:
    """One version: as it is sent, and as the engine gets it."""

    def __init__(self, sent: Manifest, tensors: Sequence[Tensor]) -> None:
        self.sent = sent
        self.buckets: dict[int, bytearray] = {}  # as they were sent
        self.digests: list[str] = []  # of decoded buckets
        self._sent_groups = group_by_bucket(tensors, len(sent.bucket_bytes))
        self._scales: dict[str, memoryview] = {}
        codes = {tensor.name for tensor in tensors if tensor.dtype in CODES}
        scales = {name + SUFFIX for name in codes}
        held = [tensor for tensor in tensors if tensor.name not in scales]
        plain = [tensor.dtype for tensor in held if tensor.name not in codes]
        if not plain or len(held) + len(scales) != len(tensors):
            what = f"version {sent.version}: codes without scales, or no other tensor"
            raise HandshakeError("sync.plan", what, where="weightsync")
        self.plan = plan_buckets(
            [TensorSpec(one.name, plain[0] if one.name in codes else one.dtype, one.shape) for one in held],
            bucket_bytes=max(sent.bucket_bytes),
        )
        self.groups = group_by_bucket(self.plan.tensors, len(self.plan.bucket_bytes))
        self._places = {tensor.name: tensor for tensor in self.plan.tensors}
        # For the engine. The digests of its buckets are not known before they are decoded.
        self.manifest = msgspec.structs.replace(
            sent,
            plan=self.plan.digest,
            bucket_bytes=self.plan.bucket_bytes,
            bucket_digests=("",) * len(self.groups),
            signature="",
        )

    @property
    def digest(self) -> str:
        """Of the decoded weights."""
        return version_digest(self.digests)

    def take(self, number: int, data: Buffer) -> str:
        """Copy a bucket; the digest of the copy."""
        room = self.buckets[number] = bytearray(self.sent.bucket_bytes[number])
        target, source = np.frombuffer(room, np.uint8), np.frombuffer(data, np.uint8)
        parts = [slice(one.offset, one.offset + one.nbytes) for one in self._sent_groups[number]]
        return copy_digest((target[part], source[part]) for part in parts)

    def list_places(self, number: int) -> Iterator[Placed]:
        """The tensors of a bucket; its scales are kept for the matrices that follow."""
        for tensor in self._sent_groups[number]:
            if tensor.name in self._places:
                yield tensor, self._places[tensor.name]
            else:
                self._scales[tensor.name] = self._bytes(tensor)

    def decode(self, placed: Iterable[Placed], room: memoryview) -> None:
        """Write the weights of these tensors to a decoded bucket."""
        for tensor, place in placed:
            raw, target = self._bytes(tensor), room[place.offset : place.offset + place.nbytes]
            if tensor.dtype not in CODES:
                target[:] = raw
            elif scale := self._scales.pop(tensor.name + SUFFIX):
                decode(raw, scale, target, sent=tensor.dtype, held=place.dtype)

    def _bytes(self, tensor: Tensor) -> memoryview:
        return memoryview(self.buckets[tensor.bucket])[tensor.offset : tensor.offset + tensor.nbytes]


class DequantisedEngine:
    """The part of `asyncrl.engine.Engine` that a receiver uses."""

    def __init__(self, engine: Engine, *, keep: bool) -> None:
        self._engine = engine
        self._keep = keep
        self._pending: Decoding | None = None
        self._current: Decoding | None = None
        self._room: memoryview | None = None  # of the decoded bucket that is filled

    def capabilities(self) -> EngineCapabilities:
        """Those of the engine, without adapters: their base would be other weights than the learner's."""
        return msgspec.structs.replace(self._engine.capabilities(), encodings=("full",))

    def fingerprint(self) -> str:
        return self._engine.fingerprint()

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        self._pending = self._room = None
        pending = Decoding(manifest, tensors)
        await self._engine.begin_update(pending.manifest, pending.plan.tensors)
        self._pending = pending

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        """Take a bucket as it was sent; the digest of the copy. What has another digest is not decoded."""
        pending = self._require()
        digest = await asyncio.to_thread(pending.take, number, data)
        if digest == pending.sent.bucket_digests[number]:
            for bucket, run in groupby(pending.list_places(number), key=lambda placed: placed[1].bucket):
                await self._decode(pending, bucket, list(run))
        if not self._keep:
            del pending.buckets[number]  # a scale that waits for its matrix keeps its own
        return digest

    async def _decode(self, pending: Decoding, bucket: int, run: list[Placed]) -> None:
        """Decode tensors into a bucket, and give it to the engine if they are its last ones."""
        lend: Callable[[int], memoryview | None] = getattr(self._engine, "bucket_room", lambda _: None)
        room = self._room or lend(bucket) or memoryview(bytearray(pending.plan.bucket_bytes[bucket]))
        self._room = room
        await asyncio.to_thread(pending.decode, run, room)
        if run[-1][1] is not pending.groups[bucket][-1]:
            return
        self._room = None
        digest = await asyncio.to_thread(bucket_digest, pending.groups[bucket], room)
        held = await self._engine.apply_bucket(bucket, room)
        if held and held != digest:
            raise TransportError(f"bucket {bucket} of version {pending.sent.version} was changed in the engine")
        pending.digests.append(digest)

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        """Write the bytes of a bucket of the committed version as it was sent."""
        room = self._current.buckets.get(number) if self._current is not None else None
        if room is None or len(room) != into.nbytes:
            return False
        into[:] = room
        return True

    async def commit_update(self) -> str:
        pending = self._require()
        digest = await self._engine.commit_update()
        self._current, self._pending = pending, None
        return pending.sent.digest if digest == pending.digest else digest

    async def abort_update(self) -> None:
        self._pending = self._room = None
        await self._engine.abort_update()

    async def attest(self) -> str:
        """See `asyncrl.engine.Attesting`. An engine that compares checksums answers with the digest it was told."""
        current = self._current
        if current is None:
            return ""
        attest: Callable[[], Awaitable[str]] | None = getattr(self._engine, "attest", None)
        if attest is not None:
            digest = await attest()
        else:
            digest = await digest_buckets(self._engine, current.manifest, current.plan.tensors)
        return current.sent.digest if digest == current.digest else digest

    def _require(self) -> Decoding:
        if self._pending is None:
            raise WorkError("sync.failed", "no update is under way")
        return self._pending
