"""A TCP proxy between the parts of a run that knows where ZeroMQ messages begin: it can lose, double and damage them.

`Proxies` runs in a thread of the test; `link(port)` makes one address in front of a service. Faults of a link, each
on while its attribute is set: `closed` (nobody gets through), `held` (ways, "up" to the service and "down" from it,
on which nothing moves), `delay_s`, `lost` (ways on which whole messages vanish), `twice` and `flips` (the share of
messages that is sent again or has one bit flipped, framing included). `cut()` breaks the connections there are.
`counts` says what really hit a message. `record(way)` returns an array that gets the bytes of a way from then on.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator

_LONG, _COMMAND, _MORE = 2, 4, 1


class Cutter:
    """Cuts a ZMTP 3 stream of one direction into pieces: (is it a whole message, its bytes)."""

    def __init__(self) -> None:
        self._greeting = 64
        self._held = b""
        self._message = b""

    def feed(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """The pieces that are complete with these bytes."""
        if self._greeting:  # must not be held back: each side waits for parts of the other's
            part, data = data[: self._greeting], data[self._greeting :]
            self._greeting -= len(part)
            yield False, part
        self._held += data
        while len(self._held) >= 2:
            flags = self._held[0]
            start = 9 if flags & _LONG else 2
            if len(self._held) < start:
                return
            end = start + int.from_bytes(self._held[1:start], "big")
            if len(self._held) < end:
                return
            frame, self._held = self._held[:end], self._held[end:]
            if flags & _COMMAND:
                yield False, frame
                continue
            self._message += frame
            if not flags & _MORE:
                whole, self._message = self._message, b""
                yield True, whole


class Link:
    """One address that stands for a service; see the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int, seed: int) -> None:
        self.port = 0
        self.closed = False
        self.held: frozenset[str] = frozenset()
        self.lost: frozenset[str] = frozenset()
        self.delay_s = self.twice = self.flips = 0.0
        self.next_flip: tuple[int, int] | None = None  # (byte, bit) of the next message to the service
        self.counts: Counter[str] = Counter()
        self._records: dict[str, bytearray] = {}
        self._loop = loop
        self._target = target
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    async def start(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Break every connection; also a stopped peer sees a reset."""
        self._loop.call_soon_threadsafe(self._cut)

    def record(self, way: str) -> bytearray:
        """Everything that peers send from now on, "up" to the service or "down" from it."""
        return self._records.setdefault(way, bytearray())

    def heal(self) -> None:
        """No more faults. What was lost meanwhile stays lost."""
        self.closed, self.held, self.lost = False, frozenset(), frozenset()
        self.delay_s = self.twice = self.flips = 0.0

    def state(self) -> str:
        """Its faults and connections, for a test that fails."""
        faults = (self.closed, set(self.held), set(self.lost), self.delay_s, self.twice, self.flips)
        return f"{self.port}: {faults}, {len(self._writers)} ends open, {dict(self.counts)}"

    def _cut(self) -> None:
        for writer in self._writers:
            self.counts["cut"] += not writer.is_closing()
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.closed:
                raise ConnectionError
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        pipes = [
            asyncio.ensure_future(self._pipe(*ends))
            for ends in ((reader, far_writer, "up"), (far_reader, writer, "down"))
        ]
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            pipe.cancel()
        for end in (writer, far_writer):
            end.transport.abort()
        self._writers -= {writer, far_writer}

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        moving = asyncio.ensure_future(self._move(pieces, writer, way))
        cutter = Cutter()
        try:
            while data := await reader.read(1 << 16):
                if way in self._records:
                    self._records[way] += data
                for whole, piece in cutter.feed(data):
                    for copy in self._faulty(piece, way) if whole else (piece,):
                        pieces.put_nowait((self._loop.time() + self.delay_s, copy))
                if moving.done():
                    return
        except OSError:
            return
        finally:
            moving.cancel()

    async def _move(self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, way: str) -> None:
        while True:
            due, piece = await pieces.get()
            self.counts["held"] += way in self.held
            while (left := due - self._loop.time()) > 0 or way in self.held:
                await asyncio.sleep(max(0.005, left))
            writer.write(piece)
            await writer.drain()

    def _faulty(self, message: bytes, way: str) -> list[bytes]:
        self.counts[way] += 1
        self.counts["delayed"] += self.delay_s > 0
        if way in self.lost:
            self.counts["lost"] += 1
            return []
        if self.next_flip is not None and way == "up":
            (at, bit), self.next_flip = self.next_flip, None
            message = message[:at] + bytes([message[at] ^ 1 << bit]) + message[at + 1 :]
            self.counts["flipped"] += 1
        if self.flips and self._random.random() < self.flips:
            self.counts["flipped"] += 1
            damaged = bytearray(message)
            damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
            message = bytes(damaged)
        if self.twice and self._random.random() < self.twice:
            self.counts["doubled"] += 1
            return [message] * self._random.randint(2, 4)
        return [message]


class Proxies:
    """The thread and event loop of all links of a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def link(self, target: int, *, seed: int = 0) -> Link:
        """A new address in front of 127.0.0.1:`target`."""
        link = Link(self._loop, target, seed)
        asyncio.run_coroutine_threadsafe(link.start(), self._loop).result(60)
        return link

    def close(self) -> None:
        async def leave() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(leave(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)


def free_port() -> int:
    """A port that nobody uses, outside of the range from which connections get theirs: it stays free for a restart."""
    while True:
        port = random.SystemRandom().randrange(18000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
