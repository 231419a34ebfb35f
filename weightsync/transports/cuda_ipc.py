"""Device memory shared between processes of one host (CUDA IPC): the seam for `local` where both ends have the GPU.

`DeviceOutbox` keeps versions in two device buffers and offers a handle to one of them, `DeviceInbox` maps it: `tensor`
is a bucket where it lies, for engines that load from the device, `read` a copy of it in host memory. Guarantees:
1. like `local`: a reader never blocks the writer, an overwritten buffer shows as another digest;
2. a handle that this process cannot open (another host, no such device, a driver that refuses) is `TransportUnusable`.
State: not chosen by the service and **untested on a GPU**. What surrounds the handles is tested on a CPU with handles
to files; `CudaHandles` has never run here. To finish it: run it, let engines take device tensors, offer it in `choice`.

Example of an address: "ipc:" and base64 of msgpack: (sizes of the buckets, handle).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.multiprocessing.reductions

from asyncrl.errors import UNREADABLE
from asyncrl.wire import Instruction, RoundReply
from weightsync.plan.buckets import bucket_starts
from weightsync.transports.base import TransportError, TransportUnusable, Version

SCHEME = "ipc:"
BUFFERS = 2
#: The module has no types.
reductions: Any = torch.multiprocessing.reductions


class Handles(Protocol):
    """How a device buffer crosses to another process."""

    def make(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer `[nbytes]` that can be shared."""

    def export(self, buffer: torch.Tensor) -> bytes:
        """A handle to it; the buffer must outlive its readers."""

    def open(self, handle: bytes) -> torch.Tensor:
        """The buffer of a handle. Raises RuntimeError or ValueError where that is impossible."""


class CudaHandles:
    """Handles as torch.multiprocessing makes them, without its pickles. Untested: it needs a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def export(self, buffer: torch.Tensor) -> bytes:
        _, args = reductions.reduce_tensor(buffer)
        _, size, stride, offset, _, _, *rest = args  # the classes and the dtype are known
        return msgspec.msgpack.encode((tuple(size), tuple(stride), offset, tuple(rest)))

    def open(self, handle: bytes) -> torch.Tensor:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        size, stride, offset, rest = msgspec.msgpack.decode(handle)
        opened: torch.Tensor = reductions.rebuild_cuda_tensor(
            torch.Tensor, torch.Size(size), tuple(stride), offset, torch.storage.TypedStorage, torch.uint8, *rest
        )
        return opened


class DeviceOutbox:
    """Keeps the last two versions on the device."""

    def __init__(self, handles: Handles) -> None:
        self._handles = handles
        self._buffers: list[torch.Tensor] = []  # oldest content first

    def open(self) -> str:
        """Nothing to reach before there is a version."""
        return SCHEME

    def offer(self, version: Version) -> str:
        """Copy the version to the device. Raises TransportError where it is gone."""
        sizes = version.manifest.bucket_bytes
        starts, needed = bucket_starts(sizes)
        with version.blobs(()) as blobs:
            if blobs is None:
                raise TransportError(f"version {version.manifest.version} is gone")
            buffer = self._take(needed)
            for start, blob in zip(starts, blobs, strict=True):
                if blob.nbytes:
                    buffer[start : start + blob.nbytes].copy_(torch.frombuffer(blob, dtype=torch.uint8))
        self._buffers.append(buffer)
        content = msgspec.msgpack.encode((sizes, self._handles.export(buffer)))
        return SCHEME + base64.b64encode(content).decode()

    def _take(self, nbytes: int) -> torch.Tensor:
        oldest = self._buffers.pop(0) if len(self._buffers) == BUFFERS else None
        return oldest if oldest is not None and len(oldest) == nbytes else self._handles.make(nbytes)

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None: ...

    def close(self) -> None:
        """Let the buffers go; who has mapped one keeps it."""
        self._buffers.clear()


class DeviceInbox:
    """Maps the buffer that the instruction names."""

    def __init__(self, instruction: Instruction, *, handles: Handles) -> None:
        assert instruction.manifest is not None
        self._address = instruction.address
        self._sizes = instruction.manifest.bucket_bytes
        self._handles = handles
        self._buffer: torch.Tensor | None = None

    def open(self) -> None:
        starts_at, _, text = self._address.partition(":")
        try:
            sizes, handle = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=tuple[list[int], bytes])
        except UNREADABLE as error:
            raise TransportError(f"ipc: the address cannot be read: {error}") from None
        if starts_at + ":" != SCHEME or tuple(sizes) != self._sizes:
            raise TransportError("ipc: the address is of another layout than the manifest")
        try:
            buffer = self._handles.open(handle)
        except (RuntimeError, OSError, TypeError, *UNREADABLE) as error:
            raise TransportUnusable(f"ipc: the device memory cannot be mapped here: {error}") from None
        if buffer.dtype != torch.uint8 or buffer.shape != (bucket_starts(self._sizes)[1],):
            raise TransportUnusable("ipc: the device memory has another size than the plan")
        self._buffer = buffer

    def tensor(self, number: int) -> torch.Tensor:
        """Bucket `number` where it lies, uint8 `[size]`."""
        if self._buffer is None:
            raise TransportError("ipc: it is closed")
        start = bucket_starts(self._sizes)[0][number]
        return self._buffer[start : start + self._sizes[number]]

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        """A copy of the bucket in host memory."""
        copied: Any = self.tensor(number).cpu().numpy()
        return memoryview(copied)

    def close(self) -> None:
        self._buffer = None
