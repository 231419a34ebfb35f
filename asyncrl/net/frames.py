"""What all sockets share: contexts, options, frames without copies, and the pump of an event loop."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncrl.errors import ConfigError, error_for
from asyncrl.net.keys import Keys
from asyncrl.wire import COPY_THRESHOLD_BYTES, Buffer, Packet, Refused

RETRY_S = 0.1  # pause after a send that found no connection
#: What a service says of a frame that may have been damaged under way; believed when it is said `BELIEVED` times.
DAMAGED = frozenset({"wire.prefix", "wire.schema", "wire.size", "wire.checksum"})
BELIEVED = 3
MUTE = 2  # times that a request stays without an answer until its connection is made anew
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


class SocketContext(zmq.Context[zmq.Socket[bytes]]):
    """A context that only `close` of its owner ends.

    pyzmq ends one in the garbage collector too, and waits there, for ever where its sockets are collected with it.
    """

    def __del__(self) -> None:
        """Leave it to the end of the process."""


def set_limits(socket: zmq.Socket[bytes], max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    # Credits bound what is under way (requests per asker), so the marks need not: a drop at a mark would be silent.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def connect(
    context: zmq.Context[Any], address: str, keys: Keys | None, max_bytes: int
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The socket, and one on which every connection that was made is a message, the first one included."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    set_limits(socket, max_bytes)
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


def reconnect(socket: zmq.Socket[bytes], address: str) -> None:
    """A new connection in place of the one there is; what was queued on it is lost."""
    socket.disconnect(address)
    socket.connect(address)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> bool:
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


def receive_frames(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """The frames of the next message as memoryviews (large ones without a copy). Raises `zmq.Again` without one."""
    frames: list[Buffer] = []
    while True:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.buffer)
        if not frame.more:
            return frames


def is_damaged(packet: Packet) -> bool:
    """Whether this answer says that the request arrived damaged."""
    return isinstance(packet.message, Refused) and packet.message.code in DAMAGED


def raise_refused(packet: Packet) -> Packet:
    """The packet, unless the service refused: then the error of its code."""
    message = packet.message
    if isinstance(message, Refused):
        raise error_for(message.code, message.message, where=message.where)
    return packet


class Pump:
    """Moves a ZeroMQ socket by its edge-triggered descriptor on the running event loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_frames: Callable[[list[list[Buffer]]], None],
        *,
        receive: Callable[[zmq.Socket[bytes]], list[Buffer]] = receive_frames,
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
        sent = send_frames(self._socket, frames)
        self.wake()
        return sent

    def close(self, linger_ms: int) -> None:
        """Stop watching and close the socket."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)
