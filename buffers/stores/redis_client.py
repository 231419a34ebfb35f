"""A connection to Redis that waits out an outage. The store and the lease of a run have one each.

Guarantees:
1. a call is repeated with backoff for `max_outage_s`, then it raises `store.unreachable`; it must be idempotent;
2. the password of a URL is never printed;
3. at a URL of Sentinels or of a cluster a call during a failover waits for the new master.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.sentinel import Sentinel

from asyncrl.config.redis_url import hide_password, url_password, url_user
from asyncrl.errors import ConfigError, Unavailable
from asyncrl.net.redis_hosts import parse_hosts
from buffers.stores.private_server import PrivateServer

TRANSIENT = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterError,
    redis.exceptions.RedisClusterException,
)
_FOLDER = Path(__file__).parent


def connect(url: str, *, timeout_s: float) -> Any:
    """A client of the server at the URL, of the master that Sentinels name, or of a cluster. Raises ValueError."""
    limits: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": min(3.0, timeout_s)}
    several = parse_hosts(url)
    if several is None:
        return redis.Redis.from_url(url, **limits)  # bounded: socket_timeout
    tls: dict[str, Any] = {"ssl": True} if several.tls else {}
    user: dict[str, Any] = {"username": url_user(url) or None, "password": url_password(url) or None}
    if several.kind == "cluster":
        nodes = [ClusterNode(*host) for host in several.hosts]  # type: ignore[no-untyped-call]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **limits, **tls, **user)
    sentinels: Any = Sentinel(several.hosts, sentinel_kwargs={**limits, **tls})  # type: ignore[no-untyped-call]
    return sentinels.master_for(several.name, db=several.db, **limits, **tls, **user)


class RedisClient:
    """`server`: a private server, which is started again if it ended. `stop` ends a wait."""

    def __init__(
        self,
        url: str,
        *,
        max_outage_s: float,
        stop: Callable[[], bool] = lambda: False,
        server: PrivateServer | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.where = hide_password(url)
        self._max_outage_s = max_outage_s
        self._stop = stop
        self._server = server
        try:
            # a cluster is asked for its nodes here
            self.redis = self.patiently(lambda: connect(url, timeout_s=timeout_s), limit_s=min(10.0, max_outage_s))
        except ValueError as error:
            raise ConfigError("config.type", f"buffer.redis_url: {error}", where="buffer.redis_url") from None

    def script(self, name: str) -> Callable[..., Any]:
        """The script `NAME.lua` of this folder."""
        found: Callable[..., Any] = self.redis.register_script((_FOLDER / f"{name}.lua").read_bytes())
        return found

    def patiently(self, ask: Callable[[], Any], *, limit_s: float = 0.0) -> Any:
        """Ask until it answers, with backoff, within the outage limit."""
        deadline = time.monotonic() + (limit_s or self._max_outage_s)
        pause, reported = 0.05, False
        while True:
            try:
                return ask()
            except TRANSIENT as error:
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
