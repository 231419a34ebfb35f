"""All ZeroMQ set-up: addresses, keys, the asking side and the answering side.

Nobody else opens a socket. DEALER asks, ROUTER answers, every request has
an application answer. Guarantees:
1. a request is sent again until it is answered or its deadline passes, and at once when the connection came back: what
   was asked of a service that died is asked of the next one; services are idempotent, so this is safe. A connection
   on which nothing is answered is made anew: where a length in it was damaged, all that follows is misread for ever;
2. every wait ends: at the deadline `net.unreachable` names the address and the time waited;
3. a frame that does not decode is answered with `Refused` where its sender can be told, and counted; it never raises;
   an asker who is told so sends again, and believes it at the third time: the frame may have been damaged under way;
4. an `ipc://` socket is only the owner's (mode 0600 in a 0700 folder); beyond loopback needs CURVE keys, or says every
   minute that it has none;
5. with keys a service knows by the sender's key, not by its words, whether it may lead the run (`config.forbidden`).
It does not know what messages mean.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import hmac
import itertools
import os
import socket as socketlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import msgspec
import zmq
import zmq.auth

from asyncrl.errors import AsyncRLError, ConfigError, Unavailable, WireError, error_for
from asyncrl.net.keys import OWNER, Keys, read_keys, write_keys
from asyncrl.wire import (
    COPY_THRESHOLD_BYTES,
    REPLY,
    REQUEST_MANY,
    Buffer,
    Message,
    Packet,
    Refused,
    Replies,
    decode,
    decode_header,
    encode,
    encode_header,
    request_of,
)

__all__ = [
    "AsyncRequester",
    "Call",
    "Keys",
    "Requester",
    "Responder",
    "check_bind",
    "damaged",
    "ipc_address",
    "is_exposed",
    "keep_memory",
    "raise_refused",
    "read_keys",
    "remove_unused",
    "write_keys",
]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
MAX_IPC_PATH = 100  # sun_path holds 108 bytes
UNUSED_S = 60.0  # a younger temporary folder may be one in which a service is about to listen
RETRY_S = 0.1  # pause after a send that found no connection
WARN_S = 60.0  # between two warnings of a socket that is open to everybody
LOOK_S = 0.25  # how often a wait for an answer asks whether to go on
#: What a service says of a frame that may have been damaged under way; believed when it is said `BELIEVED` times.
DAMAGED = frozenset({"wire.prefix", "wire.schema", "wire.size", "wire.checksum"})
BELIEVED = 3
MUTE = 2  # times that a request stays without an answer until its connection is made anew
HEARTBEAT_MS, SILENT_MS = 2000, 6000  # of every connection of a service; longest silence on one
LINGER_MS = 2000  # what was sent gets this long to leave; nothing where nobody answered
KEPT_BYTES = 64 << 20  # of freed memory that a process with `keep_memory` does not give back
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
DRAIN_LIMIT = 16  # messages taken at a time: few, so that payloads stay in the CPU cache and answers leave early
# Plain ints: arithmetic on zmq's enum flags costs more than the calls that take them (measured 3.3 us a frame to 1.5).
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def keep_memory() -> None:
    """Let this process keep freed memory instead of giving every payload's pages back at once (glibc; else nothing).

    Payloads of about 100 KB come and go at the top of the heap; returning their pages
    and faulting them in again costs more than copying them (measured: a third of a producer's CPU per group).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 8)


def ipc_address(folder: Path, name: str) -> str:
    """An `ipc://` address in the folder, or in a private temporary folder if that is too long. Makes nothing."""
    path = folder.resolve() / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        short = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=6).hexdigest()
        path = Path(tempfile.gettempdir()) / f"{_short_prefix()}{short}" / f"{name}.sock"
    return f"ipc://{path}"


def _short_prefix() -> str:
    return f"asyncrl-{os.getuid()}-"


def _prepare_folder(address: str) -> None:
    """Make the folder of an `ipc://` socket, ours alone; remove the temporary ones that killed services left."""
    path = Path(address.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.parent != Path(tempfile.gettempdir()) or not path.parent.name.startswith(_short_prefix()):
        return
    if path.parent.stat().st_uid != os.getuid():  # its name can be guessed, and the folder above is everybody's
        raise ConfigError("config.network", f"{path.parent} belongs to somebody else", where="network")
    for other in path.parent.parent.glob(f"{_short_prefix()}*"):
        with suppress(OSError):  # its owner may be faster
            if other != path.parent and time.time() - other.stat().st_mtime > UNUSED_S:
                remove_unused(other)


def remove_unused(folder: Path) -> None:
    """Remove a folder that holds nothing but sockets on which nobody listens. Never raises."""
    with suppress(OSError):
        for path in folder.iterdir():
            if not path.is_socket() or _listens(path):
                return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _listens(path: Path) -> bool:
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        probe.settimeout(LOOK_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # a full backlog, a stopped owner: not ours to judge
            return True
    return True


def check_bind(address: str, *, keys: Keys | None, insecure: bool = False) -> None:
    """Refuse to listen beyond this host without keys (`config.network`)."""
    if urlparse(address).scheme not in ("ipc", "tcp", "inproc"):
        raise ConfigError("config.network", f"{address!r} is not ipc:// or tcp://", where="network")
    if is_exposed(address) and keys is None and not insecure:
        raise ConfigError("config.network", f"{address} is reachable from other hosts and has no keys", where="network")
    if keys is not None and not keys.server_secret:
        raise ConfigError(
            "config.network",
            f"{address}: a join key cannot serve",
            where="network",
            remedy="give services and the learner the server.key of the run",
        )


def is_exposed(address: str) -> bool:
    """Whether other hosts can reach what listens there."""
    parsed = urlparse(address)
    return parsed.scheme == "tcp" and parsed.hostname not in LOOPBACK


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """A context that only `close` of its owner ends.

    pyzmq ends one in the garbage collector too, and waits there, for ever where its sockets are collected with it.
    """

    def __del__(self) -> None:
        """Leave it to the end of the process."""


def _tune(socket: zmq.Socket[bytes], max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    # Credits bound what is under way (requests per asker), so the marks need not: a drop at a mark would be silent.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def _beat(socket: zmq.Socket[bytes]) -> None:
    """Heartbeats, of the answering side alone: each says for how long the other end may wait for the next, so that both
    notice a peer that is gone.

    A DEALER must not send any: libzmq (4.3.5) aborts its process where one is due on a connection that broke after the
    socket was closed, or disconnected, with requests still to leave and answers still to come.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENT_MS)


def _connect(
    context: zmq.Context[Any], address: str, keys: Keys | None, max_bytes: int
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The socket, and one on which every connection that was made is a message, the first one included."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _tune(socket, max_bytes)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    # An attempt that meets silence (a partition, a stopped service) makes room for the next one.
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 3000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    if keys is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.client_secret)
    connections = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)  # before the first one can be made
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.disable_monitor()
        connections.close(0)
        socket.close(0)
        raise ConfigError("config.network", f"cannot connect to {address}: {error}") from None
    return socket, connections


def _reopen(socket: zmq.Socket[bytes], address: str) -> None:
    """A new connection in place of the one there is; what was queued on it is lost."""
    socket.disconnect(address)
    socket.connect(address)


def _send(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> bool:
    """Send without blocking; False while there is no connection to queue on. Large frames are not copied."""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        size = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        try:
            socket.send(frame, _MORE if number < last else _NOBLOCK, copy=size < COPY_THRESHOLD_BYTES)
        except zmq.Again:
            if number:
                raise  # cannot happen: a message that began is taken whole
            return False
    return True


def _receive(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """The frames of the next message as memoryviews (large ones without a copy). Raises `zmq.Again` without one."""
    frames: list[Buffer] = []
    while True:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.buffer)
        if not frame.more:
            return frames


def _receive_known(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """Like `_receive`, with the public key of the sender in front: what ZAP admitted it by, not what it says it is."""
    frames: list[Buffer] = [b""]
    while True:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.buffer)
        if not frame.more:
            frames[0] = str(frame.get("User-Id")).encode()
            return frames


class Requester:
    """Asks one service, one request at a time; for code without an event loop. Safe to share between threads.

    `on_silence` hears, a few times a second, for how many seconds an answer is overdue; True gives the request up.
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
        self._answered = True  # the last request
        self._max_bytes = max_bytes
        self._resend_s = resend_s
        self._context: _Context = _Context()
        self._socket, self._connections = _connect(self._context, address, keys, max_bytes)
        self._connected = 0  # how often
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
                patience = wait_s + self._resend_s if _send(self._socket, frames) else RETRY_S
                answer = self._await(number, min(deadline, now + patience), due=started + wait_s)
                if answer is not None:
                    refusals += damaged(answer)
                    if damaged(answer) and refusals < BELIEVED:
                        continue
                    self._answered = True
                    return raise_refused(answer)
                if self._give_up(started + wait_s):
                    break
                silences += 1
                if silences % MUTE == 0:
                    _reopen(self._socket, self.address)
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
            if self._connections in ready and self._reconnected():
                return None  # it is sent again
            if self._socket not in ready:
                if self._give_up(due):
                    return None
                continue
            try:
                packet = decode(_receive(self._socket), max_bytes=self._max_bytes)
            except WireError:
                continue  # the request is sent again
            if packet.request == number and packet.kind == REPLY:  # older numbers answer a request sent twice
                return packet
        return None

    def _reconnected(self) -> bool:
        """Whether the connection was made anew, and not for the first time."""
        before = self._connected
        with suppress(zmq.Again):
            while True:
                _receive(self._connections)
                self._connected += 1
        return self._connected > max(before, 1)

    def close(self) -> None:
        """Close the socket; what was sent gets two seconds to leave, where the service answers. Twice is once."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._connections.close(0)
        self._socket.close(LINGER_MS if self._answered else 0)
        self._context.term()


def damaged(packet: Packet) -> bool:
    """Whether this answer says that the request arrived damaged."""
    return isinstance(packet.message, Refused) and packet.message.code in DAMAGED


def raise_refused(packet: Packet) -> Packet:
    """The packet, unless the service refused: then the error of its code."""
    message = packet.message
    if isinstance(message, Refused):
        raise error_for(message.code, message.message, where=message.where)
    return packet


class _Pump:
    """Moves a ZeroMQ socket by its edge-triggered descriptor on the running event loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[list[list[Buffer]]], None],
        *,
        receive: Callable[[zmq.Socket[bytes]], list[Buffer]] = _receive,
    ) -> None:
        self._socket = socket
        self._receive = receive
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._open = True
        self._descriptor: int = socket.FD
        self._loop.add_reader(self._descriptor, self.wake)
        self.wake()

    def wake(self) -> None:
        """Look for messages soon. Needed after every send too, which may have swallowed the descriptor's edge."""
        if self._open and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if not self._open:
            return
        batch: list[list[Buffer]] = []
        try:
            while len(batch) < DRAIN_LIMIT:
                batch.append(self._receive(self._socket))
            self.wake()
        except zmq.Again:  # empty: the descriptor tells when there is more
            pass
        if batch:
            self._on_frames(batch)

    def send(self, frames: Sequence[Any]) -> bool:
        """Queue the frames; never blocks; False while there is no connection."""
        sent = _send(self._socket, frames)
        self.wake()
        return sent

    def close(self, linger_ms: int) -> None:
        """Stop watching and close the socket."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)


class _Asked(msgspec.Struct):
    """A request under way: what was sent, who waits, until when, and when it is sent again. Times of the loop."""

    frames: list[Buffer]
    answer: asyncio.Future[Packet | None]
    deadline: float
    patience_s: float
    due: float = 0.0
    refusals: int = 0  # of a frame that was damaged under way
    silences: int = 0  # times that its answer was overdue
    sent: float = 0.0  # first


class AsyncRequester:
    """Asks one service with many requests under way at once. Made and used on one event loop."""

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
        self._context: _Context = _Context()
        self._socket, connections = _connect(self._context, address, keys, max_bytes)
        self._pump = _Pump(self._socket, self._take)
        self._connections = _Pump(connections, self._reconnected)
        self._connected = 0  # how often
        self._heard = 0.0  # when the last whole message came
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Asked] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._answered = True  # something since the last request that was given up
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
        patience = asked.patience_s if self._pump.send(asked.frames) else RETRY_S
        asked.due = min(asked.deadline, self._loop.time() + patience)
        if self._timer is None or self._timer.when() > asked.due:
            self._arm(asked.due)

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """One timer for all requests: give up those past their deadline, send again those whose answer is overdue."""
        self._timer = None
        now = self._loop.time()
        for asked in list(self._waiting.values()):
            if now >= asked.deadline and not asked.answer.done():
                asked.answer.set_result(None)
            elif now >= asked.due and not asked.answer.done():
                asked.silences += 1
                if asked.silences % MUTE == 0 and self._heard < asked.sent:
                    _reopen(self._socket, self.address)
                self._send(asked)
        due = [asked.due for asked in self._waiting.values() if not asked.answer.done()]
        if due and (self._timer is None or self._timer.when() > min(due)):
            self._arm(min(due))

    def _reconnected(self, events: list[list[Buffer]]) -> None:
        """The service, or another one in its place, never got what was under way, or could not answer it."""
        self._connected += len(events)
        for asked in list(self._waiting.values()) if self._connected > 1 else ():
            if not asked.answer.done():
                self._send(asked)

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
        asked.refusals += damaged(packet)
        if damaged(packet) and asked.refusals < BELIEVED:
            self._send(asked)
        else:
            asked.answer.set_result(packet)

    def close(self) -> None:
        """Close the socket; what was sent gets two seconds to leave, where the service answers. Twice is once."""
        if self._socket.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        for asked in self._waiting.values() if not self._loop.is_closed() else ():
            if not asked.answer.done():
                asked.answer.set_result(None)  # nobody will hear the answer: the asker is told
        self._socket.disable_monitor()
        self._connections.close(0)
        self._pump.close(LINGER_MS if self._answered else 0)
        self._context.term()


class Call:
    """One request at a service. Answer it once with `reply`, at once or later; `peer` is stable while connected.

    `user` is what the sender's key makes it: `owner` or `join`; empty where the service has no keys.
    """

    __slots__ = (
        "_many",
        "_responder",
        "checksum",
        "header",
        "message",
        "payloads",
        "peer",
        "received",
        "request",
        "user",
    )

    def __init__(self, responder: Responder, peer: bytes, packet: Packet, *, user: str = "") -> None:
        self.user = user
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
        """Send the answer; a peer that has gone is counted, not raised."""
        self._responder.reply(self.peer, self.request, message, payloads, many=self._many)

    def refuse(self, error: AsyncRLError) -> None:
        """Answer with an error of the catalogue."""
        self.reply(Refused(error.code, error.message, error.where))


class Responder:
    """Answers requests on a ROUTER socket. `handler` gets the decoded requests of one drain (at most 16) together.

    `restricted` names messages that only the owner of the run may send, where the service has keys. `counters`:
    received, bad_frames, gone_peers, forbidden. Made and used on one event loop.
    """

    def __init__(
        self,
        address: str,
        handler: Callable[[list[Call]], None],
        *,
        keys: Keys | None = None,
        max_bytes: int = 1 << 30,
        insecure: bool = False,
        restricted: Callable[[Message], bool] = lambda _: False,
    ) -> None:
        check_bind(address, keys=keys, insecure=insecure)
        self._known = {} if keys is None else {public.encode(): name for public, name in keys.known.items()}
        self._restricted = restricted
        self.counters: Counter[str] = Counter()
        self._handler = handler
        self._together: dict[bytes, list[tuple[int, Message]]] | None = None  # answers of the drain under way
        self._max_bytes = max_bytes
        self._context: _Context = _Context()
        self._authenticator = _authenticate(self._context, keys) if keys is not None else None
        socket = self._context.socket(zmq.ROUTER)
        _tune(socket, max_bytes)
        _beat(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.server_public)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.server_secret)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, "asyncrl")
        self.address = _bind(socket, address)
        self._pump = _Pump(
            socket,
            self._take if keys is None else self._take_known,
            receive=_receive if keys is None else _receive_known,
        )
        self._warning: asyncio.TimerHandle | None = None
        if keys is None and is_exposed(address):
            self._warn()

    def _warn(self) -> None:
        """Once a minute, for as long as it lasts."""
        print(f"warning: {self.address} is open to everybody who reaches this host: it has no keys", flush=True)
        self._warning = asyncio.get_running_loop().call_later(WARN_S, self._warn)

    def _take_known(self, batch: list[list[Buffer]]) -> None:
        self._take([frames for _, *frames in batch], [self._known.get(bytes(key), "") for key, *_ in batch])

    def _take(self, batch: list[list[Buffer]], users: Sequence[str] = ()) -> None:
        calls: list[Call] = []
        for (peer, *frames), user in zip(batch, users or itertools.repeat(""), strict=False):
            self.counters["received"] += 1
            try:
                call = Call(self, bytes(peer), decode(frames, max_bytes=self._max_bytes), user=user)
                if self._known and user != OWNER and self._restricted(call.message):
                    self._forbid(call)
                else:
                    calls.append(call)
            except WireError as error:
                self.counters["bad_frames"] += 1
                number = request_of(frames)
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

    def _forbid(self, call: Call) -> None:
        self.counters["forbidden"] += 1
        what = f"{type(call.message).__name__} is not for holders of a join key"
        call.refuse(ConfigError("config.forbidden", what, where=self.address))

    def reply(
        self, peer: bytes, request: int, message: Message, payloads: Sequence[Buffer] = (), *, many: bool = False
    ) -> None:
        """Send an answer to a peer. With `many` it may leave at the end of the drain, together with its others."""
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
        """Stop answering. Replies that were queued get half a second to leave."""
        if self._warning is not None:
            self._warning.cancel()
        self._pump.close(500)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        folder = Path(self.address.removeprefix("ipc://")).parent
        if folder.name.startswith(_short_prefix()):
            remove_unused(folder)  # the socket file went with the socket


class _Admission:
    """Answers ZAP's question from memory: a folder of keys would outlive a process that is killed."""

    def __init__(self, keys: Keys) -> None:
        self._known = [public.encode() for public in keys.known]

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the peer holds one of the run's keys."""
        return any(hmac.compare_digest(key, public) for public in self._known)


def _authenticate(context: zmq.Context[Any], keys: Keys) -> Any:
    """A ZAP handler in a thread that admits the run's keys alone, under a domain of that name ("*" admits nobody)."""
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("asyncrl", _Admission(keys))
    return authenticator


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    if address.startswith("ipc://"):
        _prepare_folder(address)
    previous = os.umask(0o177)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError("net.port_in_use", f"{address} is in use", where="network") from None
        raise ConfigError("config.network", f"cannot listen at {address}: {error}", where="network") from None
    finally:
        os.umask(previous)
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
