"""Arrays in payload buffers: raw little-endian bytes, no pickle, read without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asyncrl.errors import WireError
from asyncrl.wire.base import DTYPES, Buffer, Field

ALIGNMENT: Final = 64


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[tuple[Field, ...], bytes]:
    """One payload buffer of the arrays in the given order, each start aligned to 64 bytes, and its field table."""
    fields, parts, offset = [], [], 0
    for name, array in arrays.items():
        code = array.dtype.str.lstrip("<|")
        if code not in DTYPES or array.ndim != 1:
            raise ValueError(f"{name}: dtype {array.dtype} with {array.ndim} dimensions cannot be sent")
        fields.append(Field(name, code, offset, array.size))
        data = array.tobytes()
        padding = -len(data) % ALIGNMENT
        parts.append(data + bytes(padding))
        offset += len(data) + padding
    return tuple(fields), b"".join(parts)


def pack_parts(arrays: Mapping[str, tuple[str, Sequence[npt.NDArray[Any]]]]) -> tuple[tuple[Field, ...], bytes]:
    """Like `pack_arrays`, where an array is given as (dtype, its parts `[n]` in order): they are copied once."""
    fields: list[Field] = []
    pieces: list[Any] = []  # buffers and arrays: what `join` takes
    offset = 0
    for name, (code, parts) in arrays.items():
        count, dtype = 0, DTYPES[code]
        for part in parts:
            if part.dtype != dtype or part.ndim != 1:
                raise ValueError(f"{name}: dtype {part.dtype} with {part.ndim} dimensions cannot be sent as {code}")
            pieces.append(part if part.flags.c_contiguous else part.tobytes())
            count += part.size
        size = count * dtype.itemsize
        padding = -size % ALIGNMENT
        pieces.append(bytes(padding))
        fields.append(Field(name, code, offset, count))
        offset += size + padding
    return tuple(fields), b"".join(pieces)


def unpack_arrays(fields: Sequence[Field], payload: Buffer) -> dict[str, npt.NDArray[Any]]:
    """Read-only views `[count]` into the payload, by name. Raises `WireError` where a field leaves the buffer."""
    view = memoryview(payload)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for field in fields:
        dtype = DTYPES.get(field.dtype)
        if dtype is None or field.name in arrays:
            raise WireError("wire.decode", f"field {field.name!r}: dtype {field.dtype!r} unknown or name repeated")
        end = field.offset + field.count * dtype.itemsize
        if field.offset < 0 or field.count < 0 or end > view.nbytes or field.offset % dtype.itemsize:
            raise WireError("wire.decode", f"field {field.name!r} leaves its payload of {view.nbytes} bytes")
        arrays[field.name] = np.frombuffer(view, dtype, field.count, field.offset)
    return arrays
