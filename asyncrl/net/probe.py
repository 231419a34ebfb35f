"""Checks addresses and Redis servers with plain sockets, without importing redis.

Guarantees: every check ends within `CONNECT_TIMEOUT_S` per step and closes its sockets; no answer holds a password.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlparse

from asyncrl.net.redis_hosts import RedisHosts, parse_hosts

CONNECT_TIMEOUT_S = 3.0


def bind_problem(address: str) -> tuple[str, str] | None:
    """Code and message if the process cannot listen on a `tcp://host:port`."""
    parsed = urlparse(address)
    try:
        port = parsed.port
    except ValueError:
        port = None
    if port is None or not parsed.hostname:
        return "config.network", "it is not tcp://host:port"
    host = "0.0.0.0" if parsed.hostname == "*" else parsed.hostname
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            return "config.network", f"unknown host: {error.strerror}"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "net.port_in_use", "another process listens there"
            return "config.network", f"cannot listen there: {error.strerror}"
    return None


def find_free(addresses: Sequence[str]) -> tuple[str, str]:
    """The first address at which this process can listen (else empty), and why not at those before it."""
    reasons: list[str] = []
    for address in addresses:
        problem = bind_problem(address)
        if problem is None:
            return address, "; ".join(reasons)
        reasons.append(f"{address}: {problem[1]}")
    return "", "; ".join(reasons)


def redis_problem(url: str) -> str:
    """Why Redis at `url` cannot be used; empty if it answers PING. The text holds no password."""
    parsed = urlparse(url)
    if "+" in parsed.scheme:
        return _hosts_problem(url)
    if parsed.scheme not in ("redis", "rediss", "unix"):
        return f"scheme {parsed.scheme!r} is not redis, rediss, unix, redis+sentinel or redis+cluster"
    shown = parsed.path if parsed.scheme == "unix" else f"{parsed.hostname or 'localhost'}:{parsed.port or 6379}"
    try:
        with _redis_socket(parsed) as connection:
            if parsed.password:
                words = [unquote(word) for word in (parsed.username, parsed.password) if word]
                answer = _ask(connection, "AUTH", *words)
                if not answer.startswith(b"+"):
                    return f"Redis at {shown} refused the password: {answer.decode(errors='replace')}"
            answer = _ask(connection, "PING")
    except (OSError, ValueError) as error:
        return f"no Redis at {shown}: {error}"
    return "" if answer.startswith(b"+PONG") else f"Redis at {shown} answered {answer.decode(errors='replace')!r}"


def _hosts_problem(url: str) -> str:
    """Why none of several servers can be used; empty if a Sentinel names a master, or a node answers."""
    try:
        several = parse_hosts(url)
    except ValueError as error:
        return str(error)
    assert several is not None
    parsed, problems = urlparse(url), []
    for host, port in several.hosts:
        place = f"{host}:{port}"
        if several.kind == "cluster":
            user = f"{parsed.netloc.rpartition('@')[0]}@" if "@" in parsed.netloc else ""
            problems.append(redis_problem(f"{parsed.scheme.partition('+')[0]}://{user}{place}"))
        else:
            problems.append(_sentinel_problem(place, several))
        if not problems[-1]:
            return ""
    return "; ".join(problems)


def _sentinel_problem(place: str, several: RedisHosts) -> str:
    try:
        with _redis_socket(urlparse(f"{'rediss' if several.tls else 'redis'}://{place}")) as connection:
            answer = _ask(connection, "SENTINEL", "get-master-addr-by-name", several.name)
    except OSError as error:
        return f"no Sentinel at {place}: {error}"
    return "" if answer.startswith(b"*2") else f"the Sentinel at {place} knows no master {several.name!r}"


def _redis_socket(parsed: Any) -> socket.socket:
    if parsed.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(parsed.path)
        except OSError:
            connection.close()
            raise
        return connection
    host = parsed.hostname or "localhost"
    connection = socket.create_connection((host, parsed.port or 6379), timeout=CONNECT_TIMEOUT_S)
    if parsed.scheme == "rediss":
        import ssl

        return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    return connection


def _ask(connection: socket.socket, *words: str) -> bytes:
    """Send one command in the protocol of Redis; return the first line of the answer."""
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        data = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    connection.sendall(b"".join(parts))
    answer = b""
    while b"\r\n" not in answer and (piece := connection.recv(4096)):  # bounded: CONNECT_TIMEOUT_S
        answer += piece
    return answer.split(b"\r\n")[0]
