"""Finds images, video and audio in rows of the data and in observations: every part works on text alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Columns of media, and words in the type or the keys of a part of a message; those of images first.
MEDIA_COLUMNS = ("images", "videos", "audios")
MEDIA_WORDS = ("image", "video", "audio")
MEDIA_REMEDY = "remove the media from the rows, or use rows of text alone: a model would not see them"
FRAMES_REMEDY = (
    "a video is read as the list of its frames: extract them, for example by `ffmpeg -i clip.mp4 -vf fps=1 %03d.png`"
)


def find_media(row: Mapping[str, Any], *, sees: bool = False) -> str:
    """The first place of an image, a video or audio in a row; empty without one. Empty columns count as none. `sees`:
    the model takes images, which then do not count, nor do videos that are lists of their frames.

    >>> find_media({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "images": []})
    "a part 'image_url' of column 'prompt'"
    """
    for column in MEDIA_COLUMNS[sees:]:
        held = row.get(column)
        if sees and isinstance(held, list) and all(frames_of(video) is not None for video in held):
            continue
        if held is not None and (not hasattr(held, "__len__") or len(held)):
            return f"column {column!r}"
    for column, value in row.items():
        for message in value if isinstance(value, list) else [value]:
            content = message.get("content") if isinstance(message, Mapping) and "role" in message else None
            for part in content if isinstance(content, list) else ():
                shown = sees and isinstance(part, Mapping) and part.get("type") == "video"
                if shown and (part.get("video") is None or frames_of(part) is not None):
                    continue
                if found := _media_of(part, MEDIA_WORDS[sees:]):
                    return f"a part {found!r} of column {column!r}"
    return ""


def frames_of(video: Any) -> list[Any] | None:
    """The frames of a video that is a list of them, or `{"video": list}`; None for any other form."""
    held = video.get("video") if isinstance(video, Mapping) else video
    return held if isinstance(held, list) and held else None


def _media_of(part: Any, words: Sequence[str]) -> str:
    """The kind of a part of a message that is no text."""
    if not isinstance(part, Mapping):
        return ""
    names = (str(part.get("type") or ""), *(str(key) for key, value in part.items() if value is not None))
    return next((name for name in names if any(word in name for word in words)), "")
