"""Limits on the connections of a listening ZeroMQ socket: silent clients cannot use up the descriptors.

libzmq accepts every connection. `ConnectionGuard` follows a socket's monitor in a thread of its own and cuts
connections at the level of the kernel: libzmq then closes them as if the peer had left. Guarantees:
1. a connection without a valid message for `SILENT_S` is cut; an honest peer reconnects and sends again;
2. beyond `limit` connections the oldest silent one is cut at once; without a silent one, the oldest of the key that has
   the most;
3. `limit` is at most a quarter of the process's own limit of descriptors, so files can still be opened.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.net.descriptors import SILENT_S, connection_limit, cut

LOOK_S = 0.2


class _Connection:
    __slots__ = ("inode", "key", "since", "spoke")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.since = time.monotonic()
        self.spoke = False
        self.key = b""

    def note(self, key: bytes) -> None:
        self.key, self.spoke = key, True


class ConnectionGuard:
    """Made before the socket is bound, and closed before it. `dropped` counts the connections that it cut."""

    def __init__(self, socket: zmq.Socket[bytes], *, limit: int = 0) -> None:
        self.limit = limit or connection_limit()
        self.dropped = 0
        self._socket = socket
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._early: dict[int, tuple[int, bytes]] = {}  # messages that came before the event: inode and key
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._events = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def note_message(self, descriptor: int, key: bytes = b"") -> None:
        """A valid message came over this connection."""
        connection = self._connections.get(descriptor)  # without the lock: every message comes by here
        if connection is None:  # the thread of a busy host has not seen it yet, or it was cut
            with suppress(OSError), self._lock:
                self._early[descriptor] = os.fstat(descriptor).st_ino, key
        elif not connection.spoke:
            connection.note(key)

    def __len__(self) -> int:
        return len(self._connections)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stop.is_set():
            try:
                if self._events.poll(int(LOOK_S * 1000)):
                    event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
                    self._take(int(event["event"]), int(event["value"]))
            except zmq.ZMQError:
                return  # the socket is closed
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                self._drop_silent(looked)

    def _take(self, event: int, descriptor: int) -> None:
        with self._lock:
            self._connections.pop(descriptor, None)
            if event != zmq.EVENT_ACCEPTED:
                return
            try:
                accepted = _Connection(os.fstat(descriptor).st_ino)
            except OSError:
                return  # it is gone already
            inode, key = self._early.pop(descriptor, (0, b""))
            if inode == accepted.inode:
                accepted.note(key)
            self._connections[descriptor] = accepted
            if len(self._connections) > self.limit:
                self._drop(self._choose())

    def _choose(self) -> int:
        """The connection that makes room."""
        for descriptor, connection in self._connections.items():
            if not connection.spoke:
                return descriptor
        [(most, _)] = Counter(connection.key for connection in self._connections.values()).most_common(1)
        return next(number for number, connection in self._connections.items() if connection.key == most)

    def _drop(self, descriptor: int) -> None:
        cut(descriptor, self._connections.pop(descriptor).inode)
        self.dropped += 1

    def _drop_silent(self, now: float) -> None:
        with self._lock:
            silent = [
                descriptor
                for descriptor, connection in self._connections.items()
                if not connection.spoke and now - connection.since > SILENT_S
            ]
            for descriptor in silent:
                self._drop(descriptor)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(2.0)
        self._socket.disable_monitor()
        self._events.close(0)
