"""Messages about images: producers store what rows and samples name, reward workers and the learner fetch it."""

from __future__ import annotations

from asyncrl.wire.base import Message, Name


class StoreImages(Message, frozen=True, tag=80):
    """Images of rows and samples that follow: one payload frame each, encoded as they came. `digests`: BLAKE3 of each,
    64 hexadecimal letters. Answer: `Ok`, or `Refused` with `image.invalid`: then none of them is stored.
    """

    producer: Name
    digests: tuple[str, ...]


class FetchImages(Message, frozen=True, tag=81):
    """Ask for images by digest. Answer: `Images`."""

    digests: tuple[str, ...]


class Images(Message, frozen=True, tag=82):
    """The first of the requested images, one payload frame each; ask again for the others. `missing`: digest -> why it
    cannot be had.
    """

    digests: tuple[str, ...]
    missing: dict[str, str] = {}
