"""The tensors of a version in the memory of a model: layout by bucket, spare room, bytes and digests.

Guarantees: tensors carry the names of a folder; every parameter of the model must be in the manifest (a tied one once,
under any of its names) with its shape, else `sync.plan`; a dtype that the model cannot hold without loss is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from asyncrl.errors import AsyncRLError
from asyncrl.runtime.device import Device
from asyncrl.runtime.model_tensors import Part
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.copy_digest import Bytes, copy_digest, digest_all, digest_lent
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import version_digest
from weightsync.plan.sum_digest import SUM, hexdigest
from weightsync.transports.pinned_copies import PinnedCopies

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Wire dtype -> dtypes of a model that hold every one of its values.
_HOLDS = {
    "F64": (torch.float64,),
    "F32": (torch.float32, torch.float64),
    "F16": (torch.float16, torch.float32, torch.float64),
    "BF16": (torch.bfloat16, torch.float32, torch.float64),
}


class Room:
    """Free tensors by name, and storages by bucket: the room for the next version."""

    def __init__(self) -> None:
        self._spare: dict[str, torch.Tensor] = {}
        self._buckets: tuple[torch.Tensor, ...] = ()

    def take_buckets(self, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Storages of these sizes on the CPU, uint8, with any content."""
        spare, self._buckets = self._buckets, ()
        if [storage.numel() for storage in spare] == list(sizes):
            return spare
        return tuple(torch.empty(size, dtype=torch.uint8) for size in sizes)

    def give_buckets(self, storages: tuple[torch.Tensor, ...]) -> None:
        """Keep them for the next `take_buckets`; no tensor may be a view into them."""
        self._buckets = storages

    def clear(self) -> None:
        """Keep nothing."""
        self._spare, self._buckets = {}, ()

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of that form with any content."""
        found = self._spare.pop(name, None)
        if found is not None and (tuple(found.shape), found.dtype, found.device) == (tuple(shape), dtype, device):
            return found
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Keep it for the next `take`."""
        if tensor.is_contiguous():
            self._spare[name] = tensor


class Named:
    """The tensors of a model by the names that versions have: parameters, or parts of one that holds all experts."""

    def __init__(self, model: torch.nn.Module, parts: Mapping[str, Mapping[str, Part]]) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.parts = {name: part for several in parts.values() for name, part in several.items()}
        self._names = [one for name, _ in model.named_parameters() for one in parts.get(name, (name,))]

    def once(self) -> list[str]:
        """All names, of a tied parameter the first."""
        return self._names

    def owner(self, name: str) -> str:
        """The parameter that a tensor is, or is a part of."""
        return self.parts[name].name if name in self.parts else name

    def find(self, name: str) -> torch.Tensor | None:
        """The value of that name; None without one, and for a parameter that comes in parts."""
        if name in self.parts:
            return self.view(name, self.parameters[self.owner(name)].data)
        known = self.parameters.get(name)
        return None if known is None else known.data

    def view(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The part of that name in a value of its parameter."""
        found: torch.Tensor = self.parts[name].view(whole) if name in self.parts else whole
        return found

    def memory(self, name: str) -> tuple[int, str]:
        """Equal for the names of a tied parameter alone."""
        return id(self.parameters[self.owner(name)]), name if name in self.parts else ""


class HostBytes:
    """The bytes of a model's tensors for the host: views in host memory, copies through pinned memory of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = Device(device.type, device.index or 0)
        self._copies: PinnedCopies | None = None
        self._lock = threading.Lock()  # a check of the model and an update may come at once

    def digest(self, tensors: Sequence[torch.Tensor]) -> str:
        """Digest of a bucket of these tensors."""
        if not self._device.pin_memory_ok:
            return digest_all(_bytes_view(tensor).numpy() for tensor in tensors)
        with self._lock:
            run = self._pinned(tensors).run
            return digest_lent(lambda settle: (data for _, data in run((("", one) for one in tensors), settle)))

    def sums(self, tensors: Sequence[torch.Tensor]) -> str:
        """Digest of a bucket of these tensors for transport `direct`: computed where they are."""
        from weightsync.transports.device_digest import sum_tensors

        found = np.empty(2, np.int64)
        device = tensors[0].device if tensors else torch.device("cpu")
        self.read([sum_tensors(tensors, device)], [found.view(np.uint8)])
        return hexdigest((int(found[0]), int(found[1])))

    def read(self, tensors: Sequence[torch.Tensor], into: Sequence[Bytes]) -> None:
        """Copy the bytes of each tensor."""
        if not self._device.pin_memory_ok:
            for tensor, target in zip(tensors, into, strict=True):
                target[:] = _bytes_view(tensor).numpy()
            return
        with self._lock:
            found = self._pinned(tensors).run((("", one) for one in tensors), lambda: None)
            for (_, data), target in zip(found, into, strict=True):
                target[:] = data

    def load(self, pairs: Sequence[tuple[torch.Tensor, Bytes, Tensor]]) -> None:
        """Copy bytes into tensors, which may hold them in a wider dtype."""
        if not self._device.pin_memory_ok:
            for target, part, tensor in pairs:
                copy_into(target, part, tensor)
            return
        with self._lock:
            rooms = self._pinned([torch.from_numpy(part) for _, part, _ in pairs])
            rooms.load((target, part, DTYPES[tensor.dtype]) for target, part, tensor in pairs)

    def _pinned(self, tensors: Sequence[torch.Tensor]) -> PinnedCopies:
        largest = max((tensor.nbytes for tensor in tensors), default=0)
        if self._copies is None or self._copies.largest < largest:
            self._copies = None  # freed first
            self._copies = PinnedCopies(self._device, largest)
        return self._copies


class Layout:
    """The tensors of a version by bucket, and access to their bytes."""

    def __init__(self, manifest: Manifest, tensors: Sequence[Tensor], host: HostBytes) -> None:
        self._host = host
        self._sums = "".join(manifest.bucket_digests[:1]).startswith(SUM)
        self.sizes = manifest.bucket_bytes
        self.tensors = tuple(tensors)
        self.buckets = group_by_bucket(tensors, len(manifest.bucket_bytes))

    def bucket_digest(self, number: int, get: Callable[[str], torch.Tensor]) -> str:
        """Digest of one bucket of the tensors from `get`, in the dtypes of the layout."""
        digest = self._host.sums if self._sums else self._host.digest
        return digest(self._wire_tensors(number, get))

    def _wire_tensors(self, number: int, get: Callable[[str], torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a bucket in the dtypes of the layout."""
        return [get(tensor.name).to(DTYPES[tensor.dtype]).contiguous() for tensor in self.buckets[number]]

    def digest(self, get: Callable[[str], torch.Tensor]) -> str:
        """Digest of all buckets."""
        return version_digest([self.bucket_digest(number, get) for number in range(len(self.buckets))])

    def take(self, number: int, data: torch.Tensor, get: Callable[[str], torch.Tensor]) -> str:
        """The same for bytes on the device of the model."""
        for tensor in self.buckets[number]:
            get(tensor.name).copy_(view_as(data[tensor.offset : tensor.offset + tensor.nbytes], tensor))
        return self.bucket_digest(number, get)

    def read(self, number: int, into: memoryview, get: Callable[[str], torch.Tensor]) -> bool:
        """Write the bytes of one bucket, without padding. False if `into` is not a bucket of this layout."""
        if not 0 <= number < len(self.sizes) or into.nbytes != self.sizes[number]:
            return False
        target = np.frombuffer(into, dtype=np.uint8)
        parts = [target[tensor.offset : tensor.offset + tensor.nbytes] for tensor in self.buckets[number]]
        self._host.read(self._wire_tensors(number, get), parts)
        return True

    def fill(self, number: int, data: Buffer, get: Callable[[str], torch.Tensor]) -> str:
        """Copy the bytes of one bucket into the tensors from `get`; the digest of the copy.

        Raises `sync.plan` if there are too few bytes.
        """
        view = np.frombuffer(data, dtype=np.uint8)
        pairs = []
        for tensor in self.buckets[number]:
            part = view[tensor.offset : tensor.offset + tensor.nbytes]
            if part.size != tensor.nbytes:
                raise AsyncRLError("sync.plan", f"{tensor.name} leaves bucket {number} of {view.size} bytes")
            pairs.append((get(tensor.name), part, tensor))
        if not self._sums and all(is_plain(target, DTYPES[tensor.dtype]) for target, _, tensor in pairs):
            return copy_digest((_bytes_view(target).numpy(), part) for target, part, _ in pairs)
        self._host.load(pairs)
        return self.bucket_digest(number, get)


class Update(Protocol):
    """A pending version."""

    manifest: Manifest
    layout: Layout
    missing: set[int]

    def apply(self, number: int, data: Buffer) -> str | None:
        """Take the bytes of one bucket; the digest of the copy, None if it must be read."""

    def tensor_for(self, name: str) -> torch.Tensor:
        """The value of a tensor of the layout."""

    def complete(self) -> None:
        """Every bucket is there: finish the version, while decoding goes on."""

    def exchange(self) -> None:
        """Make it the model's."""


def check_layout(named: Named, tensors: Sequence[Tensor]) -> None:
    """Raise `sync.plan` if these tensors are not those of the model."""
    given = set()
    for tensor in tensors:
        parameter = named.find(tensor.name)
        if parameter is None:
            raise AsyncRLError("sync.plan", f"this model has no parameter {tensor.name!r}")
        if tuple(parameter.shape) != tuple(tensor.shape):
            raise AsyncRLError("sync.plan", f"{tensor.name}: {tuple(tensor.shape)} sent, {tuple(parameter.shape)} here")
        if parameter.dtype not in _HOLDS.get(tensor.dtype, ()):
            held = str(parameter.dtype).removeprefix("torch.")
            raise AsyncRLError(
                "sync.plan",
                f"{tensor.name}: sent as {tensor.dtype}, which {held} does not hold without loss",
                remedy='set producers.dtype = "auto", or both ends to the same dtype',
            )
        given.add(named.memory(tensor.name))
    missing = [name for name in named.once() if named.memory(name) not in given]
    if missing:
        raise AsyncRLError("sync.plan", f"the manifest lacks {len(missing)} parameters, first {missing[0]!r}")


def view_as(data: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """The tensor over its bytes; a copy if they are not aligned for its dtype."""
    dtype = DTYPES[tensor.dtype]
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(tensor.shape)


def is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the bytes of a tensor of that dtype can be copied to `target` unchanged."""
    return target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()


def copy_into(target: torch.Tensor, part: np.ndarray[Any, np.dtype[np.uint8]], tensor: Tensor) -> None:
    """Copy the bytes of one tensor into `target`, which may hold them in a wider dtype or on another device."""
    dtype = DTYPES[tensor.dtype]
    if is_plain(target, dtype):
        np.copyto(_bytes_view(target).numpy(), part)
    else:
        target.copy_(torch.from_numpy(part.copy()).view(dtype).view(tensor.shape))


def _bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)
