"""Images for engines that are servers: what a request says of them, and whether the server saw the same prompt.

Guarantees:
1. a server gets an image upright, in RGB and on white, as a PNG: it decodes the pixels that the learner sees;
2. it gets one placeholder for each image and expands them itself. If its tokens of the prompt are not those of the
   request, the sample is refused: a server that drops images, or makes them larger or smaller, is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from asyncrl.engine import GenRequest
from asyncrl.errors import WorkError
from asyncrl.images.decoding import ImageProblem, data_uri, encode_png, open_image
from asyncrl.images.model_inputs import ImageInputs

KEPT = 16  # encoded images: the samples of a group ask for the same ones


@lru_cache(maxsize=KEPT)
def image_url(image: bytes) -> str:
    """The data URI of the PNG that stands for an encoded image. Raises ImageProblem."""
    return data_uri(encode_png(open_image(image)))


def encode_images(inputs: ImageInputs, request: GenRequest) -> None:
    """Do the slow part of a request, which takes milliseconds for each new image. Any thread.

    Raises:
        WorkError: `sample.invalid`: an image cannot be read.
    """
    try:
        for image in request.images:
            image_url(image)
            inputs.pixels(image)
    except ImageProblem as problem:
        raise WorkError("sample.invalid", problem.reason, where=request.id) from None


def collapse(inputs: ImageInputs, request: GenRequest, more: Sequence[int], *, where: str) -> list[int]:
    """The ids of the prompt and `more` sampled ones with one placeholder for each image.

    Raises:
        WorkError: `sample.invalid`: the placeholders are not those of the images; a server would take a sampled one for
            an image.
    """
    ids = [*request.prompt_ids.tolist(), *more]
    try:
        return [int(one) for one in inputs.collapse(ids, request.images)]  # type: ignore[arg-type]
    except ValueError as error:
        raise WorkError("sample.invalid", f"its images: {error}", where=where) from None


def check_prompt(told: Any, ids: Sequence[int], *, where: str) -> None:
    """Compare a server's ids of a prompt with those of the request. Raises `sample.invalid` if they differ."""
    if not isinstance(told, list) or told != list(ids):
        there = f"{len(told)} tokens" if isinstance(told, list) else "no tokens"
        what = f"the server reports {there} of a prompt with images that has {len(ids)}, or other ones"
        remedy = "give its image processor the limits of data.max_image_pixels, and use a version that asyncrl supports"
        raise WorkError("sample.invalid", what, where=where, remedy=remedy)


def content_parts(request: GenRequest, label: str) -> list[dict[str, str]]:
    """vLLM's fields of the images. `label`: of the weights; features of an image are kept for them alone."""
    return [
        {
            "type": "image_url",
            "url": image_url(image),
            "uuid": hashlib.blake2b(image + label.encode(), digest_size=16).hexdigest(),
        }
        for image in request.images
    ]
