"""The Redis store. Rows in one hash, written by one script per drain.

Two scripts (`open.lua`, `apply.lua`) do all writing; each is one atomic step that checks the epoch.
Guarantees in addition to those of `buffers.stores.base`:
1. a write whose answer was lost is sent again: the sequence number makes that harmless, so retries are safe;
2. an outage is waited out with backoff for `redis_max_outage_s`, then `store.unreachable` ends the service (exit code
   69);
3. a Redis that comes back empty or rolled back is noticed at the next write (`StoreLost`) and written again;
4. a private server lives in the run folder on a unix socket (0600), dies with the service, and is started again by it.
The calls go through `buffers.stores.redis_client`, as those of the lease do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import BufferConfig
from asyncrl.config.redis_url import restore_password
from asyncrl.errors import ConfigError, Fenced
from buffers.groups.records import Change
from buffers.stores.base import Opened, StoreLost
from buffers.stores.keys import head_key, rows_key
from buffers.stores.private_server import PrivateServer, find_server
from buffers.stores.redis_client import RedisClient


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
        self._client = RedisClient(url, max_outage_s=max_outage_s, stop=stop, server=server)
        self.where = self._client.where
        self._server = server
        self._max_outage_s = max_outage_s
        self._keys = [head_key(run), rows_key(run)]
        self._epoch = 0
        self._sequence = 0
        self._open_script = self._client.script("open")
        self._apply_script = self._client.script("apply")

    def open(self, *, floor: int) -> Opened:
        """Take the epoch and read the rows."""
        taken = self._client.patiently(
            lambda: self._open_script(self._keys[:1], [floor, self._epoch]), limit_s=min(10.0, self._max_outage_s)
        )
        self._epoch, self._sequence = int(taken[0]), int(taken[1])
        rows: dict[bytes, bytes] = self._client.patiently(lambda: self._client.redis.hgetall(self._keys[1]))
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
        answer = self._client.patiently(lambda: self._apply_script(self._keys, arguments))
        if answer == b"fenced":
            raise Fenced("fenced", f"service epoch {self._epoch} is over, a newer service writes", where=self.where)
        if answer == b"lost":
            raise StoreLost(self.where)
        self._sequence += 1

    def sync(self) -> None:
        """Flush a private server to disk; a server at a URL follows its own appendfsync."""
        if self._server is not None:
            self._server.sync()

    def close(self) -> None:
        """Close it; a private server ends with its data on disk."""
        self._client.redis.close()
        if self._server is not None:
            self._server.stop()
