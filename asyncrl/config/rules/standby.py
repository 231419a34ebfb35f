"""Rules of `network.standby`: what a second buffer on another host must be able to reach and to read.

Example: `buffer.store = "sqlite"` with `network.standby = "tcp://10.0.0.2:5555"`: the file of the index belongs to one
host.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlparse

from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.tree import Config

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def problems(config: Config) -> Iterator[Conflict]:
    network, buffer = config.network, config.buffer
    if not network.standby:
        return
    for key in ("standby", "buffer"):
        if urlparse(getattr(network, key)).scheme != "tcp":
            what = f"network.{key} = {getattr(network, key)!r}: with a stand-by it is tcp://host:port"
            yield conflict(f"network.{key}", what, code="config.network")
    if network.standby == network.buffer:
        yield conflict("network.standby", "network.standby is the same as network.buffer: it names another host")
    if buffer.fsync != "always":
        what = (
            f"buffer.fsync = {buffer.fsync!r}: what a host has not written out when it dies, its stand-by cannot read"
        )
        yield conflict("buffer.fsync", f'{what}; set it to "always"')
    yield from _store_problems(config)


def _store_problems(config: Config) -> Iterator[Conflict]:
    buffer, url = config.buffer, urlparse(config.buffer.redis_url)
    wanted = 'set buffer.store = "redis" and buffer.redis_url to a Redis on a third host'
    if buffer.store == "sqlite":
        yield conflict(
            "buffer.store", f"buffer.store = 'sqlite' belongs to one host, and network.standby is set: {wanted}"
        )
    elif not buffer.redis_url:
        what = "the private Redis dies with the buffer that starts it, and network.standby is set"
        yield conflict("buffer.redis_url", f"{what}: {wanted}")
    elif url.scheme == "unix" or (url.hostname in LOOPBACK and not is_local(config)):
        yield conflict("buffer.redis_url", f"the stand-by on another host cannot reach this Redis: {wanted}")


def is_local(config: Config) -> bool:
    """Whether both buffers are on this host, as in a trial."""
    return urlparse(config.network.standby).hostname in LOOPBACK
