"""How payload records lie in files: the form that the service, producers and learners of one host share.

A record is `[magic 4s, file u32, header bytes u32, payload bytes u64, xxh3_64 u64][header][payload]`, the
checksum covering header and payload. Files below the number `GUEST` are written by the service; of the others the upper
bits stand for one life of one producer, and `file` in a record is the lower 32.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import xxhash

from asyncrl.wire import Buffer

MAGIC = b"ASEG"
HEAD = struct.Struct("<4sIIQQ")
GUEST = 1 << 32
GUEST_BYTES = 32 << 20  # size of one file of a producer, where segment_bytes is not smaller
AHEAD_BYTES = 8 << 20  # allocated ahead of the writing
SPARE_BYTES = 128 << 20  # of free files kept to be written over
NONCE = "nonce"


def checksum_of(header: Buffer, payload: Buffer) -> int:
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return digest.intdigest()


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:08d}.seg"


def same_folder(folder: str, nonce: str) -> Path | None:
    """The folder that the service names, where it is the one seen here: its file `nonce` holds what it said."""
    path = Path(folder or "/nonexistent")
    try:
        return path if nonce and (path / NONCE).read_text() == nonce else None
    except (OSError, UnicodeDecodeError):
        return None


def reserve(file: int, *, written: int, needed: int, allocated: int, limit: int) -> int:
    """Allocate up to `needed` and some more; how much now is. A file system that cannot is none the worse."""
    if needed <= allocated:
        return allocated
    wanted = max(needed, min(limit, needed + AHEAD_BYTES))
    try:
        os.posix_fallocate(file, written, wanted - written)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return wanted
