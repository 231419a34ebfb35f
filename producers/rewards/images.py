"""Images for reward functions of the user: digests in a row become PIL images, in the child process.

Guarantees:
1. a function finds the images of a prompt in `row["images"]` and `extra_info["images"]`, in RGB, in the order of the
   prompt, and those that an environment showed later in `images`; each sample has its own, so a function may change
   them;
2. an image that cannot be opened is a failure of its samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.config.sections.reward import reward_kind
from asyncrl.images.decoding import ImageProblem, open_image
from asyncrl.images.digests import IMAGES, image_digests
from producers.rewards.sample import RewardSample


def sees_images(functions: Iterable[str]) -> bool:
    """Whether one of these functions is the user's own: scorers that ship and servers read text alone."""
    return any(reward_kind(function) in ("module", "file") for function in functions)


def select_images(samples: Sequence[RewardSample], images: Mapping[str, bytes]) -> dict[str, bytes]:
    """The encoded images that these samples name."""
    named = {digest for sample in samples for digest in (*image_digests(sample.row), *sample.images)}
    return {digest: images[digest] for digest in named if digest in images}


def show_images(samples: Sequence[RewardSample], images: Mapping[str, bytes]) -> list[RewardSample | ImageProblem]:
    """The samples with their images; each image is decoded once."""
    opened: dict[str, Any] = {}
    return [_show(sample, images, opened) for sample in samples]


def _show(sample: RewardSample, images: Mapping[str, bytes], opened: dict[str, Any]) -> RewardSample | ImageProblem:
    shown = image_digests(sample.row)
    digests = (*shown, *sample.images)
    if not digests:
        return sample
    try:
        for digest in digests:
            if digest not in opened:
                if digest not in images:
                    raise ImageProblem(f"{digest[:8]} is missing")
                opened[digest] = open_image(images[digest])
    except ImageProblem as problem:
        return problem
    copies = [opened[digest].copy() for digest in digests]
    found, extra = copies[: len(shown)], sample.extra_info
    sample = msgspec.structs.replace(sample, images=copies[len(shown) :])
    if not shown:
        return sample
    return msgspec.structs.replace(
        sample,
        row={**sample.row, IMAGES: found},
        extra_info={**extra, IMAGES: found} if isinstance(extra, dict) else extra,
    )
