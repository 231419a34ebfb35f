"""Moves the weights of a model off its device and back (`asyncrl.engine.Sleeping`).

They wait in pinned host memory; on a CPU in files without a name, which the system can write to disk.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from asyncrl.runtime.device import Device
from producers.engines.hf.decode_thread import DecodeThread
from producers.engines.hf.decoder import Decoder

DONT_NEED = 4  # MADV_DONTNEED of Linux: resident pages go, the file keeps its bytes


class HFSleeping:
    """`asyncrl.engine.Sleeping` of the engine: on its decode thread, between two steps."""

    loads_asleep = True

    def __init__(self, thread: DecodeThread, decoder: Decoder, weights: RestingWeights) -> None:
        self._thread = thread
        self._decoder = decoder
        self._weights = weights

    async def sleep(self) -> None:
        await self._thread.call(self._decoder.forget)
        await self._thread.call(self._weights.move_out)

    async def wake(self) -> None:
        await self._thread.call(self._weights.move_back)


class RestingWeights:
    """The parameters of a model. They may be written between `move_out` and `move_back`."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], device: Device, folder: Path) -> None:
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        self._device = device
        self._folder = folder
        self._out = False

    def move_out(self) -> None:
        if not self._out:
            self._move(self._copy_to_file if self._device.type == "cpu" else self._copy_to_host)
        self._out = True

    def move_back(self) -> None:
        if self._out:
            self._move(torch.clone if self._device.type == "cpu" else self._copy_to_device)
        self._out = False

    @torch.no_grad()
    def _move(self, copy: Any) -> None:
        old = []  # read by copies until they have ended
        for parameter in self._parameters:
            old.append(parameter.data)
            parameter.data = copy(parameter.data)
        self._device.synchronize()
        old.clear()
        self._device.release_memory()

    def _copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.pin_memory_ok)
        return room.copy_(tensor, non_blocking=True)

    def _copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device.torch_device, non_blocking=True)

    def _copy_to_file(self, tensor: torch.Tensor) -> torch.Tensor:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            name, size = f"/proc/self/fd/{file.fileno()}", max(tensor.nbytes, 1)
            file.truncate(size)
            held = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        found = held[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        found.copy_(tensor)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(held.data_ptr()), ctypes.c_size_t(size), DONT_NEED)
        return found
