"""The Redis store: the only code that talks to Redis. Rows in one hash, written by one script per drain.

Two scripts (`open.lua`, `apply.lua`) do all writing; each is one atomic step that checks the epoch.
Guarantees in addition to those of `buffers.stores.base`:
1. a write whose answer was lost is sent again: the sequence number makes that harmless, so retries are safe;
2. an outage is waited out with backoff for `redis_max_outage_s`, then `store.unreachable` ends the service (exit code
   69);
3. a Redis that comes back empty or rolled back is noticed at the next write (`StoreLost`) and written again;
4. a private server lives in the run folder on a unix socket (0600), dies with the service, and is started again by it;
5. the password of a URL is never printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from asyncrl.config import BufferConfig
from asyncrl.config.redis_url import hide_password, restore_password
from asyncrl.errors import ConfigError, Fenced, Unavailable
from buffers.groups.records import Change
from buffers.stores.base import Opened, StoreLost
from buffers.stores.keys import head_key, rows_key
from buffers.stores.private_server import PrivateServer, find_server

_FOLDER = Path(__file__).parent
_TRANSIENT = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.ReadOnlyError,
)


def open_redis(
    buffer: BufferConfig, *, run_id: str, folder: Path, stop: Callable[[], bool] = lambda: False
) -> RedisStore:
    """The store at `buffer.redis_url`, or on a private server.

    Raises:
        ConfigError: no URL, and no server on the PATH.
        Unavailable: it does not answer.
    """
    if buffer.redis_url:
        url = restore_password(buffer.redis_url, folder)
        return RedisStore(url, run=run_id, max_outage_s=buffer.redis_max_outage_s, stop=stop)
    program = find_server()
    if program is None:
        raise ConfigError(
            "store.no_server",
            'buffer.store = "redis" without buffer.redis_url, and neither redis-server '
            "nor valkey-server is on the PATH",
            where="buffer.store",
        )
    server = PrivateServer(program, folder, fsync=buffer.fsync)
    server.start()
    return RedisStore(server.url, run=run_id, max_outage_s=buffer.redis_max_outage_s, stop=stop, server=server)


class RedisStore:
    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        run: str,
        max_outage_s: float = 60.0,
        stop: Callable[[], bool] = lambda: False,
        server: PrivateServer | None = None,
    ) -> None:
        self.where = hide_password(url)
        self._server = server
        self._stop = stop
        self._max_outage_s = max_outage_s
        self._keys = [head_key(run), rows_key(run)]
        self._epoch = 0
        self._sequence = 0
        try:
            self._redis: redis.Redis = redis.Redis.from_url(url, socket_timeout=10.0, socket_connect_timeout=3.0)
        except ValueError as error:
            raise ConfigError("config.type", f"buffer.redis_url: {error}", where="buffer.redis_url") from None
        self._open_script = self._redis.register_script((_FOLDER / "open.lua").read_bytes())
        self._apply_script = self._redis.register_script((_FOLDER / "apply.lua").read_bytes())

    def open(self, *, floor: int) -> Opened:
        """Take the epoch and read the rows."""
        taken = self._patiently(
            lambda: self._open_script(self._keys[:1], [floor, self._epoch]), limit_s=min(10.0, self._max_outage_s)
        )
        self._epoch, self._sequence = int(taken[0]), int(taken[1])
        rows: dict[bytes, bytes] = self._patiently(lambda: self._redis.hgetall(self._keys[1]))
        return Opened(self._epoch, [(key.decode(), value) for key, value in rows.items()])

    def apply(self, changes: Sequence[Change]) -> None:
        """Write the changes as one step."""
        self._write(changes, str(self._sequence))

    def reseed(self, rows: Sequence[Change]) -> None:
        """Replace whatever the store holds by these rows."""
        self._write(rows, "reseed")

    def _write(self, changes: Sequence[Change], previous: str) -> None:
        arguments: list[Any] = [self._epoch, previous, self._sequence + 1, 0]
        for change in changes:
            if change.value is not None:
                arguments += (change.key, change.value)
        arguments[3] = (len(arguments) - 4) // 2
        arguments += [change.key for change in changes if change.value is None]
        answer = self._patiently(lambda: self._apply_script(self._keys, arguments))
        if answer == b"fenced":
            raise Fenced("fenced", f"service epoch {self._epoch} is over, a newer service writes", where=self.where)
        if answer == b"lost":
            raise StoreLost(self.where)
        self._sequence += 1

    def _patiently(self, ask: Callable[[], Any], *, limit_s: float = 0.0) -> Any:
        """Ask until it answers, with backoff, within the outage limit."""
        deadline = time.monotonic() + (limit_s or self._max_outage_s)
        pause, reported = 0.05, False
        while True:
            try:
                return ask()
            except _TRANSIENT as error:
                if isinstance(error, redis.exceptions.AuthenticationError):
                    raise Unavailable("store.unreachable", "Redis refuses the password", where=self.where) from None
                if time.monotonic() >= deadline or self._stop():
                    raise Unavailable(
                        "store.unreachable", f"Redis does not answer: {error}", where=self.where
                    ) from None
                if not reported:
                    print(
                        f"buffer: Redis at {self.where} does not answer ({type(error).__name__}); waiting", flush=True
                    )
                    reported = True
            except redis.exceptions.ResponseError as error:
                raise Unavailable("store.refused", f"Redis: {error}", where=self.where) from None
            if self._server is not None and self._server.has_ended():
                self._server.start()
            time.sleep(pause)
            pause = min(2.0, pause * 2)

    def sync(self) -> None:
        """Flush a private server to disk; a server at a URL follows its own appendfsync."""
        if self._server is not None:
            self._server.sync()

    def close(self) -> None:
        """Close it; a private server ends with its data on disk."""
        self._redis.close()
        if self._server is not None:
            self._server.stop()
