"""The images of prompts: rows are normalised, and the bytes of their images are kept at hand.

Guarantees:
1. an image is decoded once before its row is used, so that a damaged one sets its prompt aside and not an engine;
2. at most `CACHE_BYTES` are kept; an image that was dropped is read again from its row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from asyncrl.config import DataConfig
from asyncrl.errors import WorkError
from asyncrl.images.decoding import ImageProblem, open_image
from asyncrl.images.digests import image_digest, image_digests
from asyncrl.images.rows import Row, normalise_row

CACHE_BYTES = 256 << 20
Read = Callable[[int], tuple[Row, Path]]


async def store_images(images: Sequence[bytes], store: Callable[[dict[str, bytes]], Awaitable[None]]) -> None:
    """Give the run images by `ProducerClient.store_images`. Raises ImageProblem if it refuses one."""
    if not images:
        return
    try:
        await store({image_digest(image): image for image in images})
    except WorkError as error:
        if error.code != "image.invalid":
            raise
        raise ImageProblem(error.message) from None


class PromptImages:
    """Images by the rows of one data set. `read`: a row by its number, and the folder where its paths begin."""

    def __init__(self, data: DataConfig, read: Read) -> None:
        self._data = data
        self._read = read
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._rows: dict[str, int] = {}  # digest -> a row that holds it; these were decoded

    def row(self, number: int) -> Row:
        """The normalised row. Raises ImageProblem."""
        row, images = self._normalise(number)
        for digest, data in images.items():
            if digest not in self._rows:
                open_image(data)
                self._rows[digest] = number
            self._keep(digest, data)
        return row

    def images_of(self, row: Row) -> tuple[bytes, ...]:
        """The encoded images of a row that `row` returned, in order. Raises ImageProblem if they have changed."""
        found: dict[str, bytes] = {}
        for digest in image_digests(row):
            if digest in self._kept:
                self._kept.move_to_end(digest)
                found[digest] = self._kept[digest]
            elif digest not in found:
                found |= self._normalise(self._rows[digest])[1] if digest in self._rows else {}
            if digest not in found:
                raise ImageProblem(f"{digest[:8]} is no longer in the data")
        return tuple(found[digest] for digest in image_digests(row))

    def _normalise(self, number: int) -> tuple[Row, dict[str, bytes]]:
        row, folder = self._read(number)
        data = self._data
        return normalise_row(row, prompt_key=data.prompt_key, image_key=data.image_key, folder=folder)

    def _keep(self, digest: str, data: bytes) -> None:
        if digest not in self._kept:
            self._kept[digest] = data
            self._bytes += len(data)
        self._kept.move_to_end(digest)
        while self._bytes > CACHE_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])
