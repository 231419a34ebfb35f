"""Bytes of tensors on a device through pinned host memory, one tensor ahead of its reader.

A copy to ordinary memory waits for the device and is staged by the driver; one to pinned memory runs at the speed of
the link while the reader works on the tensor before. Guarantees:
1. bytes are handed out only when their copy has ended;
2. they stay as they are until `settle` was called, which this iterator does before it uses their memory again;
3. copies stand in the stream of the tensors, so a tensor may be freed or overwritten by later work of that stream.

Example: tensors a, b, c: a and b are copied, a is handed out; `settle`, c is copied to the memory of a, b is handed
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.runtime.device import Device

Bytes = npt.NDArray[np.uint8]


class PinnedCopies:
    """Pinned memory for two tensors of at most `largest` bytes, kept for all versions."""

    def __init__(self, device: Device, largest: int) -> None:
        self._device = device
        self._rooms = [torch.empty(largest, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    @torch.no_grad()
    def run(
        self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, settle: Callable[[], None]
    ) -> Iterator[tuple[str, Bytes]]:
        """Yield name and bytes, in a dtype, of every tensor."""
        before: tuple[str, Tensor, object] | None = None
        for number, (name, tensor) in enumerate(named):
            settle()  # two tensors before: its memory is used next
            sent = tensor.to(dtype)
            room = self._rooms[number % 2][: sent.numel() * dtype.itemsize]
            room.view(dtype).view(sent.shape).copy_(sent, non_blocking=True)
            under_way = (name, room, self._device.mark())
            if before is not None:
                yield self._finish(*before)
            before = under_way
        if before is not None:
            yield self._finish(*before)

    def _finish(self, name: str, room: Tensor, mark: object) -> tuple[str, Bytes]:
        self._device.wait_for(mark)  # bounded: the watchdog ends a rank whose device hangs
        return name, room.numpy()
