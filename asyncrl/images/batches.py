"""The images of a claimed batch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncrl.images.decoding import ImageProblem
from asyncrl.images.digests import image_digests
from asyncrl.images.folder import ImageFolder
from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData


def _digests_of(group: GroupData) -> list[str]:
    """Of the images of its prompt and of its samples."""
    return [*image_digests(group.row), *[digest for sample in group.samples for _, digest in sample.images]]


def digests_in(batch: ClaimedBatch) -> list[str]:
    """The digests of all images of its prompts and samples, each once."""
    return list(dict.fromkeys(digest for group in batch.groups for digest in _digests_of(group)))


def add_images(batch: ClaimedBatch, images: Mapping[str, bytes], problems: Mapping[str, str]) -> ClaimedBatch:
    """The batch with its images. A group with a bad one (`problems`: digest -> reason) is named in `invalid`."""
    bad = {
        group.group: problems[digest] for group in batch.groups for digest in _digests_of(group) if digest in problems
    }
    kept = tuple(group for group in batch.groups if group.group not in bad)
    batch = msgspec.structs.replace(batch, groups=kept, invalid={**batch.invalid, **bad})
    return msgspec.structs.replace(batch, images={digest: images[digest] for digest in digests_in(batch)})


def read_images(batch: ClaimedBatch, folder: ImageFolder) -> ClaimedBatch:
    """The batch with its images from the folder of a run."""
    images: dict[str, bytes] = {}
    problems: dict[str, str] = {}
    for digest in digests_in(batch):
        try:
            images[digest] = folder.get(digest)
        except ImageProblem as problem:
            problems[digest] = problem.reason
    return add_images(batch, images, problems)
