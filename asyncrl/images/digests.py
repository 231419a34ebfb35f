"""Digests of images: how rows name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import blake3

IMAGES = "images"  # column of the digests in a normalised row
_DIGEST = re.compile(r"[0-9a-f]{64}")


def image_digest(data: bytes) -> str:
    """The name of an encoded image: BLAKE3 of its bytes, 64 hexadecimal letters."""
    return blake3.blake3(data).hexdigest()


def is_digest(value: object) -> bool:
    """Whether this can be the digest of an image."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def image_digests(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The digests of a normalised row, in order; empty for any other row."""
    found = row.get(IMAGES)
    return tuple(found) if isinstance(found, list) and all(map(is_digest, found)) else ()
