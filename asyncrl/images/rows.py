"""Rows with images: from the forms of data sets to references, which travel.

Accepted are verl's column of images (bytes, `{"bytes": ..., "path": ...}` of `datasets`, paths, data URIs, PIL images)
and parts of chat messages (`image`, `image_url`). `<image>` in a text stands for the next image of the column, and so
does a part `{"type": "image"}` without an image. A video is a list of images, its frames: in the column `videos`, which
`<video>` and a part `{"type": "video"}` stand for, or in such a part. Each frame is an image. In a normalised row

- `row["images"]` lists the digests (`asyncrl.images.digests`) in the order of appearance;
- `{"type": "image"}` stands at the place of each image in the messages of the prompt.

Guarantees:
1. a row without images is returned as it is;
2. every image has its place and every place its image, or the row is refused;
3. nothing is fetched over the network; files of video, audio, and images outside of columns and prompt are refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, unquote_to_bytes, urlparse

from asyncrl.config.media import FRAMES_REMEDY, find_media, frames_of
from asyncrl.config.model_facts import list_senses
from asyncrl.images.decoding import MAX_BYTES, ImageProblem, encode_png
from asyncrl.images.digests import IMAGES, image_digest
from asyncrl.runtime.model_folder import model_json

Row = dict[str, Any]
MARK, VIDEO_MARK = "<image>", "<video>"
VIDEOS = "videos"  # column of lists of frames
IMAGE_PART, VIDEO_PART = "image", "video"
_PLACE = {"type": IMAGE_PART}
#: Keys of a mapping that may hold the image, the first that is set counts.
_HOLDERS = ("bytes", "image", "image_url", "path", "url")


class Normalised(NamedTuple):
    """A row, and the encoded bytes of its images by digest."""

    row: Row
    images: dict[str, bytes]


def takes_images(model_path: str | Path) -> bool:
    """Whether the model of a folder sees images, by its config.json."""
    return "vision" in list_senses(model_json(model_path))


def normalise_row(row: Row, *, prompt_key: str, image_key: str, folder: Path) -> Normalised:
    """The row with references instead of images. `folder`: where relative paths begin.

    Raises:
        ImageProblem: an image cannot be read, has no place, or is missing at a place; the prompt is no chat.
    """
    if image_key != IMAGES and row.get(IMAGES):
        raise ImageProblem(f"column {IMAGES!r} is taken by the digests, and data.image_key = {image_key!r}")
    prompt, videos = row.get(prompt_key), row.get(VIDEOS) or []
    others = {name: value for name, value in row.items() if name not in (prompt_key, image_key, VIDEOS)}
    if media := find_media(others) or find_media({prompt_key: prompt, VIDEOS: videos}, sees=True):
        what = f"media: it has {media}; images are read from columns {image_key!r} and {prompt_key!r}"
        raise ImageProblem(f"{what}. {FRAMES_REMEDY}" if "video" in media else what)
    column = [read_image(item, folder) for item in _listed(row.get(image_key))]
    clips = [[read_image(frame, folder) for frame in frames_of(video) or ()] for video in videos]
    chat = isinstance(prompt, list)
    if (column or clips) and not chat:
        raise ImageProblem("the prompt is plain text, and images need chat messages (data.as_chat = true makes one)")
    walk = _Places(column, clips, folder)
    messages = [walk.message(one) for one in prompt or ()] if chat else prompt
    marks = walk.marks if chat else str(prompt or "").count(MARK)
    if marks != len(column):
        raise ImageProblem(f"{len(column)} images in column {image_key!r}, and {marks} places in the prompt ({MARK})")
    if walk.clips != len(clips):
        what = f"{len(clips)} videos in column {VIDEOS!r}, and {walk.clips} places in the prompt ({VIDEO_MARK})"
        raise ImageProblem(what)
    if not walk.images:
        return Normalised({**others, prompt_key: messages} if chat else row, {})
    digests = [image_digest(data) for data in walk.images]
    found = {**others, prompt_key: messages, IMAGES: digests}
    return Normalised(found, dict(zip(digests, walk.images, strict=True)))


def portable_row(row: Mapping[str, Any]) -> Row:
    """The row with data URIs instead of bytes and PIL images, in the column of images and in lists and mappings: JSON
    holds it. Raises ImageProblem."""
    return {
        name: _portable(value) if name == IMAGES or isinstance(value, list | dict) or is_pil(value) else value
        for name, value in row.items()
    }


def _portable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if is_pil(value):
        value = encode_png(value)
    if isinstance(value, bytes):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    return value


def is_pil(value: Any) -> bool:
    """Whether it is a PIL image, without importing the package."""
    return hasattr(value, "mode") and hasattr(value, "getpixel")


class _Places:
    """Walks the messages of one prompt. `images`: those met so far; `marks`, `clips`: places of images and videos
    of the columns."""

    def __init__(self, column: list[bytes], videos: list[list[bytes]], folder: Path) -> None:
        self.images: list[bytes] = []
        self.marks = self.clips = 0
        self._column = column
        self._videos = videos
        self._mark = re.compile(f"({MARK}|{VIDEO_MARK})" if videos else f"({MARK})")
        self._folder = folder

    def message(self, message: Any) -> Any:
        """The message with its images as places; a text without any stays a text."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            return {**message, "content": [new for part in content for new in self._part(part)]}
        if isinstance(content, str) and self._mark.search(content):
            return {**message, "content": list(self._text({"type": "text", "text": content}))}
        return message

    def _part(self, part: Any) -> Iterator[Any]:
        if not isinstance(part, Mapping):
            yield part
            return
        # Tables fill the keys of other parts with None, which templates take for images.
        part = {key: value for key, value in part.items() if value is not None}
        if isinstance(part.get("text"), str):
            yield from self._text(part)
        elif part.get("type") == VIDEO_PART:
            frames = frames_of(part)
            yield from self._clip() if frames is None else self._show(read_image(one, self._folder) for one in frames)
        elif not is_image_part(part):
            yield part
        elif (held := find_held(part)) is None:
            yield self._next()
        else:
            self.images.append(read_image(held, self._folder))
            yield dict(_PLACE)

    def _text(self, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A part of text, cut at the places of images."""
        pieces = self._mark.split(part["text"])
        for piece in pieces:
            if piece == MARK:
                yield self._next()
            elif piece == VIDEO_MARK and self._videos:
                yield from self._clip()
            elif piece or len(pieces) == 1:
                yield {**part, "text": piece}

    def _clip(self) -> Iterator[dict[str, str]]:
        """The places of the frames of the next video of the column; the counts are compared at the end."""
        self.clips += 1
        return self._show(self._videos[self.clips - 1] if self.clips <= len(self._videos) else ())

    def _show(self, images: Iterable[bytes]) -> Iterator[dict[str, str]]:
        for image in images:
            self.images.append(image)
            yield dict(_PLACE)

    def _next(self) -> dict[str, str]:
        """The place of the next image of the column."""
        self.marks += 1
        # An image without a counterpart: the counts are compared at the end. The place is marked meanwhile.
        self.images.append(self._column[self.marks - 1] if self.marks <= len(self._column) else b"")
        return dict(_PLACE)


def frame_parts(part: Any) -> list[Any]:
    """The part; a video as parts of its frames."""
    frames = frames_of(part) if isinstance(part, Mapping) and part.get("type") == VIDEO_PART else None
    return [part] if frames is None else [{"type": IMAGE_PART, "image": frame} for frame in frames]


def is_image_part(part: Any) -> bool:
    """Whether a part of a message stands for an image."""
    if not isinstance(part, Mapping):
        return False
    return str(part.get("type")).startswith(IMAGE_PART) or "image" in part or "image_url" in part


def find_held(value: Mapping[str, Any]) -> Any:
    """What a part or an entry of the column holds as its image; None: nothing."""
    return next((value[key] for key in _HOLDERS if value.get(key) is not None), None)


def _listed(value: Any) -> list[Any]:
    """The images of a column: a list, or one image."""
    if value is None or (isinstance(value, str | bytes) and not value):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def read_image(value: Any, folder: Path | None = None) -> bytes:
    """The encoded bytes of an image in any accepted form; without `folder` files are refused. Raises ImageProblem."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping) and (held := find_held(value)) is not None:
        return read_image(held, folder)
    if isinstance(value, str):
        return _read_text(value, folder)
    if is_pil(value):
        return encode_png(value)
    raise ImageProblem(f"{type(value).__name__} is no image: give bytes, a path, a data URI or a PIL image")


def _read_text(text: str, folder: Path | None) -> bytes:
    """An image behind a data URI, a file:// address or a path."""
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        try:
            return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        except binascii.Error as error:
            raise ImageProblem(f"a data URI that is not base64: {error}") from None
    if folder is None:
        raise ImageProblem(f"{text[:100]!r} names a file: open it, and give the image")
    if "://" in text and not text.startswith("file://"):
        raise ImageProblem(f"{text[:100]!r}: nothing is fetched over the network; save the image and name the file")
    path = folder / (unquote(urlparse(text).path) if text.startswith("file://") else text)
    try:
        if not path.is_file():
            raise ImageProblem(f"no file {str(path)[:300]!r}")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # `check_image` refuses what is longer
    except (OSError, ValueError) as error:
        raise ImageProblem(f"{str(path)[:300]!r} cannot be read: {error}") from None
