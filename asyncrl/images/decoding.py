"""Encoded images: what is accepted, and how they are opened.

Guarantees:
1. only Pillow's readers of PNG, JPEG, WebP, GIF and BMP see the bytes, whatever a file calls itself; SVG, HTML and
   anything else are refused;
2. nothing of more than `MAX_BYTES` or more than `max_pixels` is decoded: the size is in the header, so a small file
   cannot ask for much memory;
3. any failure of a reader is an `ImageProblem` with a reason.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 << 20  # of one image that is decoded at all: 192 MiB in RGB
MAX_BYTES = 32 << 20  # of one encoded image
_TURNED = frozenset({5, 6, 7, 8})  # EXIF orientations that swap the sides
_ORIENTATION = 0x0112
_WHITE = (255, 255, 255)


class ImageProblem(Exception):
    """An image that cannot be used; `reason` begins with "image: "."""

    def __init__(self, reason: str) -> None:
        self.reason = reason if reason.startswith("image: ") else f"image: {reason}"
        super().__init__(self.reason)


def check_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height in pixels, as `open_image` gives them; from the header alone. Raises ImageProblem."""
    with _opened(data, max_pixels) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _TURNED else (width, height)


def open_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image in RGB, fully decoded: its first frame, upright by its EXIF data, on white where it is transparent.
    Raises ImageProblem."""
    require_pillow()
    from PIL import Image, ImageOps

    with _opened(data, max_pixels) as image:
        image.load()
        upright = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
        if "A" not in upright.mode and "transparency" not in upright.info:
            return upright.convert("RGB")
        layer = upright.convert("RGBA")
        page = Image.new("RGB", layer.size, _WHITE)
        page.paste(layer, mask=layer.getchannel("A"))
        return page


def thumbnail(data: bytes, *, side: int) -> bytes:
    """A small PNG of an image, at most `side` pixels wide and high. Raises ImageProblem."""
    image = open_image(data)
    image.thumbnail((side, side))
    return encode_png(image)


def encode_png(image: Any) -> bytes:
    """A PIL image as PNG; modes that PNG does not have become RGB. Raises ImageProblem."""
    try:
        kept = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
        buffer = BytesIO()
        kept.save(buffer, format="PNG")
    except Exception as error:  # it may be read lazily from a damaged file
        raise ImageProblem(f"it cannot be read: {_describe(error)}") from None
    return buffer.getvalue()


def data_uri(image: bytes) -> str:
    """An encoded image as a data URI.

    >>> data_uri(b"GIF89a")
    'data:image/gif;base64,R0lGODlh'
    """
    kinds = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
    kind = next((name for start, name in kinds.items() if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def require_pillow() -> Any:
    """The module `PIL.Image`. Raises `config.extra` without it."""
    try:
        from PIL import Image
    except ImportError:
        remedy = 'pip install "asyncrl[hf]", or pillow alone'
        raise ConfigError("config.extra", "images need the package pillow", remedy=remedy) from None
    return Image


@contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Any]:
    """The image with its header read; errors inside the block are problems of the image as well."""
    pillow = require_pillow()
    if len(data) > MAX_BYTES:
        raise ImageProblem(f"{len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        with pillow.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width < 1 or height < 1:
                raise ImageProblem(f"{width} x {height} pixels")
            if width * height > max_pixels:
                raise ImageProblem(f"{width} x {height} pixels, at most {max_pixels} are decoded")
            yield image
    except ImageProblem:
        raise
    except pillow.DecompressionBombError as error:
        raise ImageProblem(f"it has too many pixels: {error}") from None
    except pillow.UnidentifiedImageError:
        raise ImageProblem(
            f"no reader of PNG, JPEG, WebP, GIF or BMP takes it: it begins with {bytes(data[:12])!r}"
        ) from None
    except Exception as error:  # readers raise many kinds for damaged bytes
        raise ImageProblem(f"damaged: {_describe(error)}") from None


def _orientation(image: Any) -> int:
    """The EXIF orientation, 1 to 8; 1: upright, or not told in the header."""
    return int(image.getexif().get(_ORIENTATION, 1)) if "exif" in image.info else 1


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
