"""Weights on their way into an engine that is another program: one memory-mapped file per version.

Or `abort`. Guarantees:
1. nothing touches the engine before it is asked to read the file: an abort leaves it as it was;
2. `room` lends the place of a bucket in the file, so that a transport writes right into it; `apply` answers with the
   digest of what lies in the file; `read` gives the bytes of the version in force, so deltas work for every engine;
3. the file holds bucket after bucket, each at a multiple of 64 bytes (`weightsync.plan.buckets.bucket_starts`),
   tensors inside
   as planned: in the order of the plan, aligned to their item size, gaps between them of any content;
4. room is reserved before it is mapped (a full disk is `disk.full`, not a SIGBUS); files have mode 0600 and the pid in
   their name; `close` removes them, and a later process those of dead ones;
5. two files in turn: the version in force, and the one under way, which goes where the version before lay. After an
   abort its file is given up: who was lent room may still write there.
`Labels` names commits inside an engine: a version number can come again with other weights, a label never does.
Numpy alone, no torch. It does not talk to engines.

Example: versions 3 and 4 lie in files 1 and 2. Version 5 goes to file 1 and is aborted; it comes again into file 3.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.runtime.host_facts import is_alive
from asyncrl.versions import Runs
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.copy_digest import copy_digest, digest_all
from weightsync.mapped_file import map_new
from weightsync.plan.buckets import bucket_starts, group_by_bucket

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "asyncrl-engine-"


class StagedFile:
    def __init__(self, path: Path, mapping: mmap.mmap, size: int) -> None:
        self.path = path
        self.size = size
        self.view = memoryview(mapping)  # the mapping ends with its last view

    def remove(self) -> None:
        """Remove the file; views of it, and readers that opened it, keep their bytes."""
        self.path.unlink(missing_ok=True)


class StagedVersion:
    """One version in a file."""

    def __init__(self, manifest: Manifest, tensors: Sequence[Tensor], file: StagedFile) -> None:
        self.manifest = manifest
        self.tensors = tuple(tensors)
        self.file = file
        self.starts = bucket_starts(manifest.bucket_bytes)[0]
        self.groups = group_by_bucket(tensors, len(manifest.bucket_bytes))
        self.missing = set(range(len(manifest.bucket_bytes)))

    @property
    def path(self) -> Path:
        return self.file.path

    def bucket(self, number: int) -> memoryview:
        """The bytes of one bucket. Raises `sync.plan` where there is no such bucket."""
        sizes = self.manifest.bucket_bytes
        if not 0 <= number < len(sizes):
            raise AsyncRLError("sync.plan", f"no bucket {number} in a version of {len(sizes)}")
        return self.file.view[self.starts[number] : self.starts[number] + sizes[number]]

    def place(self, tensor: Tensor) -> int:
        """Where the tensor begins in the file."""
        return self.starts[tensor.bucket] + tensor.offset


class StagedWeights:
    """The versions of one engine. `scratch` is where files go when shared memory has no room."""

    def __init__(self, scratch: Path, *, folders: Sequence[Path] | None = None) -> None:
        self._folders = tuple(folders) if folders is not None else (SHARED_MEMORY, scratch)
        self._lock = threading.Lock()  # held during a copy: an abort waits for it
        self._update: StagedVersion | None = None
        self._held: StagedVersion | None = None
        self._spare: StagedFile | None = None
        self._files = 0
        self._remove_stale()

    def begin(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Make room for a version. Raises `sync.plan` for what is no whole version, `disk.full` without room."""
        self.abort()
        if manifest.encoding != "full":
            raise AsyncRLError("sync.plan", f"encoding {manifest.encoding!r} is not for this engine")
        size = bucket_starts(manifest.bucket_bytes)[1]
        spare, self._spare = self._spare, None
        if spare is not None and spare.size != size:
            spare.remove()
            spare = None
        self._update = StagedVersion(manifest, tensors, spare or self._make(size))

    def under_way(self) -> StagedVersion:
        """The version that was begun. Raises `sync.failed` where there is none."""
        if self._update is None:
            raise WorkError("sync.failed", "no update is under way")
        return self._update

    @property
    def held(self) -> StagedVersion | None:
        """The version in force."""
        return self._held

    def room(self, number: int) -> memoryview | None:
        """Where the bytes of this bucket of the version under way may be written."""
        return self.under_way().bucket(number)

    def apply(self, number: int, data: Buffer) -> str:
        """Take the bytes of one bucket (from its own room without a copy); the digest of what lies in the file."""
        update = self.under_way()
        room, source = np.frombuffer(update.bucket(number), np.uint8), np.frombuffer(data, np.uint8)
        if source.size != room.size:
            raise AsyncRLError("sync.plan", f"{source.size} bytes for bucket {number}, planned {room.size}")
        same = source.ctypes.data == room.ctypes.data
        parts = [slice(tensor.offset, tensor.offset + tensor.nbytes) for tensor in update.groups[number]]
        with self._lock:
            if self._update is not update:
                raise WorkError("sync.failed", "the update was aborted")
            if same:
                digest = digest_all(room[part] for part in parts)
            else:
                digest = copy_digest((room[part], source[part]) for part in parts)
            update.missing.discard(number)
        return digest

    def read(self, number: int, into: memoryview) -> bool:
        """Write the bytes of one bucket of the version in force; False where there is none of that size."""
        held = self._held
        if held is None or not 0 <= number < len(held.starts) or into.nbytes != held.manifest.bucket_bytes[number]:
            return False
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(held.bucket(number), np.uint8)
        return True

    def complete(self) -> StagedVersion:
        """The version under way. Raises `sync.failed` where a bucket has not come."""
        update = self.under_way()
        if update.missing:
            raise WorkError("sync.failed", f"commit without buckets {sorted(update.missing)[:8]}")
        return update

    def committed(self) -> None:
        """The engine holds the version under way now."""
        update = self.complete()
        with self._lock:
            self._spare = self._held.file if self._held is not None else None
            self._held, self._update = update, None

    def abort(self) -> None:
        """Forget the version under way; a copy of it ends first, a later one is refused."""
        with self._lock:
            update, self._update = self._update, None
        if update is not None:
            update.file.remove()

    def close(self) -> None:
        self.abort()
        for file in (self._held.file if self._held is not None else None, self._spare):
            if file is not None:
                file.remove()
        self._held = self._spare = None

    # ------------------------------------------------------------ files

    def _make(self, size: int) -> StagedFile:
        self._files += 1
        name = f"{PREFIX}{os.getuid()}-{os.getpid()}-{id(self):x}-{self._files}"
        path, mapping = map_new(size, [folder / name for folder in self._folders], where="staged weights")
        return StagedFile(path, mapping, size)

    def _remove_stale(self) -> None:
        """Remove the files of this user's processes that were killed."""
        stem = f"{PREFIX}{os.getuid()}-"
        for folder in self._folders:
            for path in folder.glob(f"{stem}*"):
                pid = path.name.removeprefix(stem).partition("-")[0]
                if pid.isdigit() and not is_alive(int(pid)):
                    path.unlink(missing_ok=True)


class Labels:
    """What an engine calls the versions that were committed to it: `"{version}.{count}"`, each once; `tag` is added
    where an engine may have heard labels of somebody else."""

    def __init__(self, tag: str = "") -> None:
        self._tag = tag
        self._versions: dict[str, int] = {}
        self.current = ""  # empty before the first commit

    def new(self, version: int) -> str:
        """A label that was never used, for the next commit; in force once it is `current`."""
        label = f"{version}.{len(self._versions) + 1}{self._tag}"
        self._versions[label] = version
        return label

    def runs(self, spans: Iterable[tuple[str, int, int]], tokens: int, *, where: str = "") -> Runs:
        """Version runs over `tokens` from an engine's (label, start, end), each token of just one span.

        Raises:
            WorkError: `engine.broken` where they leave a gap, overlap or name a label that was never given.
        """
        runs: list[tuple[int, int]] = []
        at = 0
        for label, start, end in spans:
            if start != at or end < start or label not in self._versions:
                what = f"the engine says that tokens {start} to {end} are of {label!r}, after {at} of {tokens} tokens"
                raise WorkError("engine.broken", what, where=where)
            version = self._versions[label]
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + end - start)
            elif end > start:
                runs.append((version, end - start))
            at = end
        if at != tokens:
            raise WorkError("engine.broken", f"the engine names the weights of {at} of {tokens} tokens", where=where)
        return tuple(runs)
