"""Takes a new version of the weights beside the old one, and swaps it in.

Called by the hf engine: `begin`, every bucket once, then `swap` between two decode steps. Guarantees:
1. the model is not touched before `swap`; `abort` forgets everything;
2. tensors carry Hugging Face names; every parameter of the model must be in the manifest (a tied one once, under any of
   its names) with its shape, else `sync.plan`; buffers (rotary tables) are not part of a version;
3. `digest` is computed from what the model holds after the swap, not from what arrived;
4. a dtype that the model cannot hold without loss is refused, because the digest could never agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.errors import AsyncRLError
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.digest import digest_tensors

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Wire dtype -> dtypes of a model that hold every one of its values.
_HOLDS = {
    "F64": (torch.float64,), "F32": (torch.float32, torch.float64),
    "F16": (torch.float16, torch.float32, torch.float64), "BF16": (torch.bfloat16, torch.float32, torch.float64),
}  # fmt: skip


class WeightUpdate:
    """One version on its way into a model."""

    def __init__(self, model: torch.nn.Module, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Allocate room for every tensor. Raises `sync.plan` where the layout is not this model's."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        check_layout(model, tensors)
        self.manifest = manifest
        self.tensors = tuple(tensors)
        self._parameters = {tensor.name: parameters[tensor.name] for tensor in tensors}
        self._shadow = {
            tensor.name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=parameters[tensor.name].device)
            for tensor in tensors
        }
        self._missing = set(range(len(manifest.bucket_bytes)))

    def apply(self, number: int, data: Buffer) -> None:
        """Copy the tensors of one bucket out of its bytes."""
        view = np.frombuffer(data, dtype=np.uint8)
        for tensor in self.tensors:
            if tensor.bucket == number:
                part = view[tensor.offset : tensor.offset + tensor.nbytes]
                if part.size != tensor.nbytes:
                    raise AsyncRLError("sync.plan", f"{tensor.name} leaves bucket {number} of {view.size} bytes")
                _bytes_view(self._shadow[tensor.name]).copy_(torch.from_numpy(part.copy()))
        self._missing.discard(number)

    def check_complete(self) -> None:
        """Raise `sync.failed` where a bucket has not come."""
        if self._missing:
            raise AsyncRLError("sync.failed", f"commit without buckets {sorted(self._missing)[:8]}")

    def swap(self) -> None:
        """Copy the new values into the parameters. Between two decode steps, on the decode thread."""
        with torch.no_grad():
            for name, value in self._shadow.items():
                self._parameters[name].copy_(value)
        self._shadow = {}

    def digest(self) -> str:
        """Digest of what the model now holds, in the manifest's dtypes."""
        dtypes = {tensor.name: DTYPES[tensor.dtype] for tensor in self.tensors}

        def bytes_of(name: str) -> memoryview:
            held = self._parameters[name].detach().to(dtypes[name]).contiguous()
            return memoryview(_bytes_view(held).cpu().numpy().data)

        return digest_tensors(self.tensors, bytes_of)[1]


def check_layout(model: torch.nn.Module, tensors: Sequence[Tensor]) -> None:
    """Raise `sync.plan` where these tensors are not the parameters of the model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    given = set()
    for tensor in tensors:
        parameter = parameters.get(tensor.name)
        if parameter is None:
            raise AsyncRLError("sync.plan", f"this model has no parameter {tensor.name!r}")
        if tuple(parameter.shape) != tuple(tensor.shape):
            raise AsyncRLError("sync.plan", f"{tensor.name}: {tuple(tensor.shape)} sent, {tuple(parameter.shape)} here")
        if parameter.dtype not in _HOLDS.get(tensor.dtype, ()):
            held = str(parameter.dtype).removeprefix("torch.")
            raise AsyncRLError(
                "sync.plan", f"{tensor.name}: sent as {tensor.dtype}, which {held} does not hold without loss",
                remedy="set producers.dtype = \"auto\", or both ends to the same dtype",
            )  # fmt: skip
        given.add(id(parameter))
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in given]
    if missing:
        raise AsyncRLError("sync.plan", f"the manifest lacks {len(missing)} parameters, first {missing[0]!r}")


def _bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)
