"""Reads the payloads of a claimed batch from the service's segment files, by place.

Guarantees:
1. the folder is the service's: its file `nonce` holds the text that the service sent at registration;
2. bytes are copied and their checksum is verified, so a file that is overwritten later does no harm;
3. a file that does not match raises an error, and the client asks for frames instead.
The service keeps a record until its step is in a durable checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.wire import Buffer
from buffers.payloads.record_format import HEAD, same_folder, segment_path


class PlaceReader:
    """Reads the records of a batch on the service's host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}

    @classmethod
    def open(cls, registered: wire.Registered) -> PlaceReader | None:
        """A reader if this process sees the folder that the service names, else None."""
        folder = same_folder(registered.segments, registered.nonce)
        return None if folder is None else cls(folder)

    def fill(self, batch: wire.Batch) -> tuple[wire.Batch, list[Buffer]]:
        """The batch with its records, and their payloads. Raises OSError or WireError if a file does not match."""
        headers: list[bytes] = []
        payloads: list[Buffer] = []
        # One allocation for the batch: numpy asks for huge pages, which spares most of the page faults.
        room = np.empty(sum(place.header_bytes + place.payload_bytes for place in batch.places), np.uint8).data
        for place in batch.places:
            size = place.header_bytes + place.payload_bytes
            data, room = room[:size], room[size:]
            self._read(place, data)
            data = data.toreadonly()
            headers.append(bytes(data[: place.header_bytes]))
            payloads.append(data[place.header_bytes :])
        self._forget({place.segment for place in batch.places})
        heads, start = [], 0
        for head in batch.groups:
            mine = tuple(headers[start : start + len(head.records)])
            start += len(head.records)
            heads.append(msgspec.structs.replace(head, records=mine))
        return msgspec.structs.replace(batch, groups=tuple(heads)), payloads

    def _read(self, place: wire.Place, into: memoryview) -> None:
        if place.segment not in self._files:
            self._files[place.segment] = os.open(segment_path(self._folder, place.segment), os.O_RDONLY)
        size = os.preadv(self._files[place.segment], [into], place.offset + HEAD.size)
        if size != into.nbytes or xxhash.xxh3_64_intdigest(into) != place.checksum:
            raise WireError("wire.checksum", f"segment {place.segment} at {place.offset} does not match its checksum")

    def _forget(self, used: set[int]) -> None:
        for segment in [number for number in self._files if number not in used]:
            os.close(self._files.pop(segment))

    def close(self) -> None:
        self._forget(set())
