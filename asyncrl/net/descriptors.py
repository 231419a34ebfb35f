"""Descriptors of this process: how many it may open, how many of them connections may take, and how one is cut."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress

SILENT_S = 5.0  # a connection that has said nothing for so long is cut
MOST_CONNECTIONS = 4096  # of one listening socket


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open descriptors to the largest that the system allows; the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS has a limit below the one that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def connection_limit() -> int:
    """Connections that one listening socket of this process keeps."""
    return min(MOST_CONNECTIONS, raise_descriptor_limit() // 4)


def cut(descriptor: int, inode: int) -> None:
    """End a connection whose descriptor belongs to libzmq, if it is still the same one."""
    with suppress(OSError):
        if os.fstat(descriptor).st_ino != inode:
            return
        borrowed = socket.socket(fileno=descriptor)
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()
