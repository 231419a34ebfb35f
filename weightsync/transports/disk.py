"""Transport `disk`: a folder per version with safetensors files, on a shared disk or in an object store.

`DiskOutbox` runs at the publisher, `DiskInbox` at each member. `v00000007-1f2e3d4c5b6a` holds

    model-00001-of-00003.safetensors   one per bucket; adapter_model-... for an adapter (with one bucket no number)
    model.safetensors.index.json       the file of each tensor, if there are several
    hop-00000.bin ...                  the encoded buckets of a hop one after the other, oldest hop first
    manifest.json                      manifest, tensors, hops and the size of every file; written last

Guarantees:
1. a visible version is whole: it is written under a hidden name, flushed to the disk and renamed; in an object store
   the manifest is written last and nothing is read without one;
2. the last `KEPT` versions are kept, so that readers of the one before can finish; older ones and the remains of a
   killed publisher are removed;
3. readers check digest and sizes before they take a byte, and read into their own memory: a file that disappears is an
   error, never a SIGBUS;
4. tensors have their names in Hugging Face format: safetensors loads the files, transformers the folder next to a
   config.json.
A file system that hangs cannot be interrupted: the receiver's deadline ends the round, not the call.

Example: bucket 0 of version 7 with tensor "w" BF16 [2, 3]: `safetensors.numpy.load_file(folder / "model.safetensors")`.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError, HandshakeError, Unavailable
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import ALIGNMENT, Hop, Instruction, Manifest, RoundReply, Tensor
from weightsync.plan.buckets import check_layout, group_by_bucket
from weightsync.transports.base import TransportError, TransportUnusable, Version, blob_sizes
from weightsync.transports.object_store import File, Folders, open_folders

KEPT = 2
MANIFEST = "manifest.json"
#: Names of this layout; other files in the folder are not touched.
PATTERN = r"v\d{8,}-[0-9a-f]{12}"


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    manifest: Manifest
    tensors: tuple[Tensor, ...]
    hops: tuple[Hop, ...]
    files: dict[str, int]  # size by name


def folder_name(manifest: Manifest) -> str:
    return f"v{manifest.version:08d}-{manifest.digest[:12]}"


def file_names(manifest: Manifest) -> list[str]:
    stem = "adapter_model" if manifest.encoding == "adapter" else "model"
    count = len(manifest.bucket_bytes)
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def file_header(tensors: Sequence[Tensor], manifest: Manifest) -> bytes:
    """The head of a bucket's file. The file has no padding between tensors, unlike the bucket."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "version": str(manifest.version)}}
    end = 0
    for tensor in tensors:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (end, end + tensor.nbytes),
        }
        end += tensor.nbytes
    text = msgspec.json.encode(table)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _packed_size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _index(manifest: Manifest, tensors: Sequence[Tensor]) -> bytes:
    names = file_names(manifest)
    table = {
        "metadata": {"total_size": _packed_size(tensors)},
        "weight_map": {tensor.name: names[tensor.bucket] for tensor in tensors},
    }
    return msgspec.json.format(msgspec.json.encode(table))


class DiskOutbox:
    """Writes versions below `root`, a folder or a URL."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folders: Folders | None = None
        self._kept: list[str] = []  # oldest first

    def open(self) -> str:
        """Make the folder, remove the remains of a killed publisher. Raises `config.network` if it cannot be
        written."""
        if self._folders is None:
            folders = open_folders(self._root)
            try:
                folders.make_ready()
                self._kept = folders.names(PATTERN)
            except OSError as error:
                raise ConfigError(
                    "config.network", f"cannot write to {self._root}: {error}", where="weightsync.disk_dir"
                ) from None
            self._folders = folders
        return self._folders.root

    def offer(self, version: Version) -> str:
        """Write the version. Raises `disk.full` without room, TransportError on other failures."""
        self.open()
        assert self._folders is not None
        name = folder_name(version.manifest)
        if name not in self._kept or not self._is_written(name, version):
            try:
                self._remove(name)
                self._write(name, version)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise Unavailable("disk.full", f"{self._root}: {error}", where="weightsync.disk_dir") from None
                raise TransportError(f"disk: {self._root}: {error}") from None
        self._kept = [*(one for one in self._kept if one != name), name]
        for old in self._kept[:-KEPT]:
            with suppress(OSError):  # it is removed with the next version
                self._remove(old)
        return self._folders.path(name)

    def _is_written(self, name: str, version: Version) -> bool:
        """Whether this version is there, with these hops."""
        assert self._folders is not None
        try:
            contents = read_contents(self._folders, name)
        except TransportError:
            return False
        return (contents.manifest, contents.hops) == (version.manifest, version.hops)

    def _remove(self, name: str) -> None:
        assert self._folders is not None
        if name in self._kept:
            self._folders.remove(name)
            self._kept.remove(name)

    def _write(self, name: str, version: Version) -> None:
        assert self._folders is not None
        manifest, buckets = version.manifest, len(version.manifest.bucket_bytes)
        groups = group_by_bucket(version.tensors, buckets)
        with version.blobs(()) as blobs, version.blobs(version.hops) as steps:
            if blobs is None or (version.hops and steps is None):
                raise TransportError(f"version {manifest.version} was superseded before it was written")
            files: list[File] = []
            for file, group, blob in zip(file_names(manifest), groups, blobs, strict=True):
                parts = [blob[one.offset : one.offset + one.nbytes] for one in group if one.nbytes]
                files.append((file, [file_header(group, manifest), *parts]))
            for number in range(len(version.hops)):
                assert steps is not None
                files.append((f"hop-{number:05d}.bin", list(steps[number * buckets : (number + 1) * buckets])))
            if buckets > 1:
                stem = file_names(manifest)[0].partition("-")[0]
                files.append((f"{stem}.safetensors.index.json", [_index(manifest, version.tensors)]))
            if manifest.adapter:
                files.append(("adapter_config.json", [manifest.adapter.encode()]))
            sizes = {file: sum(memoryview(part).nbytes for part in parts) for file, parts in files}
            contents = Contents(manifest, version.tensors, version.hops, sizes)
            files.append((MANIFEST, [msgspec.json.format(msgspec.json.encode(contents))]))
            self._folders.write(
                name,
                files,
                each=lambda: failpoint("weightsync.write_blob"),
                last=lambda: failpoint("weightsync.before_rename"),
            )

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None: ...

    def close(self) -> None:
        """Keep the versions: they are results of this run."""


def read_contents(folders: Folders, name: str) -> Contents:
    """The manifest of a version's folder. Raises TransportError if it is missing or cannot be read."""
    try:
        return msgspec.json.decode(folders.read(name, MANIFEST), type=Contents)
    except OSError as error:
        raise TransportError(f"disk: {folders.path(name)} is not there: {error}") from None
    except UNREADABLE as error:
        raise TransportError(f"disk: the manifest in {folders.path(name)} is damaged: {error}") from None


class DiskInbox:
    def __init__(self, instruction: Instruction) -> None:
        assert instruction.manifest is not None
        root, _, self._name = instruction.address.rstrip("/").rpartition("/")
        self._root = root
        self._manifest = instruction.manifest
        self._hops = instruction.hops
        self._sizes = blob_sizes(instruction.manifest, instruction.hops)
        self._tensors: list[list[Tensor]] = []
        self._first = 0  # the folder may have earlier hops
        self._folders: Folders | None = None

    def open(self) -> None:
        """Read the manifest and compare it with the instruction. Raises TransportUnusable if the folder is not visible
        here, TransportError on any other failure."""
        try:
            self._open()
        except OSError as error:
            raise TransportError(f"disk: {self._root}: {error}") from None

    def _open(self) -> None:
        folders = open_folders(self._root)
        if not folders.visible():
            raise TransportUnusable(f"disk: {self._root} is not visible here")
        contents = read_contents(folders, self._name)
        if contents.manifest != self._manifest or contents.hops[len(contents.hops) - len(self._hops) :] != self._hops:
            raise TransportError(f"disk: {self._name} holds another version than announced")
        for file, size in contents.files.items():
            found = folders.size(self._name, file)
            if found != size:
                raise TransportError(f"disk: {file} of {self._name} has {found} bytes, not {size}")
        try:
            check_layout(contents.manifest, contents.tensors)
        except HandshakeError as error:
            raise TransportError(f"disk: {self._name}: {error.message}") from None
        self._first = len(contents.hops) - len(self._hops)
        self._tensors = group_by_bucket(contents.tensors, len(self._manifest.bucket_bytes))
        self._folders = folders

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        if self._folders is None:
            raise TransportError("disk: it is closed")
        data = into if into is not None else memoryview(bytearray(self._sizes[number]))
        try:
            if self._hops:
                hop, bucket = divmod(number, len(self._manifest.bucket_bytes))
                start = sum(self._hops[hop].nbytes[:bucket])
                self._folders.read_into(self._name, f"hop-{self._first + hop:05d}.bin", start, [data])
            else:
                group = self._tensors[number]
                parts = [data[one.offset : one.offset + one.nbytes] for one in group if one.nbytes]
                file = file_names(self._manifest)[number]
                self._folders.read_into(self._name, file, len(file_header(group, self._manifest)), parts)
        except OSError as error:
            raise TransportError(f"disk: blob {number} of {self._name}: {error}") from None
        return data

    def close(self) -> None:
        self._folders = None
