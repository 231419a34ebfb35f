"""Bytes of tensors on a device through pinned host memory, one tensor ahead of their reader or writer.

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
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.runtime.device import Device

Bytes = npt.NDArray[np.uint8]
Key = TypeVar("Key")


class PinnedCopies:
    """Pinned memory for two tensors of at most `largest` bytes, kept for all versions."""

    def __init__(self, device: Device, largest: int) -> None:
        self._device = device
        self._rooms = [torch.empty(largest, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    @property
    def largest(self) -> int:
        return self._rooms[0].numel()

    @torch.no_grad()
    def run(self, named: Iterable[tuple[Key, Tensor]], settle: Callable[[], None]) -> Iterator[tuple[Key, Bytes]]:
        """Yield name and bytes of every tensor."""
        before: tuple[Key, Tensor, object] | None = None
        for number, (name, sent) in enumerate(named):
            settle()  # two tensors before: its memory is used next
            room = self._view(number, sent.nbytes)
            room.view(sent.dtype).view(sent.shape).copy_(sent, non_blocking=True)
            under_way = (name, room, self._device.mark())
            if before is not None:
                yield self._finish(*before)
            before = under_way
        if before is not None:
            yield self._finish(*before)

    def _finish(self, name: Key, room: Tensor, mark: object) -> tuple[Key, Bytes]:
        self._device.wait_for(mark)  # bounded: the watchdog ends a rank whose device hangs
        return name, room.numpy()

    @torch.no_grad()
    def load(self, pairs: Iterable[tuple[Tensor, Bytes, torch.dtype]]) -> None:
        """Copy bytes, in a dtype, to tensors of the device; a conversion to the tensor's own dtype runs there. Returns
        when the bytes are not needed any more."""
        marks: list[object] = [None, None]
        for number, (target, data, dtype) in enumerate(pairs):
            if marks[number % 2] is not None:
                self._device.wait_for(marks[number % 2])  # bounded: the receiver's limits end a worker that hangs
            room = self._view(number, data.nbytes)
            room.numpy()[:] = data
            there = room.to(target.device, non_blocking=True)
            target.copy_(there.view(dtype).view(target.shape))
            marks[number % 2] = self._device.mark()
        for mark in marks:
            if mark is not None:
                self._device.wait_for(mark)  # bounded: likewise

    def _view(self, number: int, size: int) -> Tensor:
        return self._rooms[number % 2][:size]
