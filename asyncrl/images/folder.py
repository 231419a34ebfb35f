"""The images of a run as files: each once, named by its digest, in `FOLDER/<first two letters>/<digest>`.

Guarantees:
1. a file is complete or absent: it is written under a temporary name and renamed;
2. `get` returns bytes of this digest or raises; `put` writes a damaged file again;
3. a digest that is none never becomes a path.
Any number of processes may write and read one folder.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.images.decoding import ImageProblem, check_image
from asyncrl.images.digests import image_digest, is_digest


class ImageFolder:
    """The folder need not exist before the first `put`. `durable`: what `put` stored survives a loss of power."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self._durable = durable

    def _file(self, digest: str) -> Path:
        if not is_digest(digest):
            raise ImageProblem(f"{digest[:80]!r} is no digest")
        return self.path / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether there is a file of this digest; it is not read."""
        return self._file(digest).exists()

    def put(self, data: bytes) -> str:
        """Store an encoded image; its digest. Raises OSError."""
        digest = image_digest(data)
        path = self._file(digest)
        if _read(path) == data:
            return digest
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{digest}.{secrets.token_hex(4)}.tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        return digest

    def get(self, digest: str) -> bytes:
        """The encoded image. Raises ImageProblem if it is missing or has changed."""
        data = _read(self._file(digest))
        if data is None:
            raise ImageProblem(f"{digest[:8]} is missing in {self.path}")
        if image_digest(data) != digest:
            raise ImageProblem(f"{digest[:8]} has changed in {self.path}")
        return data

    def describe(self, digest: str) -> str:
        """An image in words: `image 640x480 1f0c9a2b`, or its problem; without pillow the size is left out."""
        try:
            width, height = check_image(self.get(digest))
        except ImageProblem as problem:
            return problem.reason
        except ConfigError:
            return f"image {digest[:8]}"
        return f"image {width}x{height} {digest[:8]}"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
