"""The base of all messages, and the types that several conversations share."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

SCHEMA: Final = 1
DTYPES: Final[dict[str, np.dtype[Any]]] = {name: np.dtype(f"<{name}") for name in ("i4", "f4", "u1", "i8", "i2")}
LARGEST: Final = 1 << 62  # what comes after it still fits where 64 bits are all there is
Whole = Annotated[int, Meta(ge=0, le=LARGEST)]
Version = Annotated[int, Meta(ge=-1, le=LARGEST)]  # -1: none yet
Name = Annotated[str, Meta(max_length=200)]  # of a process or a role: services keep tables by it
Text = Annotated[str, Meta(max_length=500)]  # what a service keeps of every peer: digests, addresses, names of settings
Buffer = bytes | bytearray | memoryview
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages: frozen, positional on the wire, surplus fields refused. They cannot form cycles: no GC."""


class Field(Message, frozen=True):
    """One array inside a payload buffer."""

    name: str
    dtype: str  # a key of DTYPES
    offset: int
    count: int


class Place(Message, frozen=True):
    """Where a record lies in a segment file; `checksum` is xxh3_64 of its header and payload."""

    segment: int
    offset: int
    header_bytes: int
    payload_bytes: int
    checksum: int
