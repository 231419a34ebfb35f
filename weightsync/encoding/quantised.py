"""Quantised versions: the matrices of a model in 8 bits, with a float32 scale per row (`weightsync.dtype`).

A row w of a matrix becomes q = round(w / s) with s = max |w| / L: int8 with L = 127, or float8_e4m3fn with L = 448, the
largest number of each. A generator computes with q s, rounded once to the dtype of the other tensors (`dequantise`).
Guarantees:
1. every step is an operation of IEEE 754 in float32, so a row has the same codes for any split of the rows over ranks,
   and a version is the same policy on all generators;
2. |w - q s| <= s / 2 for int8. For fp8, <= |w| / 16, or s / 1024 below s / 64. A row of zeros stays one;
3. a scale comes before its matrix. All other tensors stay as they are: norms, biases, embeddings, the head, routers.
The scale of `model.layers.0.mlp.up_proj.weight` is `model.layers.0.mlp.up_proj.weight_scale`, as in compressed-tensors.

Plain torch: torchao would be an extra for two lines of arithmetic, and takes seconds to import. Torch is imported when
weights are quantised. Example: the row 1, -0.5, 0.004 has s = 1/127 and the codes 127, -64 (-63.5 to even), 1 (0.508).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from asyncrl.errors import AsyncRLError

if TYPE_CHECKING:
    import torch

Spec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape
#: `weightsync.dtype` -> safetensors dtype of the codes, and the largest of them.
FORMATS = {"int8": ("I8", 127.0), "fp8": ("F8_E4M3", 448.0)}
CODES = {dtype for dtype, _ in FORMATS.values()}
SUFFIX = "_scale"
_LAYER = re.compile(r"\.\d+\.")  # matrices stand in numbered layers; embeddings and heads do not
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)\.")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a model is sent in 8 bits.

    >>> is_matrix("model.layers.0.mlp.up_proj.weight", (8, 4)), is_matrix("model.embed_tokens.weight", (8, 4))
    (True, False)
    """
    if not _LAYER.search(name) or _ROUTER.search(name):
        return False
    return (len(shape) == 2 and name.endswith(".weight")) or (len(shape) == 3 and ".experts." in name)


def quantised_specs(specs: Iterable[Spec], kind: str) -> Iterator[Spec]:
    """What is sent for tensors of these names, dtypes and shapes, in the same order."""
    for name, dtype, shape in specs:
        if is_matrix(name, shape):
            yield name + SUFFIX, "F32", (*shape[:-1], 1)
            yield name, FORMATS[kind][0], shape
        else:
            yield name, dtype, shape


def quantise_all(tensors: Iterable[tuple[str, torch.Tensor]], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `quantised_specs`, where the given ones are."""
    for name, tensor in tensors:
        if is_matrix(name, tuple(tensor.shape)):
            try:
                codes, scale = quantise(tensor, kind)
            except ValueError as error:
                raise AsyncRLError("learner.nonfinite", f"{name}: {error}", where="weightsync.dtype") from None
            yield name + SUFFIX, scale
            yield name, codes
        else:
            yield name, tensor


def quantise(matrix: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[.., rows, columns]` and scales, float32 `[.., rows, 1]`. Raises ValueError if a value is not finite."""
    import torch

    dtype, limit = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind], FORMATS[kind][1]
    wide = matrix.detach().float()
    if not wide.numel():
        return wide.to(dtype), wide.new_zeros(*wide.shape[:-1], 1)
    largest = wide.abs().amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ValueError("a weight is not finite")
    # Not `largest / limit`: by a plain number some devices multiply with its reciprocal.
    scale = (largest / torch.full_like(largest, limit)).clamp_min_(torch.finfo(torch.float32).tiny)
    codes = (wide / scale).clamp_(-limit, limit)
    return (codes.round_() if kind == "int8" else codes).to(dtype), scale


def decode(codes: memoryview, scale: memoryview, target: memoryview, *, sent: str, held: str) -> None:
    """Write the weights of a matrix to `target`; `sent` and `held`: safetensors dtypes of its codes and weights."""
    import torch

    types = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
    wide = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[held]
    rows = torch.frombuffer(scale, dtype=torch.float32).view(-1, 1)
    found = dequantise(torch.frombuffer(codes, dtype=types[sent]).view(len(rows), -1), rows, wide)
    torch.frombuffer(target, dtype=wide).view(found.shape).copy_(found)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights that a generator computes with."""
    return (codes.float() * scale).to(dtype)
