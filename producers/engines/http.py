"""A small client for engine servers: JSON calls and server-sent events, each with a deadline.

Needs the extra `http` (aiohttp), imported when a client is made. Guarantees:
1. every call ends: within its deadline, or for a stream after `idle_s` without a byte;
2. an answer, or one event of a stream, has at most `max_bytes`; more is `engine.broken`, as are an unreachable server,
   5xx, and bytes that are not the expected JSON. The error contains the server's text;
3. 4xx is `Refused` with its status and the server's text: the caller knows whether it is expected;
4. nothing is sent twice, no redirect is followed, no proxy of the environment is used. Each call has its own
   connection: servers close idle ones at any time, and a call in that moment would look like a dead server;
5. leaving a stream early closes its connection, which servers treat as an abort.

Example: `await HttpClient("http://127.0.0.1:30000").post("/pause_generation", {"mode": "retract"}, timeout_s=5)` is
`{"status": "ok", ...}`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError, WorkError

MAX_BYTES = 64 << 20  # of one answer or event
CONNECT_S = 10.0
EXCERPT = 300  # characters of a server's text in an error


class Refused(WorkError):
    """The server answered 4xx. `status` is the number, `text` its message."""

    def __init__(self, status: int, text: str, *, where: str) -> None:
        super().__init__("engine.broken", f"answered {status}: {text}", where=where)
        self.status = status
        self.text = text


def broken_error(what: str, *, where: str) -> WorkError:
    """The error of an unusable server."""
    return WorkError("engine.broken", what, where=where)


def _aiohttp() -> ModuleType:
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError("config.extra", f"{error}: pip install 'asyncrl[http]'", where="producers.engine") from None
    return aiohttp


class HttpClient:
    """Calls of one server. Made on the event loop that uses it; `close` at the end."""

    def __init__(self, url: str, *, max_bytes: int = MAX_BYTES, token: str = "") -> None:
        """`url` as `http://host:port`; `token` is sent as a bearer token.

        Raises:
            ConfigError: `config.extra` without aiohttp, `config.network` for another address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("config.network", f"{url!r} is not an http address", where="producers.url")
        self.url = url.rstrip("/")
        self._max_bytes = max_bytes
        self._aiohttp: Any = _aiohttp()
        self._session: Any = self._aiohttp.ClientSession(
            connector=self._aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    async def close(self) -> None:
        """End all calls."""
        await self._session.close()

    async def get(self, path: str, *, timeout_s: float, params: Mapping[str, str] | None = None) -> Any:
        """The decoded answer; None without a body."""
        return await self._call("GET", path, None, timeout_s=timeout_s, params=params)

    async def post(
        self, path: str, body: Any = None, *, timeout_s: float, params: Mapping[str, str] | None = None
    ) -> Any:
        """The decoded answer to a JSON body; None without a body.

        Raises:
            Refused: 4xx.
            WorkError: `engine.broken`.
        """
        return await self._call("POST", path, body, timeout_s=timeout_s, params=params)

    async def _call(
        self, method: str, path: str, body: Any, *, timeout_s: float, params: Mapping[str, str] | None
    ) -> Any:
        where = self.url + path
        limit = self._aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S))
        try:
            async with self._request(method, path, body, limit, params) as response:
                data = await self._read(response, where)
        except TimeoutError:
            raise broken_error(f"no answer within {timeout_s:g} s", where=where) from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise broken_error(f"{type(error).__name__}: {error}", where=where) from None
        self._check_status(response.status, data, where)
        if response.content_type != "application/json":
            return data.decode(errors="replace") if data else None
        return self._decode(data, where)

    def _request(self, method: str, path: str, body: Any, limit: Any, params: Mapping[str, str] | None = None) -> Any:
        return self._session.request(
            method,
            self.url + path,
            data=None if body is None else msgspec.json.encode(body),
            params=params,
            headers={"Content-Type": "application/json"},
            timeout=limit,
            allow_redirects=False,
        )

    async def _read(self, response: Any, where: str) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise broken_error(f"the answer is longer than {self._max_bytes} bytes", where=where)
        return b"".join(parts)

    def _check_status(self, status: int, data: bytes, where: str) -> None:
        text = data[:EXCERPT].decode(errors="replace")
        if 400 <= status < 500:
            raise Refused(status, text, where=where)
        if status != 200:
            raise broken_error(f"answered {status}: {text}", where=where)

    def _decode(self, data: bytes, where: str) -> Any:
        try:
            return msgspec.json.decode(data)
        except UNREADABLE as error:
            raise broken_error(f"no JSON ({error}): {data[:EXCERPT]!r}", where=where) from None

    async def stream(self, path: str, body: Any, *, idle_s: float) -> AsyncIterator[Any]:
        """The events of an answer to a JSON body, to its `[DONE]`.

        Raises:
            Refused: 4xx.
            WorkError: `engine.broken`, also if it ends without `[DONE]`.
        """
        where = self.url + path
        limit = self._aiohttp.ClientTimeout(total=None, sock_read=idle_s, sock_connect=CONNECT_S)
        try:
            async with self._request("POST", path, body, limit) as response:
                if response.status != 200:
                    self._check_status(response.status, await self._read(response, where), where)
                async for line in self._lines(response, where):
                    if not line.startswith(b"data:"):
                        continue  # comments, event names, empty lines
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield self._decode(data, where)
        except TimeoutError:
            raise broken_error(f"silent for {idle_s:g} s", where=where) from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise broken_error(f"{type(error).__name__}: {error}", where=where) from None
        raise broken_error("the stream ended without [DONE]", where=where)

    async def _lines(self, response: Any, where: str) -> AsyncIterator[bytes]:
        parts: list[bytes] = []
        size = 0
        async for piece in response.content.iter_any():
            *whole, rest = piece.split(b"\n")
            for line in whole:
                yield b"".join([*parts, line]).rstrip(b"\r")
                parts, size = [], 0
            parts.append(rest)
            size += len(rest)
            if size > self._max_bytes:
                raise broken_error(f"an event is longer than {self._max_bytes} bytes", where=where)
