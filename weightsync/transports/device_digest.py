"""`weightsync.plan.sum_digest` of tensors where they are: on a device nothing but the sums leaves it. Imports torch.

Triton's kernel is used where there is one (`sum_kernel`), operators of torch elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.runtime.device import Device
from weightsync.plan.sum_digest import CHUNK_WORDS, MASK, SumDigest, enough, factors, padded, spans, table


@cache
def _tables(device: torch.device) -> Tensor:
    """int64 `[2, CHUNK_WORDS]`."""
    return torch.from_numpy(np.stack([table(0), table(1)])).to(device)


@cache
def _factors(chunks: int, device: torch.device) -> Tensor:
    """int64 `[2, chunks]`."""
    return torch.from_numpy(np.stack([factors(0, chunks), factors(1, chunks)])).to(device)


@cache
def _kernel(device: torch.device) -> Any:
    """The module of Triton's kernel, where it runs and gives the digest of the host; otherwise None."""
    if not Device(device.type).supports("triton"):
        return None
    words = torch.arange(3 * CHUNK_WORDS, dtype=torch.int32) * 2654435 - 7
    wanted = SumDigest()
    wanted.add(np.frombuffer(words.numpy().tobytes(), np.uint8), 44)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        from weightsync.transports import sum_kernel

        sum_kernel.add(words.to(device), 11, _tables(device), _factors(enough(4), device), sums)
        found = [value & MASK for value in sums.tolist()]
    except Exception as error:  # Triton reports a missing compiler or an unknown device in ways of its own
        found = [f"{type(error).__name__}: {error}"]
    if found != list(wanted.sums):
        print(f"warning: digests of weights on {device} are made without Triton, which is slower: {found}", flush=True)
        return None
    return sum_kernel


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
        if (kernel := _kernel(words.device)) is not None:
            last = (first + words.numel()) // CHUNK_WORDS + 1
            kernel.add(words, first, _tables(words.device), _factors(enough(last), words.device), self.sums)
            return
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
