"""Weights for an engine in another process: a mapped file per version, or the slot of a publisher on this host.

Guarantees:
1. the engine is not touched before it is asked to read the file: an abort leaves it unchanged;
2. `room` lends the memory of a bucket in the file, so that a transport writes directly into it; `apply` returns the
   digest of the file's bytes; `read` gives the bytes of the current version, so deltas work for every engine;
3. the file holds bucket after bucket, each at a multiple of 64 bytes (`weightsync.plan.buckets.bucket_starts`), tensors
   inside in the order of the plan, aligned to their item size, gaps between them of any content;
4. room is reserved before it is mapped (a full disk is `disk.full`, not a SIGBUS); files have mode 0600 and the pid in
   their name; `close` removes them, and a later process those of dead ones;
5. a slot (`begin_mapped`) is linked under a name of this process and locked until the commit or the abort, so that its
   publisher neither overwrites nor removes its bytes. Later the publisher uses it again: then `read` has no bytes;
6. without slots two files in turn: the current version, and the pending one in the place of the version before. After
   an abort its file is not used again, because a transport may still write to it.
`Labels` names commits inside an engine: a version number can come again with other weights, a label never does. Numpy
only, no torch.

Example: versions 3 and 4 are in files 1 and 2. Version 5 goes to file 1 and is aborted; it comes again into file 3.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.file_locks import try_lock, unlock
from asyncrl.runtime.host_facts import is_alive
from asyncrl.runtime.shared_memory import PREFIX as SLOT_PREFIX
from asyncrl.versions import Runs
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.copy_digest import copy_digest, digest_all
from weightsync.mapped_file import map_new
from weightsync.plan.buckets import bucket_starts, group_by_bucket
from weightsync.plan.digest import bucket_digest
from weightsync.plan.sum_digest import SUM

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "asyncrl-engine-"


class StagedFile:
    def __init__(self, path: Path, mapping: mmap.mmap, size: int) -> None:
        self.path = path
        self.size = size
        self.view = memoryview(mapping)  # the mapping ends with its last view

    def remove(self) -> None:
        """Remove the file; views and open readers keep their bytes."""
        self.path.unlink(missing_ok=True)


class MappedSlot(StagedFile):
    """A slot of a publisher, locked. `path` is a link to it."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises OSError if it is no file of that size of this user, and WorkError while the publisher writes to it."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            found = os.fstat(self._descriptor)
            if found.st_size < size or found.st_uid != os.getuid():
                raise OSError(f"{path} is not a slot of {size} bytes")
            if not try_lock(self._descriptor, shared=True):
                raise WorkError("sync.failed", "the publisher is overwriting the slot")
            super().__init__(path, mmap.mmap(self._descriptor, size, access=mmap.ACCESS_COPY), size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def unlock(self) -> None:
        """Let the publisher use it again."""
        unlock(self._descriptor)

    def remove(self) -> None:
        super().remove()
        unlock(self._descriptor)
        os.close(self._descriptor)


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
        """The bytes of one bucket. Raises `sync.plan` for another number."""
        sizes = self.manifest.bucket_bytes
        if not 0 <= number < len(sizes):
            raise AsyncRLError("sync.plan", f"no bucket {number} in a version of {len(sizes)}")
        return self.file.view[self.starts[number] : self.starts[number] + sizes[number]]

    def has_digest(self, number: int, data: Buffer) -> bool:
        """Whether these are the bytes of a bucket."""
        wanted = self.manifest.bucket_digests[number]
        return bucket_digest(self.groups[number], data, like=wanted) == wanted

    def place(self, tensor: Tensor) -> int:
        """Offset of the tensor in the file."""
        return self.starts[tensor.bucket] + tensor.offset


class StagedWeights:
    """The versions of one engine. `scratch` takes the files if shared memory has no room."""

    def __init__(self, scratch: Path, *, folders: Sequence[Path] | None = None) -> None:
        self._folders = tuple(folders) if folders is not None else (SHARED_MEMORY, scratch)
        self._lock = threading.Lock()  # held during a copy: an abort waits for it
        self._update: StagedVersion | None = None
        self._current: StagedVersion | None = None
        self._spare: StagedFile | None = None
        self._files = 0
        self._remove_stale()

    def begin(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Make room for a version. Raises `sync.plan` for another encoding, `disk.full` without room."""
        self.abort()
        if manifest.encoding != "full":
            raise AsyncRLError("sync.plan", f"encoding {manifest.encoding!r} is not for this engine")
        size = bucket_starts(manifest.bucket_bytes)[1]
        spare, self._spare = self._spare, None
        if spare is not None and spare.size != size:
            spare.remove()
            spare = None
        self._update = StagedVersion(manifest, tensors, spare or self._make(size))

    def begin_mapped(self, path: Path, manifest: Manifest, tensors: Sequence[Tensor]) -> bool:
        """As `begin`, with the bytes of this slot; False if it cannot be linked or locked. Raises `sync.failed` while
        its publisher writes to it."""
        self.abort()
        if manifest.encoding != "full" or path.parent not in self._folders or not path.name.startswith(SLOT_PREFIX):
            return False
        link = path.with_name(self._name())
        try:
            os.link(path, link, follow_symlinks=False)
        except OSError:
            return False
        try:
            slot = MappedSlot(link, bucket_starts(manifest.bucket_bytes)[1])
        except (OSError, WorkError) as error:
            link.unlink()
            if isinstance(error, WorkError):
                raise
            return False
        self._update = StagedVersion(manifest, tensors, slot)
        return True

    def pending_version(self) -> StagedVersion:
        """The begun version. Raises `sync.failed` without one."""
        if self._update is None:
            raise WorkError("sync.failed", "no update is under way")
        return self._update

    @property
    def current(self) -> StagedVersion | None:
        return self._current

    def room(self, number: int) -> memoryview | None:
        """Memory for the bytes of a bucket of the pending version."""
        update = self.pending_version()
        return None if isinstance(update.file, MappedSlot) else update.bucket(number)

    def apply(self, number: int, data: Buffer) -> str:
        """Take the bytes of one bucket (without a copy if they are in the file); the digest of the file's bytes."""
        update = self.pending_version()
        if isinstance(update.file, MappedSlot):
            data = update.bucket(number)
        room, source = np.frombuffer(update.bucket(number), np.uint8), np.frombuffer(data, np.uint8)
        if source.size != room.size:
            raise AsyncRLError("sync.plan", f"{source.size} bytes for bucket {number}, planned {room.size}")
        same = source.ctypes.data == room.ctypes.data
        parts = [slice(tensor.offset, tensor.offset + tensor.nbytes) for tensor in update.groups[number]]
        with self._lock:
            if self._update is not update:
                raise WorkError("sync.failed", "the update was aborted")
            if update.manifest.bucket_digests[number].startswith(SUM):
                if not same:
                    room[:] = source
                digest = bucket_digest(update.groups[number], room.data, like=SUM)
            elif same:
                digest = digest_all(room[part] for part in parts)
            else:
                digest = copy_digest((room[part], source[part]) for part in parts)
            update.missing.discard(number)
        return digest

    def read(self, number: int, into: memoryview) -> bool:
        """Write the bytes of one bucket of the current version; False without one of that size."""
        current = self._current
        if current is None or not 0 <= number < len(current.starts):
            return False
        if into.nbytes != current.manifest.bucket_bytes[number]:
            return False
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(current.bucket(number), np.uint8)
        return not isinstance(current.file, MappedSlot) or current.has_digest(number, into)

    def complete(self) -> StagedVersion:
        """The pending version. Raises `sync.failed` if a bucket is missing."""
        update = self.pending_version()
        if update.missing:
            raise WorkError("sync.failed", f"commit without buckets {sorted(update.missing)[:8]}")
        return update

    def commit(self) -> None:
        """Make the pending version the current one: the engine holds it."""
        update = self.complete()
        with self._lock:
            old = [self._spare, self._current.file if self._current is not None else None]
            self._current, self._update, self._spare = update, None, None
        if mapped := isinstance(update.file, MappedSlot):
            update.file.unlock()
        for file in filter(None, old):
            if mapped or isinstance(file, MappedSlot):
                file.remove()
            else:
                self._spare = file

    def abort(self) -> None:
        """Drop the pending version; a copy under way ends first, a later one is refused."""
        with self._lock:
            update, self._update = self._update, None
        if update is not None:
            update.file.remove()

    def close(self) -> None:
        self.abort()
        for file in (self._current.file if self._current is not None else None, self._spare):
            if file is not None:
                file.remove()
        self._current = self._spare = None

    # ------------------------------------------------------------ files

    def _make(self, size: int) -> StagedFile:
        name = self._name()
        path, mapping = map_new(size, [folder / name for folder in self._folders], where="staged weights")
        return StagedFile(path, mapping, size)

    def _name(self) -> str:
        self._files += 1
        return f"{PREFIX}{os.getuid()}-{os.getpid()}-{id(self):x}-{self._files}"

    def _remove_stale(self) -> None:
        """Remove the files of this user's processes that were killed."""
        stem = f"{PREFIX}{os.getuid()}-"
        for folder in self._folders:
            for path in folder.glob(f"{stem}*"):
                pid = path.name.removeprefix(stem).partition("-")[0]
                if pid.isdigit() and not is_alive(int(pid)):
                    path.unlink(missing_ok=True)


class Labels:
    """Unique names of committed versions inside an engine: `"{version}.{count}"`; `tag` is added if an engine may have
    labels of another process."""

    def __init__(self, tag: str = "") -> None:
        self._tag = tag
        self._versions: dict[str, int] = {}
        self.current = ""  # empty before the first commit

    def new(self, version: int) -> str:
        """A new label for the next commit; valid once it is `current`."""
        label = f"{version}.{len(self._versions) + 1}{self._tag}"
        self._versions[label] = version
        return label

    def runs(self, spans: Iterable[tuple[str, int, int]], tokens: int, *, where: str = "") -> Runs:
        """Version runs over `tokens` from an engine's (label, start, end), each token in exactly one span.

        Raises:
            WorkError: `engine.broken` for a gap, an overlap or an unknown label.
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
