"""Frees the memory of tensors while others use the device, and fills it again (`cluster.devices = "turns"`).

The tensors stay the same objects: only their storages are emptied, as FSDP does with gathered weights. Their bytes wait
in pinned host memory; on a CPU in a file without a name in the run's folder.
"""

from __future__ import annotations

import ctypes
import io
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.runtime.device import Device


class RestingStates:
    def __init__(self, device: Device, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._copies: list[tuple[torch.UntypedStorage, Tensor | int]] = []  # storage and its bytes, or their number
        self._file: Any = None

    @property
    def out(self) -> bool:
        """Whether tensors are without their memory now."""
        return bool(self._copies)

    @torch.no_grad()
    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Empty the storages of those tensors that are on the device. Nothing may use them before `move_back`."""
        if self._copies:
            return
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors if self._is_here(one)}
        if self._device.type == "cpu":
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._file.seek(0)
        for storage in storages.values():
            self._copies.append((storage, self._copy(storage)))
        self._device.synchronize()
        for storage in storages.values():
            storage.resize_(0)
        self._device.release_memory()

    @torch.no_grad()
    def move_back(self) -> None:
        """Fill the storages again."""
        if self._file is not None:
            self._file.seek(0)
        for storage, held in self._copies:
            storage.resize_(held.numel() if isinstance(held, Tensor) else held)
            if isinstance(held, Tensor):
                _bytes_of(storage).copy_(held, non_blocking=True)
            elif self._file.readinto(_memory(storage)) != held:
                raise io.UnsupportedOperation("a file of resting states is too short")
        self._device.synchronize()
        self._copies.clear()

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type and tensor.untyped_storage().nbytes() > 0

    def _copy(self, storage: torch.UntypedStorage) -> Tensor | int:
        if self._device.type == "cpu":
            return int(self._file.write(_memory(storage)))
        here = _bytes_of(storage)
        room = torch.empty(here.shape, dtype=torch.uint8, pin_memory=self._device.pin_memory_ok)
        return room.copy_(here, non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _memory(storage: torch.UntypedStorage) -> Any:
    """The bytes of a storage in host memory. No numpy array: torch resizes no storage that one has looked at."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
