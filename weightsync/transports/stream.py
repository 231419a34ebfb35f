"""Transport `stream`: members pull a version in pieces over ZeroMQ, each at its own pace.

`StreamOutbox` serves (the publisher, or a member that relays); `StreamInbox` pulls. Guarantees:
1. flow control: a reader has at most `WINDOW` pieces requested and not consumed; this, the version itself and two blobs
   are all the memory at both ends; a slow or stopped reader harms only itself;
2. every request names version, hops, blob and offset, and may be repeated: after a cut the reader goes on from there,
   and nothing is sent again that has arrived;
3. a version that is gone is an error at once; while a member pulls, its version is not overwritten, one version at a
   time; it is released when all have read it, or without a request for `IDLE_S`;
4. beyond loopback both ends hold the relay key, which the owner and all producers have; a frame that was damaged, or
   overwritten before it left, fails its checksum and is requested again;
5. a source that stays silent for half the deadline is an error; nothing waits longer than the deadline;
6. pieces begin small, double while they come fast and halve while they come slowly: requests take a few seconds at most
   also on a slow line, so that a late answer does not count as lost.
Large pieces leave without a copy, and a blob of one piece arrives without one.

Example (chunk_bytes 4 MiB, one bucket of 10 MiB): four pieces of 256 KiB are requested at once; each that comes within
0.1 s doubles the size of the next: 512 KiB, 1, 2, 4 and the rest.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

from asyncrl.errors import AsyncRLError, Unavailable, WireError
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.keys import Keys
from asyncrl.net.responder import Call, Responder
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Fetch, Fetched, Hop, Instruction, Packet, RoundReply
from weightsync.transports.base import TransportError, Version, blob_sizes
from weightsync.transports.loop_thread import LoopThread

WINDOW = 4  # pieces asked for ahead
LARGEST_PIECE = 64 << 20
FIRST_PIECE = 256 << 10  # also the smallest
FAST_S, SLOW_S = 0.1, 0.5  # wait for a piece: the next ones are larger, or smaller
REQUEST_BYTES = 1 << 20  # more than any request has
IDLE_S = 2.0  # a version is not kept for readers that are silent for so long
LOOK_S = 0.25
STALL_SHARE = 0.5  # of the deadline: longest silence
RESEND_S = 5.0  # for a lost or damaged answer; a cut connection is noticed at once
CALL_S = 5.0


class _Serving:
    """A version that is held for its readers: views of its blobs, valid until `release`."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.blobs: dict[str, list[memoryview]] = {}  # by the base of the hops, empty for the buckets
        self.readers: set[tuple[bytes, str]] = set()
        self.used = time.monotonic()
        self.stack = ExitStack()


class StreamOutbox:
    """Serves the newest version, and the one before for readers in the middle of it."""

    def __init__(self, host: str = "127.0.0.1", *, keys: Keys | None = None, insecure: bool = False) -> None:
        self._bind = f"tcp://{host}:*"
        self._keys = keys.among_workers() if keys is not None else None
        self._insecure = insecure
        self._loop: LoopThread | None = None
        self._responder: Responder | None = None
        self._versions: dict[str, Version] = {}  # by digest, oldest first; replaced as a whole, so without a lock
        self._serving: _Serving | None = None  # used on the loop's thread

    def open(self) -> str:
        """Listen on a free port. Raises `config.network` if that is impossible, or unsafe."""
        if self._loop is None:
            loop = LoopThread("serve")
            try:
                self._responder = loop.call(self._listen, timeout_s=CALL_S)
            except BaseException:  # the thread must end on any error
                loop.close(lambda: None)
                raise
            self._loop = loop
        assert self._responder is not None
        return self._responder.address

    def _listen(self) -> Responder:
        return Responder(
            self._bind, self._answer_all, keys=self._keys, max_bytes=REQUEST_BYTES, insecure=self._insecure
        )

    def offer(self, version: Version) -> str:
        """Serve this version from now on."""
        others = [one for digest, one in self._versions.items() if digest != version.manifest.digest]
        self._versions = {one.manifest.digest: one for one in [*others[-1:], version]}
        return self.open()

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None: ...

    def close(self) -> None:
        """Stop serving; readers get no more answers."""
        loop, self._loop = self._loop, None
        self._versions = {}
        if loop is not None:
            loop.close(self._end)

    def _end(self) -> None:
        self._release()
        if self._responder is not None:
            self._responder.close()

    # ------------------------------------------------------------ the loop's thread

    def _answer_all(self, calls: list[Call]) -> None:
        for call in calls:
            try:
                self._answer(call)
            except AsyncRLError as error:
                call.refuse(error)

    def _answer(self, call: Call) -> None:
        message = call.message
        if not isinstance(message, Fetch):
            raise WireError("wire.unexpected", f"{type(message).__name__} at a source of weights")
        version = self._find_version(message.digest)
        hops = hops_from(version.hops, message.base)
        with ExitStack() as stack:
            blobs = self._get_blobs(version, hops, message, stack)
            if not 0 <= message.blob < len(blobs):
                raise TransportError(f"version {version.manifest.version} has no blob {message.blob}")
            blob = blobs[message.blob]
            if not 0 <= message.offset < blob.nbytes or not 0 < message.nbytes <= LARGEST_PIECE:
                raise TransportError(f"blob {message.blob} has no {message.nbytes} bytes from {message.offset}")
            if message.offset == 0:
                failpoint("weightsync.serve_blob")
            end = min(message.offset + message.nbytes, blob.nbytes)
            call.reply(Fetched(message.blob, message.offset, blob.nbytes), [blob[message.offset : end]])
            self._note(call.peer, message, last=end == blob.nbytes and not any(map(len, blobs[message.blob + 1 :])))

    def _find_version(self, digest: str) -> Version:
        if self._serving is not None and self._serving.version.is_gone():
            self._release()
        kept = self._serving
        if kept is not None and kept.version.manifest.digest == digest:
            return kept.version
        if digest not in self._versions:
            raise _gone_error(digest)
        return self._versions[digest]

    def _get_blobs(self, version: Version, hops: Sequence[Hop], message: Fetch, stack: ExitStack) -> list[memoryview]:
        """The blobs; of the held version they stay, of another one they last as long as `stack`."""
        if self._serving is None:
            self._serving = _Serving(version)
            self._look_later()
        if self._serving.version is not version:
            return _enter(stack, version, hops)
        if message.base not in self._serving.blobs:
            self._serving.blobs[message.base] = _enter(self._serving.stack, version, hops)
        return self._serving.blobs[message.base]

    def _note(self, peer: bytes, message: Fetch, *, last: bool) -> None:
        kept = self._serving
        if kept is None or kept.version.manifest.digest != message.digest:
            return
        kept.used = time.monotonic()
        kept.readers.add((peer, message.base))
        if last:
            kept.readers.discard((peer, message.base))

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Release the held version once it has no readers."""
        kept = self._serving
        if kept is None:
            return
        if not kept.readers or time.monotonic() - kept.used > IDLE_S:
            self._release()
        else:
            self._look_later()

    def _release(self) -> None:
        kept, self._serving = self._serving, None
        if kept is not None:
            kept.blobs.clear()
            kept.stack.close()


def _enter(stack: ExitStack, version: Version, hops: Sequence[Hop]) -> list[memoryview]:
    blobs = stack.enter_context(version.blobs(hops))
    if blobs is None:
        raise _gone_error(version.manifest.digest)
    return blobs


def _gone_error(digest: str) -> TransportError:
    return TransportError(f"the version with digest {digest[:12]} is gone")


def hops_from(hops: Sequence[Hop], base: str) -> tuple[Hop, ...]:
    """The hops that begin at the version with digest `base`; none if that is empty. Raises TransportError."""
    if not base:
        return ()
    for number, hop in enumerate(hops):
        if hop.base_digest == base:
            return tuple(hops[number:])
    raise TransportError(f"no hops from {base[:12]} here")


class StreamInbox:
    def __init__(self, instruction: Instruction, *, keys: Keys | None = None, chunk_bytes: int = 4 << 20) -> None:
        assert instruction.manifest is not None
        self._address = instruction.address
        self._keys = keys.among_workers() if keys is not None else None
        self._chunk = min(chunk_bytes, LARGEST_PIECE)
        self._piece = min(FIRST_PIECE, self._chunk)  # size of the next one
        self._digest = instruction.manifest.digest
        self._base = instruction.hops[0].base_digest if instruction.hops else ""
        self._sizes = blob_sizes(instruction.manifest, instruction.hops)
        self._deadline = time.monotonic() + instruction.deadline_s
        self._stall_s = instruction.deadline_s * STALL_SHARE
        self._left = self._pieces()
        self._asked: deque[tuple[Fetch, concurrent.futures.Future[Packet]]] = deque()
        self._buffers = [bytearray(), bytearray()]  # a result of `read` is valid until the second next read
        self._loop: LoopThread | None = None
        self._requester: AsyncRequester | None = None

    def _pieces(self) -> Iterator[Fetch]:
        for number, size in enumerate(self._sizes):
            offset = 0
            while offset < size:
                nbytes = min(self._piece, size - offset)
                yield Fetch(self._digest, self._base, number, offset, nbytes)
                offset += nbytes

    def open(self) -> None:
        """Connect and request the first pieces."""
        self._loop = LoopThread("pull")
        try:
            self._requester = self._loop.call(self._connect, timeout_s=CALL_S)
        except AsyncRLError as error:
            raise TransportError(f"stream: {error.message}") from None
        self._ask()

    def _connect(self) -> AsyncRequester:
        return AsyncRequester(
            self._address,
            keys=self._keys,
            max_bytes=self._chunk + REQUEST_BYTES,
            resend_s=RESEND_S,
            max_under_way=WINDOW,
        )

    def _ask(self) -> None:
        loop, requester = self._loop, self._requester
        while len(self._asked) < WINDOW and (piece := next(self._left, None)) is not None:
            if loop is None or requester is None:
                raise TransportError("stream: it is closed")
            timeout_s = max(0.05, min(self._stall_s, self._deadline - time.monotonic()))
            self._asked.append((piece, loop.start(requester.request(piece, timeout_s=timeout_s))))

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        """The blob; waits for its pieces. A blob of one piece is not copied."""
        size = self._sizes[number]
        if not size:
            return memoryview(b"")
        first = self._take(number, 0)
        if first.nbytes == size:
            return first
        if into is None and len(self._buffers[number % 2]) < size:
            self._buffers[number % 2] = bytearray(size)
        view = into if into is not None else memoryview(self._buffers[number % 2])[:size]
        view[: first.nbytes] = first
        offset = first.nbytes
        while offset < size:
            piece = self._take(number, offset)
            view[offset : offset + piece.nbytes] = piece
            offset += piece.nbytes
        return view

    def _take(self, number: int, offset: int) -> memoryview:
        """The next piece, which must be this one."""
        if not self._asked:
            raise TransportError("stream: it is closed, or a blob is read twice")
        asked, future = self._asked.popleft()
        if (asked.blob, asked.offset) != (number, offset):
            raise TransportError(f"stream: blob {number} is read out of order")
        began = time.monotonic()
        try:
            packet = future.result(max(0.05, self._deadline - time.monotonic()) + LOOK_S)
        except Unavailable:
            raise TransportError(f"stream: {self._address} is silent") from None
        except AsyncRLError as error:
            raise TransportError(f"stream: {error.message}") from None
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            raise TransportError(f"stream: blob {number} did not arrive in time") from None
        message = packet.message
        if not isinstance(message, Fetched) or (message.blob, message.offset) != (number, offset):
            raise TransportError(f"stream: {type(message).__name__} is no answer to blob {number} from {offset}")
        piece = memoryview(packet.payloads[0]) if packet.payloads else memoryview(b"")
        if message.size != self._sizes[number] or piece.nbytes != asked.nbytes:
            raise TransportError(f"stream: blob {number} has {message.size} bytes there, {self._sizes[number]} here")
        self._adapt(time.monotonic() - began)
        self._ask()
        return piece

    def _adapt(self, waited_s: float) -> None:
        if waited_s < FAST_S:
            self._piece = min(self._chunk, self._piece * 2)
        elif waited_s > SLOW_S:
            self._piece = max(min(FIRST_PIECE, self._chunk), self._piece // 2)

    def close(self) -> None:
        """Stop pulling and end the thread."""
        loop, self._loop = self._loop, None
        self._asked.clear()
        if loop is not None:
            loop.close(self._end)

    def _end(self) -> None:
        if self._requester is not None:
            with suppress(AsyncRLError):
                self._requester.close()
