"""Images in a conversation: messages hold them, templates get their places, sessions their tokens.

Guarantees:
1. a part `{"type": "image", "image": ...}` of a message holds encoded bytes from its arrival on (a PIL image as PNG);
2. the images of a text are as many as its placeholders, so that words of an environment never pass for an image;
3. a bad image, and one that model or engine cannot take, fails the sample (`environment.observation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.environment import EnvironmentFailure, Message
from asyncrl.images.decoding import ImageProblem, check_image, open_image
from asyncrl.images.digests import IMAGES
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.images.rows import IMAGE_PART, find_held, frame_parts, is_image_part, read_image


class Shown(NamedTuple):
    """Token ids, the encoded images in them, and where each begins."""

    ids: list[int]
    images: tuple[bytes, ...] = ()
    places: tuple[int, ...] = ()


def expand(ids: list[int], images: tuple[bytes, ...], inputs: ImageInputs | None) -> Shown:
    """The ids of messages with as many placeholders as each of their images has tokens."""
    if not images or inputs is None:
        return Shown(ids)
    try:
        found = inputs.expand(ids, images)
        return Shown(found.tolist(), images, inputs.places(found, images))
    except (ImageProblem, ValueError) as problem:
        raise EnvironmentFailure("observation", str(problem)) from None


def hold_images(messages: Sequence[Message], given: Sequence[bytes] = ()) -> list[dict[str, Any]]:
    """The messages with encoded bytes in their parts of images. `given`: of the parts that hold none, in order."""
    left = iter(given)
    found = [_hold(message, left) for message in messages]
    if next(left, None) is not None:
        raise EnvironmentFailure("observation", "a prompt has fewer places than images")
    return found


def _hold(message: Message, left: Iterator[bytes]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [one for part in content for one in frame_parts(part)]
    return {**message, "content": [_part(part, left) if is_image_part(part) else part for part in parts]}


def _part(part: Mapping[str, Any], left: Iterator[bytes]) -> dict[str, Any]:
    try:
        held = find_held(part)
        data = next(left, None) if held is None else read_image(held)
        if data is None:
            raise ImageProblem("a part of the type image holds none")
        check_image(data)
    except ImageProblem as problem:
        raise EnvironmentFailure("observation", problem.reason) from None
    return {"type": IMAGE_PART, "image": data}


def split_images(messages: Sequence[Message]) -> tuple[list[Message], tuple[bytes, ...]]:
    """The messages of `hold_images` as a template gets them, and their images."""
    images: list[bytes] = []
    found: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            images += [part["image"] for part in content if is_image_part(part)]
            content = [{"type": IMAGE_PART} if is_image_part(part) else part for part in content]
            found.append({**message, "content": content})
        else:
            found.append(message)
    return found, tuple(images)


def open_row(row: Mapping[str, Any], images: Sequence[bytes]) -> dict[str, Any]:
    """The row as an environment gets it: its images are PIL images in RGB, for this sample alone."""
    return {**row, IMAGES: [open_image(image) for image in images]} if images else dict(row)
