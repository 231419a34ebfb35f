"""Locks on open files (`flock`). The system ends a lock with its process, however that dies."""

from __future__ import annotations

import fcntl


def try_lock(descriptor: int, *, shared: bool) -> bool:
    """Lock an open file, or change this process's lock of it; False if another process holds a lock that excludes it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """End this process's lock, also if a child has inherited the file."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
