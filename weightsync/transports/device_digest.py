"""`weightsync.plan.sum_digest` of tensors where they are: on a device nothing but the sums leaves it. Imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from weightsync.plan.sum_digest import SumDigest, enough, factors, padded, spans, table


@cache
def _tables(device: torch.device) -> Tensor:
    """int64 `[2, CHUNK_WORDS]`."""
    return torch.from_numpy(np.stack([table(0), table(1)])).to(device)


@cache
def _factors(chunks: int, device: torch.device) -> Tensor:
    """int64 `[2, chunks]`."""
    return torch.from_numpy(np.stack([factors(0, chunks), factors(1, chunks)])).to(device)


class DeviceSums:
    """The sums of one bucket, int64 `[2]` on a device. Nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)
        self._end = 0  # of the tensors so far
        self._host = SumDigest()

    @torch.no_grad()
    def update(self, tensor: Tensor) -> None:
        """Add the bytes of the next tensor, whole."""
        self.add(tensor, self._end)
        self._end += padded(tensor.nbytes)

    @torch.no_grad()
    def add(self, tensor: Tensor, start: int) -> None:
        """As `SumDigest.add`."""
        if tensor.is_cpu:  # numpy is three times as fast as torch here; `numpy()` would make the storage unresizable
            data = tensor.contiguous()
            memory = (ctypes.c_uint8 * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
            self._host.add(np.frombuffer(memoryview(memory), np.uint8), start)
            np.copyto(self.sums.numpy(), np.array(self._host.sums, np.uint64).view(np.int64))
        else:
            self._add(start // 4, word_view(tensor, start % 4))

    def _add(self, first: int, words: Tensor) -> None:
        for span in spans(first, words.numel()):
            part = words[span.start : span.start + span.size].to(torch.int64).view(span.chunks, -1)
            last = span.chunk + span.chunks
            of_chunks = (part * _tables(part.device)[:, None, span.place : span.place + part.shape[1]]).sum(2)
            self.sums += (of_chunks * _factors(enough(last), part.device)[:, span.chunk : last]).sum(1)


def word_view(tensor: Tensor, zeros: int = 0) -> Tensor:
    """The bytes of a tensor as int32, padded with zeros, this many of them before it: a view if they are aligned and
    whole."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if zeros or data.numel() % 4:
        data = torch.nn.functional.pad(data, (zeros, -(zeros + data.numel()) % 4))
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32)


def sum_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sums of a bucket of these tensors."""
    found = DeviceSums(device)
    for tensor in tensors:
        found.update(tensor)
    return found.sums
