"""The asking side for code on an event loop, with many requests at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec

from asyncrl.errors import Unavailable, WireError
from asyncrl.net.frames import (
    BELIEVED,
    LINGER_MS,
    MUTE,
    RETRY_S,
    Pump,
    SocketContext,
    connect,
    is_damaged,
    prefer_newest,
    raise_refused,
    reconnect,
)
from asyncrl.net.keys import Keys
from asyncrl.wire import REPLY, REQUEST_MANY, Buffer, Message, Packet, Replies, decode, decode_header, encode


class _Asked(msgspec.Struct):
    """A request in progress. Times are those of the loop."""

    frames: list[Buffer]
    answer: asyncio.Future[Packet | None]
    deadline: float
    patience_s: float
    due: float = 0.0
    refusals: int = 0  # answers that call a frame damaged
    sent_out: bool = False  # there was a connection for it
    silences: int = 0  # times that its answer was overdue
    sent: float = 0.0  # time of the first send


class AsyncRequester:
    """Sends requests to one service, many at once. Created and used on one event loop."""

    def __init__(
        self,
        address: str,
        *,
        keys: Keys | None = None,
        max_bytes: int = 1 << 30,
        resend_s: float = 3.0,
        max_under_way: int = 256,
    ) -> None:
        self.address = address
        self.bad_frames = 0
        self._max_bytes = max_bytes
        self._resend_s = resend_s
        self._context: SocketContext = SocketContext()
        self._socket, connections = connect(self._context, address, keys, max_bytes)
        self._pump = Pump(self._socket, self._take)
        self._connections = Pump(connections, self._resend_pending)
        self._connected = 0  # number of connections
        self._heard = 0.0  # time of the last complete message
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Asked] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._answered = True  # whether an answer came since the last request that timed out
        self._credits = asyncio.Semaphore(max_under_way)

    async def request(
        self, message: Message, payloads: Sequence[Buffer] = (), *, timeout_s: float, wait_s: float = 0.0
    ) -> Packet:
        async with self._credits:
            number = next(self._numbers)
            frames = encode(message, payloads, request=number, kind=REQUEST_MANY)
            answer: asyncio.Future[Packet | None] = self._loop.create_future()
            now = self._loop.time()
            asked = _Asked(frames, answer, now + timeout_s, wait_s + self._resend_s, sent=now)
            self._waiting[number] = asked
            self._send(asked)
            packet: Packet | None = None
            try:
                packet = await answer  # bounded: the timer ends it at its deadline
            finally:
                del self._waiting[number]
                self._answered = packet is not None
        if packet is not None:
            return raise_refused(packet)
        raise Unavailable(
            "net.unreachable", f"no answer to {type(message).__name__} within {timeout_s:g} s", where=self.address
        )

    def _send(self, asked: _Asked) -> None:
        self._expect(asked, sent=self._pump.send(asked.frames))

    def _expect(self, asked: _Asked, *, sent: bool) -> None:
        """Look for the answer when its patience is over, or send it soon if that was not possible."""
        asked.sent_out = sent
        asked.due = min(asked.deadline, self._loop.time() + (asked.patience_s if sent else RETRY_S))
        if self._timer is None or self._timer.when() > asked.due:
            self._arm(asked.due)

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """One timer for all requests: end those past their deadline, resend those with an overdue answer."""
        self._timer = None
        now = self._loop.time()
        for asked in list(self._waiting.values()):
            if now >= asked.deadline and not asked.answer.done():
                asked.answer.set_result(None)
            elif now >= asked.due and not asked.answer.done():
                asked.silences += asked.sent_out
                if asked.sent_out and asked.silences % MUTE == 0 and self._heard < asked.sent:
                    reconnect(self._socket, self.address)
                self._send(asked)
        due = [asked.due for asked in self._waiting.values() if not asked.answer.done()]
        if due and (self._timer is None or self._timer.when() > min(due)):
            self._arm(min(due))

    def _resend_pending(self, events: list[list[Buffer]]) -> None:
        """Send again: the service, or its successor, never got the pending requests, or could not answer them."""
        self._connected += len(events)
        replaced = prefer_newest(self._socket, self.address, events[-1])
        for asked in list(self._waiting.values()) if self._connected > 1 else ():
            if not asked.answer.done():
                self._expect(asked, sent=False) if replaced else self._send(asked)

    def _take(self, batch: list[list[Buffer]]) -> None:
        for frames in batch:
            try:
                packet = decode(frames, max_bytes=self._max_bytes)
            except WireError:
                self.bad_frames += 1  # the request is sent again
                continue
            self._heard = self._loop.time()
            if packet.kind == REPLY and isinstance(packet.message, Replies):
                for number, header in packet.message.answers:
                    self._answer_in(header, number)
            elif packet.kind == REPLY:
                self._answer(packet)

    def _answer_in(self, header: bytes, number: int) -> None:
        try:
            self._answer(Packet(decode_header(header), (), number, REPLY, header))
        except WireError:
            self.bad_frames += 1

    def _answer(self, packet: Packet) -> None:
        asked = self._waiting.get(packet.request)
        if asked is None or asked.answer.done():
            return
        asked.refusals += is_damaged(packet)
        if is_damaged(packet) and asked.refusals < BELIEVED:
            self._send(asked)
        else:
            asked.answer.set_result(packet)

    def close(self) -> None:
        """Close the socket; lingers up to 2 s for unsent messages if the service answers. Idempotent."""
        if self._socket.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        for asked in self._waiting.values() if not self._loop.is_closed() else ():
            if not asked.answer.done():
                asked.answer.set_result(None)  # no answer can arrive: end the request
        self._socket.disable_monitor()
        self._connections.close(0)
        self._pump.close(LINGER_MS if self._answered else 0)
        self._context.term()
