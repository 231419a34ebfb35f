"""Cast on send: weights leave in `weightsync.dtype`, and everything that follows is of what is sent.

Called by the learner between its backend and the publisher. Guarantees:
1. the plan carries the dtype that is sent, and the publisher digests the cast bytes: both ends agree on those;
2. floats alone are cast; integers and booleans pass;
3. rounding is to the nearest, ties to even, as in torch; a NaN stays one, what is too large becomes infinite.
No torch: a backend that casts on its device need not use `cast_chunks`.

Example: F32 0.1 (0x3DCCCCCD) leaves as BF16 0x3DCD.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.wire import Buffer
from weightsync.plan import TensorSpec

#: safetensors name by name in the configuration.
NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FLOATS = frozenset(NAMES.values())
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def wire_dtype(setting: str, model_dtype: str) -> str:
    """The dtype that floats leave in: `weightsync.dtype`, or with "auto" `model.dtype`. Raises KeyError on another."""
    return NAMES[model_dtype if setting == "auto" else setting]


def cast_specs(specs: Iterable[TensorSpec], dtype: str) -> list[TensorSpec]:
    """The tensors as they are sent."""
    return [TensorSpec(spec.name, _sent(spec.dtype, dtype), spec.shape) for spec in specs]


def cast_chunks(
    chunks: Iterable[tuple[str, npt.NDArray[np.uint8]]], specs: Sequence[TensorSpec], dtype: str
) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Name and bytes of each tensor as it is sent; `specs` are those of `chunks`, in their order."""
    for (name, data), spec in zip(chunks, specs, strict=True):
        if name != spec.name:
            raise ValueError(f"chunk {name} where the backend announced {spec.name}")
        yield name, cast_bytes(data.data, spec.dtype, _sent(spec.dtype, dtype))


def cast_bytes(data: Buffer, have: str, want: str) -> npt.NDArray[np.uint8]:
    """The same numbers in another float dtype.

    Raises:
        ValueError: one of them is no float of `NAMES`.
    """
    plain = np.frombuffer(data, dtype=np.uint8)
    if have == want:
        return plain
    if have not in FLOATS or want not in FLOATS:
        raise ValueError(f"{have} cannot be cast to {want}")
    if have == "BF16":
        wide = (plain.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    else:
        wide = plain.view(_NUMPY[have])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if want in ("BF16", "F16"):
            wide = wide.astype("<f4", copy=False)  # torch rounds float64 on this way too
        return _to_bf16(wide).view(np.uint8) if want == "BF16" else wide.astype(_NUMPY[want]).view(np.uint8)


def _sent(have: str, dtype: str) -> str:
    return dtype if have in FLOATS else have


def _to_bf16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves, rounded: half of the last place, and one less where the last place is even."""
    bits = numbers.view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    halves = rounded.astype("<u2")
    halves[np.isnan(numbers)] = 0x7FC0
    return halves
