"""An HTTP server of the standard library that idle clients cannot fill."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from asyncrl.net.descriptors import SILENT_S

MOST_CONNECTIONS = 256  # one thread each


class LimitedHTTPServer(http.server.ThreadingHTTPServer):
    """A thread for each connection. Beyond `MOST_CONNECTIONS` the oldest one without a request is closed; if there is
    none, the new one.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[LimitedHandler]) -> None:
        self._idle: dict[socket.socket, None] = {}  # connections without a complete request, oldest first
        self._count = 0
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Make room for the connection, and serve it in a thread."""
        with self._lock:
            full = self._count >= MOST_CONNECTIONS
            oldest = next(iter(self._idle), None)
            if full and oldest is not None:
                del self._idle[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends and closes it
            if not full or oldest is not None:
                self._idle[request] = None
                self._count += 1
        if full and oldest is None:
            super().shutdown_request(request)
            return
        super().process_request(request, client_address)

    def note_request(self, request: Any) -> None:
        """The connection has sent the head of a request."""
        with self._lock:
            self._idle.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._idle.pop(request, None)
                self._count -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, unless the client went away or was closed to make room."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class LimitedHandler(http.server.BaseHTTPRequestHandler):
    """A client that sends no request within `SILENT_S` is closed; after one, a client that is idle for `idle_s`."""

    timeout = SILENT_S
    idle_s = SILENT_S
    server: LimitedHTTPServer

    def parse_request(self) -> bool:
        """Read the head of a request."""
        complete = super().parse_request()
        self.server.note_request(self.connection)
        self.connection.settimeout(self.idle_s)
        return complete
