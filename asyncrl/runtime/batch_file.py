"""A recorded batch as one file: the bytes that the learner claimed, and under which settings it trained on them.

Written by `learners.batch.archive`, read by it, by `learners.replay` and by `asyncrl trace`. A file `step-%08d.batch`
is

    [magic 8s, format u32, frames u32][size u64 of every frame][meta: JSON][wire.Batch: msgpack][payload]...[check u64]

little-endian; the check is xxh3_64 of everything before it. Guarantees:
1. a file is whole or not there (temporary name, fsync, rename); reading one that is damaged raises `WireError`;
2. the batch is as it was claimed, in wire form: also groups that were quarantined afterwards are in it;
3. no pickle, no torch.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from asyncrl import wire
from asyncrl.errors import UNREADABLE, WireError
from asyncrl.wire import Buffer

MAGIC = b"ARLBATCH"
FORMAT = 1
NOTES = "quarantined.jsonl"  # groups of archived batches that were not trained: step, group, reason
_HEAD = struct.Struct("<8sII")
_CHECK_BYTES = 8
LARGEST_META = 1 << 16
_NAME = re.compile(r"step-(\d{8,})\.batch")


class Meta(msgspec.Struct, frozen=True):
    """Facts about a batch. `config` names the file `config-<it>.toml` in the same folder."""

    config: str = ""
    epoch: int = 0  # of the learner
    t: float = 0.0  # wall time
    history: str = ""  # head of the history's chain (asyncrl.runtime.history_chain) at the commit before this step


class BatchFile(NamedTuple):
    """The content of a file; payloads are views into its bytes, one per record, in the order of the groups."""

    meta: Meta
    batch: wire.Batch
    payloads: tuple[Buffer, ...]


class Note(msgspec.Struct, frozen=True):
    """A group that was removed from the step of an archived batch."""

    step: int
    group: int
    reason: str


def batch_path(folder: Path, step: int) -> Path:
    """Path of the batch of a step."""
    return folder / f"step-{step:08d}.batch"


def config_path(folder: Path, name: str) -> Path:
    """Path of the resolved configuration that trained a batch."""
    return folder / f"config-{name}.toml"


def steps_in(folder: Path) -> list[int]:
    """Archived steps in order; their files may be damaged."""
    found = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def write(path: Path, batch: wire.Batch, payloads: Sequence[Buffer], *, meta: Meta) -> int:
    """Write or replace the file; return its size. Raises OSError and leaves nothing behind on failure."""
    frames: list[Buffer] = [msgspec.json.encode(meta), wire.encode_header(batch), *payloads]
    sizes = [memoryview(frame).nbytes for frame in frames]
    frames = [_HEAD.pack(MAGIC, FORMAT, len(frames)) + struct.pack(f"<{len(sizes)}Q", *sizes), *frames]
    check = xxhash.xxh3_64()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for frame in frames:
                check.update(frame)
                file.write(frame)
            file.write(check.intdigest().to_bytes(_CHECK_BYTES, "little"))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return size


def read(path: Path) -> BatchFile:
    """Read a file. Raises `WireError` if it is damaged, OSError if it is missing."""
    data = memoryview(path.read_bytes())
    head = data[: _HEAD.size]
    if head.nbytes < _HEAD.size or bytes(head[:8]) != MAGIC:
        raise WireError("wire.prefix", "not a recorded batch", where=str(path))
    _, number, count = _HEAD.unpack(head)
    if number != FORMAT:
        raise WireError("wire.schema", f"format {number}, this process reads {FORMAT}", where=str(path))
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if xxhash.xxh3_64_intdigest(body) != int.from_bytes(check, "little"):
        raise WireError("wire.checksum", "the file is damaged", where=str(path))
    start = _HEAD.size + 8 * count
    sizes = struct.unpack(f"<{count}Q", body[_HEAD.size : start]) if start <= body.nbytes else ()
    if count < 2 or start + sum(sizes) != body.nbytes:
        raise WireError("wire.size", "its frames do not fill it", where=str(path))
    frames = []
    for size in sizes:
        frames.append(body[start : start + size])
        start += size
    try:
        meta = msgspec.json.decode(frames[0], type=Meta)
    except UNREADABLE as error:
        raise WireError("wire.decode", f"meta: {error}", where=str(path)) from None
    batch = wire.decode_header(frames[1])
    if not isinstance(batch, wire.Batch) or sum(len(head.records) for head in batch.groups) != count - 2:
        raise WireError("wire.decode", "it is no batch with its payloads", where=str(path))
    return BatchFile(meta, batch, tuple(frames[2:]))


def read_meta(path: Path) -> Meta:
    """The facts alone, without reading and checking the rest. Raises like `read`."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size + 8)
        magic, number, count = _HEAD.unpack(head[: _HEAD.size]) if len(head) == _HEAD.size + 8 else (b"", 0, 0)
        size = int.from_bytes(head[_HEAD.size :], "little")
        if magic != MAGIC or number != FORMAT or size > LARGEST_META:
            raise WireError("wire.prefix", "not a recorded batch of this format", where=str(path))
        file.seek(_HEAD.size + 8 * count)
        text = file.read(size)
    try:
        return msgspec.json.decode(text, type=Meta)
    except UNREADABLE as error:
        raise WireError("wire.decode", f"meta: {error}", where=str(path)) from None


def read_quarantine(folder: Path) -> dict[int, dict[int, str]]:
    """step -> group -> reason, of removed groups. Incomplete lines are skipped."""
    found: dict[int, dict[int, str]] = {}
    path = folder / NOTES
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            note = msgspec.json.decode(line, type=Note)
        except UNREADABLE:
            continue
        found.setdefault(note.step, {})[note.group] = note.reason
    return found
