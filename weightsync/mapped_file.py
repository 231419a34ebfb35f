"""Creates a file of a given size, maps it and touches its pages, in the first folder with enough room.

Guarantees:
1. the file is new and private to this user, and its space is reserved: no later write fails for lack of room;
2. a failed attempt leaves nothing behind.

Example: `map_new(1 << 30, [Path("/dev/shm/a-1"), Path("/tmp/a-2")], where="staging")` is the path in /dev/shm and its
mapping of 1 GiB; with less than that free there, the path in /tmp.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import Unavailable

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux


def map_new(size: int, paths: Iterable[Path], *, where: str) -> tuple[Path, mmap.mmap]:
    """Create the first of these files that can be created, of `size` bytes; the file and its mapping.

    Raises:
        Unavailable: `disk.full` if none can, with the last reason.
    """
    problem = "no folder"
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            problem = f"{path.parent}: {error.strerror}"
            continue
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapping = mmap.mmap(descriptor, size)
            with suppress(OSError):  # an older kernel: the first copy takes a fault per page, several times as long
                mapping.madvise(POPULATE_WRITE)
            return path, mapping
        except OSError as error:
            problem = f"{path.parent}: {error.strerror}"
            path.unlink()
        finally:
            os.close(descriptor)
    raise Unavailable("disk.full", f"no room for {size} bytes of weights ({problem})", where=where)
