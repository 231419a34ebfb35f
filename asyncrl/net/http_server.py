"""An HTTP server of the standard library that idle clients cannot fill."""

from __future__ import annotations

import http.server
import socket
import ssl
import sys
import threading
from contextlib import suppress
from typing import Any

from asyncrl.net.descriptors import SILENT_S

MOST_CONNECTIONS = 256  # one thread each


class LimitedHTTPServer(http.server.ThreadingHTTPServer):
    """A thread for each connection. Beyond `MOST_CONNECTIONS` the oldest one without a request is closed; if there is
    none, the new one. With `tls` it speaks HTTPS alone.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[LimitedHandler], *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self._idle: dict[socket.socket, None] = {}  # connections without a complete request, oldest first
        self._count = 0
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The handshake of TLS is part of its first read, in its own thread and time limit."""
        connection, address = super().get_request()
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

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
        """Print the error, unless the client went away, was closed to make room or failed in the handshake of TLS."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | ssl.SSLError):
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
