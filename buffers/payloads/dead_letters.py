"""Dead letters: messages that were refused as poison, one file each, for `asyncrl trace`.

A file `g<group>-t<token>.frames` holds the length of the header frame (8 bytes, little endian), the header and the
payload, byte for byte. Guarantees:
1. at most `KEEP` files of at most `LIMIT_BYTES` each: poison cannot fill the disk; the oldest are removed;
2. a failure to write one never ends the service: the group is dead either way, its reason is in the store and the log.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from asyncrl.wire import Buffer

KEEP = 256
LIMIT_BYTES = 16 << 20


class DeadLetters:
    """The folder of dead letters; created at the first one."""

    def __init__(self, folder: Path, *, keep: int = KEEP) -> None:
        self._folder = folder
        self._keep = keep
        self._files: deque[Path] | None = None  # oldest first
        self.failed = 0

    def put(self, *, group: int, token: int, header: Buffer, payload: Buffer) -> None:
        """Keep one message. A second one of the same lease replaces the first."""
        head, body = memoryview(header).cast("B"), memoryview(payload).cast("B")
        try:
            files = self._list_files()
            path = self._folder / f"g{group}-t{token}.frames"
            with path.open("wb") as file:
                file.write(head.nbytes.to_bytes(8, "little"))
                file.write(head[:LIMIT_BYTES])
                file.write(body[: max(0, LIMIT_BYTES - head.nbytes)])
            if path not in files:
                files.append(path)
            while len(files) > self._keep:
                files.popleft().unlink(missing_ok=True)
        except OSError as error:
            self.failed += 1
            if self.failed == 1:
                print(f"buffer: warning: a dead letter was not kept: {error}", flush=True)

    def _list_files(self) -> deque[Path]:
        if self._files is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            found = sorted(self._folder.glob("g*-t*.frames"), key=lambda path: (path.stat().st_mtime, path.name))
            self._files = deque(found)
        return self._files


def read_letter(path: Path) -> tuple[bytes, bytes]:
    """The header and the payload of a dead letter; what is missing is empty."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]
