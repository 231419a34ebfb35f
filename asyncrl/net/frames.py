"""Shared by all sockets: contexts, options, frames without copies, and the pump of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncrl.errors import ConfigError, error_for
from asyncrl.net.keys import Keys
from asyncrl.wire import COPY_THRESHOLD_BYTES, Buffer, Packet, Refused

RETRY_S = 0.1  # pause after a send that found no connection
#: Refusals of a frame that may have been damaged in transit; accepted after `BELIEVED` of them.
DAMAGED = frozenset({"wire.prefix", "wire.schema", "wire.size", "wire.checksum"})
BELIEVED = 3
MUTE = 2  # unanswered sends of a request after which its connection is replaced
LINGER_MS = 2000  # time for unsent messages at close; 0 if the service does not answer
DRAIN_LIMIT = 16  # messages taken at a time: few, so that payloads stay in the CPU cache and answers leave early
# Plain ints: arithmetic on zmq's enum flags costs more than the calls that take them (measured 3.3 us a frame to 1.5).
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class SocketContext(zmq.Context[zmq.Socket[bytes]]):
    """A context that only its owner's `close` ends.

    pyzmq also ends contexts in the garbage collector and waits there, forever if the sockets are collected with it.
    """

    def __del__(self) -> None:
        """Do nothing: the end of the process cleans up."""


def set_limits(socket: zmq.Socket[bytes], max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    # Credits bound the requests in progress, so no high-water marks are needed: drops at a mark would be silent.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def connect(
    context: zmq.Context[Any], address: str, keys: Keys | None, max_bytes: int
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The socket, and a second one that receives a message for every established connection.

    Of several addresses (`tcp://a:1,tcp://b:1`) one is served at a time: requests go only to established connections.
    """
    addresses = address.split(",")
    several = len(addresses) > 1
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    set_limits(socket, max_bytes)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500 if several else 2000)
    socket.setsockopt(zmq.IMMEDIATE, int(several))
    # an attempt without an answer (a partition, a stopped service) makes room for the next one
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 3000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    if keys is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    connections = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)  # before the first connection exists
    try:
        for one in addresses:
            socket.connect(one)
    except zmq.ZMQError as error:
        socket.disable_monitor()
        connections.close(0)
        socket.close(0)
        raise ConfigError("config.network", f"cannot connect to {address}: {error}") from None
    return socket, connections


def reconnect(socket: zmq.Socket[bytes], address: str) -> None:
    """Replace the connections; messages queued on them are lost."""
    for one in address.split(","):
        socket.disconnect(one)
        socket.connect(one)


def prefer_newest(socket: zmq.Socket[bytes], address: str, event: Sequence[Buffer]) -> bool:
    """Of several addresses the one connected last is served: replace the connections to the others, and return True.

    Those of a host that died without a word would stay open and get a share of the requests. The replacement takes
    libzmq a moment (`RETRY_S`), in which it still sends on the old connection.
    """
    addresses = address.split(",")
    others = [one for one in addresses if one != bytes(event[1]).decode(errors="replace")]
    if len(others) == len(addresses) or not others:
        return False
    for one in others:
        reconnect(socket, one)
    return True


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> bool:
    """Send without blocking; False without a connection. Large frames are not copied."""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        size = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        try:
            socket.send(frame, _MORE if number < last else _NOBLOCK, copy=size < COPY_THRESHOLD_BYTES)
        except zmq.Again:
            if number:
                raise  # impossible: a message is queued as a whole
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
    """Return the packet, or raise the error of a refusal."""
    message = packet.message
    if isinstance(message, Refused):
        raise error_for(message.code, message.message, where=message.where)
    return packet


class Pump:
    """Moves messages of a ZeroMQ socket by its edge-triggered descriptor on the running event loop."""

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
        """Look for messages soon. Also needed after every send, which may have consumed the descriptor's edge."""
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
        except zmq.Again:  # empty: the descriptor signals new messages
            pass
        if batch:
            self._on_frames(batch)

    def send(self, frames: Sequence[Any]) -> bool:
        """Queue the frames without blocking; False without a connection."""
        sent = send_frames(self._socket, frames)
        self.wake()
        return sent

    def close(self, linger_ms: int) -> None:
        """Stop watching and close the socket."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)
