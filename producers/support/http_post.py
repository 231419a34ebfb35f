"""One POST of JSON to a configured server; sandboxes and rewards behind an address use it.

Guarantees:
1. redirects are not followed: the headers may hold a secret for this server;
2. an answer is read up to `most_bytes`, and until `timeout_s` is over, also if the server sends a byte now and then.
"""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

CHUNK = 1 << 16


class TooLong(Exception):
    """The answer has more than `most_bytes`."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None: a redirect is an error like any other status."""


def post(url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float, most_bytes: int) -> bytes:
    """The answer's body.

    Raises:
        urllib.error.HTTPError: any status but 2xx, redirects among them.
        OSError, http.client.HTTPException: no connection, no answer in time, an incomplete answer.
        TooLong: more than `most_bytes`.
    """
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(_NoRedirect)
    data = bytearray()
    with opener.open(urllib.request.Request(url, body, dict(headers)), timeout=timeout_s) as answer:
        while part := answer.read1(CHUNK):
            data += part
            if len(data) > most_bytes:
                raise TooLong(f"its answer is longer than {most_bytes} bytes")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no whole answer within {timeout_s:g} s")
        if answer.length:
            raise http.client.IncompleteRead(bytes(data[-CHUNK:]), answer.length)
    return bytes(data)
