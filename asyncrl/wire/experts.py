"""The experts that the tokens of samples went through, as arrays of a payload.

Guarantees:
1. `experts` u1 or i2 `[sum tokens * layers * chosen]` holds samples one after the other; `experts_shape` i4 `[2 + S]`
   is (layers, chosen, tokens of each of the S samples). A sample without recorded experts has 0 tokens;
2. a sample with them has those of all its tokens but the last, which no pass has read: prompt + response - 1.

A byte per choice: 8 of 128 experts in each of 48 layers take 384 bytes per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asyncrl.errors import WireError

Array = npt.NDArray[Any]
NAMES: Final = ("experts", "experts_shape")
DTYPES: Final = ("|u1", "<i2")


def pack_experts(samples: Sequence[Array | None]) -> dict[str, Array]:
    """The arrays of a payload for samples, each `[tokens, layers, chosen]` or None; empty if none has any."""
    known = [one for one in samples if one is not None]
    if not known:
        return {}
    sizes = [0 if one is None else len(one) for one in samples]
    flat = np.concatenate([one.reshape(-1) for one in known])
    return dict(zip(NAMES, (flat, np.array([*known[0].shape[1:], *sizes], "<i4")), strict=True))


def unpack_experts(arrays: Mapping[str, Array], tokens: Sequence[int]) -> list[Array | None]:
    """The experts of each sample, views `[tokens, layers, chosen]`. `tokens`: of each sample, prompt and response.

    Raises:
        WireError: `wire.decode`: the arrays do not belong to these samples.
    """
    if not any(name in arrays for name in NAMES):
        return [None] * len(tokens)
    flat, shape = (arrays.get(name, np.zeros(0, np.int32)) for name in NAMES)
    if flat.dtype.str not in DTYPES or shape.dtype.str != "<i4" or shape.size != 2 + len(tokens):
        raise WireError("wire.decode", f"experts: {flat.dtype} with {shape.size} numbers for {len(tokens)} samples")
    layers, chosen, *sizes = shape.tolist()
    wrong = [size for size, count in zip(sizes, tokens, strict=True) if size not in (0, count - 1)]
    if min(layers, chosen) < 1 or wrong or flat.size != layers * chosen * sum(sizes):
        raise WireError("wire.decode", f"experts: {flat.size} of {layers} x {chosen} for {sizes} of {tokens} tokens")
    found: list[Array | None] = []
    start = 0
    for size in sizes:
        part = flat[start * layers * chosen : (start + size) * layers * chosen]
        found.append(part.reshape(size, layers, chosen) if size else None)
        start += size
    return found
