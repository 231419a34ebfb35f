"""The asking side for code without an event loop.

Guarantees of both requesters:
1. a request is sent again until it is answered or its deadline passes, and at once after a reconnection. Services are
   idempotent, so this is safe, and the successor of a service that died gets the request. A connection without answers
   is replaced, because after a damaged length all later bytes are misread;
2. every wait ends: at the deadline `net.unreachable` names the address and the time waited;
3. an answer that calls the request damaged is accepted only at the third time: the damage may have happened in transit;
4. of several addresses (`tcp://a:1,tcp://b:1`) a request reaches the one that is served, also when that changes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from asyncrl.errors import Unavailable, WireError
from asyncrl.net.addresses import LOOK_S
from asyncrl.net.frames import (
    BELIEVED,
    LINGER_MS,
    MUTE,
    RETRY_S,
    SocketContext,
    connect,
    is_damaged,
    prefer_newest,
    raise_refused,
    receive_frames,
    reconnect,
    send_frames,
)
from asyncrl.net.keys import Keys
from asyncrl.wire import REPLY, Buffer, Message, Packet, decode, encode


class Requester:
    """Sends requests to one service, one at a time; for code without an event loop. Safe to share between threads.

    `on_silence` is called a few times a second with the seconds that an answer is overdue; True ends the request.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: Keys | None = None,
        max_bytes: int = 1 << 30,
        resend_s: float = 3.0,
        on_silence: Callable[[float], bool] | None = None,
    ) -> None:
        self.address = address
        self.on_silence = on_silence
        self._answered = True  # whether the last request was answered
        self._max_bytes = max_bytes
        self._resend_s = resend_s
        self._context: SocketContext = SocketContext()
        self._socket, self._connections = connect(self._context, address, keys, max_bytes)
        self._connected = 0  # number of connections
        self._poller = zmq.Poller()
        for socket in (self._socket, self._connections):
            self._poller.register(socket, zmq.POLLIN)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def request(
        self, message: Message, payloads: Sequence[Buffer] = (), *, timeout_s: float, wait_s: float = 0.0
    ) -> Packet:
        """Send and wait for the answer. `wait_s` is how long the service may hold a long poll before it answers.

        Raises:
            Unavailable: no answer within `timeout_s`.
            AsyncRLError: the service refused; the class fits its code.
        """
        with self._lock:
            number = next(self._numbers)
            frames = encode(message, payloads, request=number)
            self._answered = False
            started = time.monotonic()
            deadline = started + timeout_s
            refusals = silences = 0
            while (now := time.monotonic()) < deadline:
                sent = send_frames(self._socket, frames)
                until = min(deadline, now + (wait_s + self._resend_s if sent else RETRY_S))
                answer = self._await(number, until, due=started + wait_s)
                if answer is not None:
                    refusals += is_damaged(answer)
                    if is_damaged(answer) and refusals < BELIEVED:
                        continue
                    self._answered = True
                    return raise_refused(answer)
                if self._give_up(started + wait_s):
                    break
                if sent and time.monotonic() >= until:
                    silences += 1
                    if silences % MUTE == 0:
                        reconnect(self._socket, self.address)
        waited = min(timeout_s, time.monotonic() - started)
        raise Unavailable(
            "net.unreachable", f"no answer to {type(message).__name__} within {waited:.3g} s", where=self.address
        )

    def _give_up(self, due: float) -> bool:
        overdue = time.monotonic() - due
        return overdue > 0 and self.on_silence is not None and self.on_silence(overdue)

    def _await(self, number: int, until: float, *, due: float) -> Packet | None:
        while (left := until - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(min(left, LOOK_S) * 1000) + 1))
            if self._connections in ready and self._has_reconnected():
                return None  # it is sent again
            if self._socket not in ready:
                if self._give_up(due):
                    return None
                continue
            try:
                packet = decode(receive_frames(self._socket), max_bytes=self._max_bytes)
            except WireError:
                continue  # the request is sent again
            if packet.request == number and packet.kind == REPLY:  # older numbers answer a request sent twice
                return packet
        return None

    def _has_reconnected(self) -> bool:
        """Whether a connection was established again, not for the first time."""
        before = self._connected
        with suppress(zmq.Again):
            while True:
                event = receive_frames(self._connections)
                self._connected += 1
                if prefer_newest(self._socket, self.address, event) and before:
                    time.sleep(RETRY_S)
        return self._connected > max(before, 1)

    def close(self) -> None:
        """Close the socket; lingers up to 2 s for unsent messages if the service answers. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._connections.close(0)
        self._socket.close(LINGER_MS if self._answered else 0)
        self._context.term()
