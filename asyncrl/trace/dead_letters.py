"""Dead letters of a run: the readable part of each, and its defect."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.config import Config
from asyncrl.errors import WireError
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import decode_samples, unpack_arrays, validate_samples


class Letter(msgspec.Struct):
    """A dead letter: its readable part, and its defect."""

    path: str
    size: int
    wrong: str
    producer: str = ""
    indexes: tuple[int, ...] = ()
    head: str = ""  # first bytes, if nothing can be decoded


def load_letters(run: RunDir, config: Config, *, group: int | None = None) -> list[Letter]:
    """The recorded dead letters (of one group), oldest first."""
    if not run.dead.exists():
        return []
    found = run.dead.glob(f"g{'*' if group is None else group}-t*.frames")
    paths = sorted(found, key=lambda path: (path.stat().st_mtime, path.name))
    return [_letter(path, config) for path in paths]


def _letter(path: Path, config: Config) -> Letter:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, payload = data[8 : 8 + size], data[8 + size :]
    try:
        message = decode_samples(header)
    except WireError as error:
        return Letter(str(path), len(data), error.message, head=header[:32].hex(" "))
    indexes = tuple(item.index for item in message.samples)
    try:
        wrong = validate_samples(message, payload, group_size=config.sampling.asked_samples)
        unpack_arrays(message.fields, payload)
    except WireError as error:
        wrong = error.message
    return Letter(str(path), len(data), wrong or "the message itself is whole", message.producer, indexes)
