"""URLs that name several Redis servers: Sentinels, which name the master, or nodes of a cluster."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit


class RedisHosts(NamedTuple):
    """`redis+sentinel://[user:password@]host:port,host:port/NAME[/DB]` or `redis+cluster://...host:port,host:port`.

    >>> parse_hosts("redis+sentinel://a:26379,b:26379/main")
    RedisHosts(kind='sentinel', hosts=(('a', 26379), ('b', 26379)), name='main', db=0, tls=False)
    """

    kind: str  # sentinel or cluster
    hosts: tuple[tuple[str, int], ...]
    name: str  # of the master, at Sentinels
    db: int
    tls: bool


def parse_hosts(url: str) -> RedisHosts | None:
    """The parts of a URL of several servers; None for one of a single server. Raises ValueError."""
    parts = urlsplit(url)
    scheme, plus, kind = parts.scheme.partition("+")
    if not plus:
        return None
    name, _, db = parts.path.strip("/").partition("/")
    if scheme not in ("redis", "rediss") or kind not in ("sentinel", "cluster") or bool(name) != (kind == "sentinel"):
        raise ValueError(
            "several servers are given as redis+sentinel://host:port,host:port/NAME or "
            "redis+cluster://host:port,host:port"
        )
    words = [word.rpartition(":") for word in parts.netloc.rpartition("@")[2].split(",")]
    return RedisHosts(kind, tuple((host, int(port)) for host, _, port in words), name, int(db or 0), scheme == "rediss")
