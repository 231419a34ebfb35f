"""The answering side: a ROUTER socket that decodes requests and sends answers.

Guarantees:
1. a frame that does not decode is counted and, if its sender is known, answered with `Refused`; it never raises;
2. with keys the service knows a sender by its key and refuses requests that the role of the key may not send
   (`config.forbidden`), before anything else looks at them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from asyncrl.errors import AsyncRLError, ConfigError, WireError
from asyncrl.net.addresses import check_bind, is_exposed, prepare_folder, remove_unused, short_folder_prefix
from asyncrl.net.auth import Admission, Source, is_allowed, receive_from, start_authenticator
from asyncrl.net.connections import ConnectionGuard
from asyncrl.net.frames import Pump, SocketContext, set_limits
from asyncrl.net.keys import Holder, Keys
from asyncrl.wire import (
    REPLY,
    REQUEST_MANY,
    Buffer,
    Message,
    Packet,
    Refused,
    Replies,
    decode,
    encode,
    encode_header,
    peek_request,
)

WARN_S = 60.0  # between two warnings about a socket that is open without keys
HEARTBEAT_MS, SILENT_MS = 3000, 6000  # heartbeats of a service; longest silence of a connection


def _beat(socket: zmq.Socket[bytes]) -> None:
    """Heartbeats of the answering side. They announce the longest pause, by which the other end notices a lost service.

    This end notices a lost peer by TCP, which hears no acknowledgement of the heartbeats: for a time limit of its own
    libzmq (4.3.5) searches the timers of all connections at each answer, three quarters of its work for 1,200 peers.

    A DEALER must not send heartbeats: libzmq (4.3.5) aborts the process if one is due on a broken connection after the
    socket was closed or disconnected while requests and answers were pending.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, SILENT_MS)


class Call:
    """One request at a service. Answer it once with `reply`, at once or later; `peer` is stable while connected.

    `holder` holds the key that the request came with; None if the service has no keys.
    """

    __slots__ = (
        "_many",
        "_responder",
        "checksum",
        "header",
        "holder",
        "message",
        "payloads",
        "peer",
        "received",
        "request",
    )

    def __init__(self, responder: Responder, peer: bytes, packet: Packet, *, holder: Holder | None = None) -> None:
        self.holder = holder
        self._responder = responder
        self._many = packet.kind == REQUEST_MANY
        self.peer = peer
        self.request = packet.request
        self.message = packet.message
        self.payloads = packet.payloads
        self.header = packet.header
        self.checksum = packet.checksum
        self.received = time.monotonic()

    def reply(self, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Send the answer; a lost peer is counted, not raised."""
        self._responder.reply(self.peer, self.request, message, payloads, many=self._many)

    def reaches(self, peer: bytes) -> bool:
        """Whether another peer of the service is still connected."""
        return self._responder.reaches(peer)

    def refuse(self, error: AsyncRLError) -> None:
        """Answer with an error of the catalogue."""
        self.reply(Refused(error.code, error.message, error.where))


class Responder:
    """Answers requests on a ROUTER socket. `handler` gets the decoded requests of one drain (at most 16) together.

    `key_file`: the server file that the keys come from; later changes of its list of keys count. `counters`: received,
    bad_frames, gone_peers, forbidden. Created and used on one event loop.
    """

    def __init__(
        self,
        address: str,
        handler: Callable[[list[Call]], None],
        *,
        keys: Keys | None = None,
        key_file: Path | None = None,
        max_bytes: int = 1 << 30,
        insecure: bool = False,
    ) -> None:
        check_bind(address, keys=keys, insecure=insecure)
        self._admission = None if keys is None else Admission(keys, key_file)
        self.counters: Counter[str] = Counter()
        self._handler = handler
        self._together: dict[bytes, list[tuple[int, Message]]] | None = None  # answers of the current drain
        self._max_bytes = max_bytes
        self._context: SocketContext = SocketContext()
        self._authenticator = start_authenticator(self._context, self._admission) if self._admission else None
        socket = self._context.socket(zmq.ROUTER)
        set_limits(socket, max_bytes)
        _beat(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.server_public)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.server_secret)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, "asyncrl")
        self._guard = ConnectionGuard(socket)
        try:
            self.address = _bind(socket, address)
        except ConfigError:
            self._guard.close()
            socket.close(0)
            raise
        self._pump = Pump(socket, self._take, receive=partial(receive_from, keys=keys is not None))
        self._warning: asyncio.TimerHandle | None = None
        if keys is None and is_exposed(address):
            self._warn()

    def _warn(self) -> None:
        """Warn once a minute while the socket is open."""
        print(f"warning: {self.address} is open to every process that reaches this host: it has no keys", flush=True)
        self._warning = asyncio.get_running_loop().call_later(WARN_S, self._warn)

    def _take(self, batch: list[list[Any]]) -> None:
        calls: list[Call] = []
        for source, peer, *frames in batch:
            self.counters["received"] += 1
            try:
                call = Call(self, bytes(peer), decode(frames, max_bytes=self._max_bytes))
                self._guard.note_message(source.descriptor, source.key)
                if self._is_allowed(call, source):
                    calls.append(call)
            except WireError as error:
                self.counters["bad_frames"] += 1
                number = peek_request(frames)
                if number is not None:
                    self.reply(bytes(peer), number, Refused(error.code, error.message, self.address))
        if not calls:
            return
        self._together = {}
        try:
            self._handler(calls)
        finally:
            together, self._together = self._together, None
            for peer, answers in together.items():
                if len(answers) == 1:
                    self._send(peer, *answers[0], ())
                else:
                    packed = tuple((number, encode_header(message)) for number, message in answers)
                    self._send(peer, 0, Replies(packed), ())

    def _is_allowed(self, call: Call, source: Source) -> bool:
        """Whether the sender's key may send this; else it is refused."""
        if self._admission is None:
            return True
        call.holder = holder = self._admission.find(source.key)
        if holder is not None and is_allowed(call.message, holder.role):
            return True
        self.counters["forbidden"] += 1
        who = f"key {holder.name} of role {holder.role}" if holder is not None else "a key that was revoked"
        said = getattr(call.message, "role", "")
        what = f"{type(call.message).__name__}{f' as {said}' if said else ''} is not allowed to {who}"
        call.refuse(ConfigError("config.forbidden", what[:400], where=self.address))
        return False

    def reaches(self, peer: bytes) -> bool:
        """Whether the peer is still connected."""
        try:
            return self._pump.send([peer, *encode(Replies(()), request=0, kind=REPLY)])
        except zmq.ZMQError:
            return False

    def reply(
        self, peer: bytes, request: int, message: Message, payloads: Sequence[Buffer] = (), *, many: bool = False
    ) -> None:
        """Send an answer to a peer. With `many` it may leave together with others at the end of the drain."""
        if many and not payloads and self._together is not None:
            self._together.setdefault(peer, []).append((request, message))
        else:
            self._send(peer, request, message, payloads)

    def _send(self, peer: bytes, request: int, message: Message, payloads: Sequence[Buffer]) -> None:
        try:
            if not self._pump.send([peer, *encode(message, payloads, request=request, kind=REPLY)]):
                self.counters["gone_peers"] += 1
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.ENOTSOCK):
                raise
            self.counters["gone_peers"] += 1

    def close(self) -> None:
        """Stop answering. Queued replies get half a second to leave."""
        if self._warning is not None:
            self._warning.cancel()
        self._guard.close()
        self._pump.close(500)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        folder = Path(self.address.removeprefix("ipc://")).parent
        if folder.name.startswith(short_folder_prefix()):
            remove_unused(folder)  # closing the socket removed its file


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    if address.startswith("ipc://"):
        prepare_folder(address)
    previous = os.umask(0o177)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError("net.port_in_use", f"{address} is in use", where="network") from None
        raise ConfigError("config.network", f"cannot listen at {address}: {error}", where="network") from None
    finally:
        os.umask(previous)
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
