"""Takes one version from an inbox into an engine: reads a blob ahead, decodes, applies, compares digests.

Guarantees:
1. a separate thread reads a blob while the one before is decoded, applied and digested; one thread uses the inbox, from
   `open` to `close`;
2. each bucket is checked by the digest of what the engine holds after it took the bucket (of the bytes that it got, if
   it cannot say), compared with the manifest's;
3. with hops the bytes of the base are the engine's own (`read_bucket`); they are decoded in a buffer of this transfer,
   the next bucket while the engine takes this one. The blobs of all hops except the last are kept until their buckets
   are due: a transport delivers hop after hop;
4. a bucket is read (or decoded) directly into memory that the engine lends (`bucket_room`), else into memory of the
   transport (of this transfer), which the engine copies;
5. after an error, a deadline or a cancellation the reading thread has its own memory, or memory that the engine does
   not use after the abort; it closes the inbox after its read.
Every failure is a `TransportError`; `HopsUseless` means that whole weights would help.

Example (3 buckets, 2 hops): blobs 0 1 2 are kept, then blob 3 comes: bucket 0 = base, blob 0, blob 3; and so on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from asyncrl.config import WeightSyncConfig
from asyncrl.engine import Engine
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Buffer, Instruction, Manifest, Tensor
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.receiver.relay_copy import RelayCopy
from weightsync.transports.base import Inbox, InboxMaker, TransportError, blob_sizes

T = TypeVar("T")
CLOSE_S = 1.0  # for a read under way; after that its thread goes on alone
Decode = Callable[[Buffer, memoryview, Sequence[Tensor]], None]


class HopsUseless(TransportError):
    """These hops do not lead to the version from what the engine holds."""


class Reader:
    """Reads an inbox on its own thread, one blob ahead."""

    def __init__(self, inbox: Inbox, blobs: int, room: Callable[[int], memoryview | None]) -> None:
        self._inbox = inbox
        self._blobs = blobs
        self._room = room  # where a blob may be put
        self._next = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-read")
        self._ahead: asyncio.Future[memoryview] | None = None
        self.waited_s = 0.0  # time spent waiting for the transport

    def _run(self, work: Callable[..., T], *args: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def open(self) -> None:
        """Reach the source and begin to read."""
        await self._run(self._inbox.open)
        self._read_ahead()

    def _read_ahead(self) -> None:
        self._ahead = None
        if self._next < self._blobs:
            self._ahead = self._run(self._inbox.read, self._next, self._room(self._next))
        self._next += 1

    async def next(self) -> memoryview:
        """The next blob; the one before is not valid any more."""
        assert self._ahead is not None
        started = time.perf_counter()
        view = await self._ahead  # bounded: the inbox keeps the deadline of its instruction
        self.waited_s += time.perf_counter() - started
        self._read_ahead()
        return view

    async def close(self) -> None:
        """Close the inbox on its thread; does not wait long for a stuck read (which has its own deadline)."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead.add_done_callback(_retrieve)
        closed = self._run(self._inbox.close)
        closed.add_done_callback(_retrieve)
        self._pool.shutdown(wait=False)
        await asyncio.wait({closed}, timeout=CLOSE_S)


def _retrieve(future: asyncio.Future[T]) -> None:
    """Retrieve its error: without a waiter it is not worth a line in the log."""
    if future.done() and not future.cancelled():
        future.exception()


class DirectTransfer:
    """A version that the engine itself receives, from device to device (`asyncrl.engine.Receiving`)."""

    copy: RelayCopy | None = None
    waited_s = 0.0

    def __init__(self, engine: Any, instruction: Instruction, tensors: tuple[Tensor, ...]) -> None:
        self._engine, self._instruction, self._tensors = engine, instruction, tensors

    async def run(self) -> None:
        """Bring every bucket into the engine. Raises TransportError."""
        await self._engine.receive_update(self._instruction, self._tensors)


class Transfer:
    """One transfer. `copy` is the host copy after `run`, with `keep`."""

    def __init__(
        self,
        engine: Engine,
        instruction: Instruction,
        tensors: tuple[Tensor, ...],
        inbox: Inbox,
        *,
        keep: bool = False,
        decode: Decode | None = None,
    ) -> None:
        assert instruction.manifest is not None
        self.copy: RelayCopy | None = None
        self._engine = engine
        self._manifest: Manifest = instruction.manifest
        self._hops = instruction.hops
        self._tensors = tensors
        self._groups = group_by_bucket(tensors, len(self._manifest.bucket_bytes))
        self._keep = keep
        self._decode = decode
        blobs = len(blob_sizes(self._manifest, self._hops))
        self._inbox = inbox
        self._reader = Reader(inbox, blobs, (lambda _: None) if self._hops else self._room)
        self._encoded: list[list[bytes]] = []
        self._buckets: list[Buffer] = []
        self._lent: dict[int, memoryview] = {}  # memory of the engine, by bucket

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for the transport."""
        return self._reader.waited_s

    async def run(self) -> None:
        """Bring every bucket into the engine. Raises TransportError."""
        manifest = self._manifest
        if not await self._begin_mapped():
            await self._engine.begin_update(manifest, self._tensors)
        digest = version_digest(manifest.bucket_digests, base=manifest.base, adapter=manifest.adapter)
        if digest != manifest.digest:
            raise TransportError("the manifest's bucket digests do not make its digest")
        try:
            await self._reader.open()
            for _ in self._hops[:-1]:
                self._encoded.append([bytes(await self._reader.next()) for _ in self._groups])
            if self._hops:
                self._encoded.append([])
                await self._take_hops()
            else:
                for number in range(len(self._groups)):
                    await self._take(number, await self._reader.next())
        finally:
            await self._reader.close()
        if self._keep:
            self.copy = RelayCopy(manifest, self._tensors, self._hops, self._buckets, self._encoded)

    async def _begin_mapped(self) -> bool:
        """Whether the engine uses the publisher's slot itself (`asyncrl.engine.SlotMapping`)."""
        path = getattr(self._inbox, "path", None)
        begin: Callable[..., Awaitable[bool]] | None = getattr(self._engine, "begin_mapped", None)
        return path is not None and begin is not None and await begin(path, self._manifest, self._tensors)

    def _room(self, number: int) -> memoryview | None:
        """Memory of the engine for this bucket, if it lends any."""
        lend: Callable[[int], memoryview | None] | None = getattr(self._engine, "bucket_room", None)
        room = lend(number) if lend is not None else None
        if room is not None:
            self._lent[number] = room
        return room

    async def _take(self, number: int, view: memoryview) -> None:
        held, published = await self._engine.apply_bucket(number, view), self._manifest.bucket_digests[number]
        failpoint("weightsync.after_bucket")
        if not held:
            held = await asyncio.to_thread(bucket_digest, self._groups[number], view, like=published)
        if held != published:
            kind = HopsUseless if self._hops else TransportError
            raise kind(f"bucket {number} of version {self._manifest.version} has another digest than published")
        if self._keep:
            room = self._lent.get(number)  # the engine's own memory
            self._buckets.append(room if room is not None else await asyncio.to_thread(bytes, view))

    async def _take_hops(self) -> None:
        """Take every bucket by hops; the next one is decoded while the engine takes this one."""
        coming = asyncio.ensure_future(self._decode_bucket(0))
        try:
            for number in range(len(self._groups)):
                bucket = await coming  # bounded: the deadline of the inbox, and three copies of one bucket
                if number + 1 < len(self._groups):
                    coming = asyncio.ensure_future(self._decode_bucket(number + 1))
                await self._take(number, bucket)
        finally:
            coming.cancel()
            await asyncio.wait({coming}, timeout=CLOSE_S)
            _retrieve(coming)

    async def _decode_bucket(self, number: int) -> memoryview:
        """The bytes of one bucket: the engine's, changed by the blobs of all hops."""
        last = await self._reader.next()
        bucket = self._room(number)
        if bucket is None:
            bucket = memoryview(bytearray(self._manifest.bucket_bytes[number]))
        if not await self._engine.read_bucket(number, bucket):
            raise HopsUseless(f"this engine cannot say what it holds of bucket {number}")
        blobs: list[Buffer] = [*(encoded[number] for encoded in self._encoded[:-1]), last]
        try:
            await asyncio.to_thread(self._apply_all, blobs, bucket, self._groups[number])
        except TransportError as error:
            raise HopsUseless(f"bucket {number}: {error.message}") from None
        if self._keep:
            self._encoded[-1].append(bytes(last))
        return bucket

    def _apply_all(self, blobs: Sequence[Buffer], bucket: memoryview, tensors: Sequence[Tensor]) -> None:
        decode = self._decode
        if decode is None:
            from weightsync.encoding.delta import decode as decode_delta

            decode = decode_delta
        for blob in blobs:
            decode(blob, bucket, tensors)


def make_transfer(
    engine: Engine,
    instruction: Instruction,
    tensors: tuple[Tensor, ...],
    transports: Mapping[str, InboxMaker],
    config: WeightSyncConfig,
) -> Transfer | DirectTransfer:
    """The transfer of an instruction. A copy is kept for others where they pull; else it costs more than a transfer."""
    if instruction.transport == "direct":
        return DirectTransfer(engine, instruction, tensors)
    keep = config.transport in ("auto", "stream") and config.relay_fanout > 0 and instruction.transport != "local"
    return Transfer(engine, instruction, tensors, transports[instruction.transport](instruction), keep=keep)
