"""Micro-batches of a vision-language model: their images and positions.

Guarantees:
1. the vision tower runs once for each different image of a micro-batch, however many samples have it;
2. every pass has an image, a blank one of one token if there is no other: parameters of the tower have a gradient, and
   ranks that shard them make the same calls. The blank is a sequence of its own that no token sees.

Example: a packed row of 8 samples of one prompt with two images: two images go through the tower, 16 places get them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.sections.learner import VisionConfig
from asyncrl.images.forward import Seen, see_images
from asyncrl.images.model_inputs import Array, ImageInputs, Pixels, open_inputs, test_image
from learners.batch.micro_batches import MicroBatch, Sample

#: Parts of the names of parameters before the language part, and of those between it and the vision tower.
VISION_PARTS = (".visual.", ".vision_tower.", ".multi_modal_projector.")
PROJECTOR = (".merger.", ".deepstack_merger_list.", ".multi_modal_projector.")


def vision_part(name: str) -> str:
    """The part of a vision-language model that a parameter belongs to: tower, projector, or empty for language.

    >>> vision_part("model.visual.merger.mlp.0.weight"), vision_part("model.language_model.norm.weight")
    ('projector', '')
    """
    if not any(part in f".{name}" for part in VISION_PARTS):
        return ""
    return "projector" if any(part in name for part in PROJECTOR) else "tower"


def freeze_parts(model: Any, settings: VisionConfig) -> None:
    """Freeze the parts that `[learner.vision]` leaves as they are."""
    trained = {"": True, "tower": settings.tower, "projector": settings.projector}
    for name, parameter in model.named_parameters():
        if not trained[vision_part(name)]:
            parameter.requires_grad_(False)


class Vision:
    def __init__(self, inputs: ImageInputs) -> None:
        self._inputs = inputs

    @staticmethod
    def open(config: Config) -> Vision | None:
        """Return None for a language model. Raises `config.model` for a family without support."""
        inputs = open_inputs(config)
        return None if inputs is None else Vision(inputs)

    def toy_samples(self) -> list[Sample]:
        """Return two sequences with images of two sizes for the check at the start."""
        found = []
        for sides in ([(64, 32)], [(32, 64), (48, 48)]):
            images = tuple(test_image(*side) for side in sides)
            prompt = self._inputs.expand([1, *[self._inputs.token, 2] * len(images), 1], images)
            tokens, ones = np.concatenate((prompt, [3, 2, 1])).astype(np.int32), np.ones(3, np.uint8)
            found.append(Sample(tokens, prompt.size, -ones.astype(np.float32), ones, 0.0, images=images))
        return found

    def see(self, micro: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor, Seen]:
        """Return ids `[R, W]`, positions `[4, R, W]` (text, time, height, width; plain ones `[R, W]`) and images of a
        micro-batch; with the blank image a packed row is one token longer, and others are one row more.
        """
        ids = micro.input_ids.reshape(-1, micro.width)
        text = micro.position_ids.reshape(-1, micro.width)
        space = np.zeros((3, ids.size), np.int64)
        stray = np.zeros(ids.size, bool)
        images: list[Pixels] = []
        counts = micro.image_counts if micro.image_counts.size else np.zeros(micro.cu_seqlens.size - 1, np.int32)
        ends = np.concatenate(([0], np.cumsum(counts)))
        for number, (start, end) in enumerate(itertools.pairwise(micro.cu_seqlens.tolist())):
            mine = slice(int(ends[number]), int(ends[number + 1]))
            places = [place for place in micro.image_places[mine].tolist() if place >= 0]
            row = self._inputs.row(micro.input_ids[start:end], micro.images[mine], places)
            space[:, start:end], stray[start:end] = row.positions, row.stray
            images += row.images
        positions = np.concatenate((text[None], space.reshape(3, *ids.shape)))
        stray = stray.reshape(ids.shape)
        if not images:
            images = [self._inputs.blank()]
            ids, positions, stray = _add_blank(ids, positions, stray, self._inputs.token)
        seen = see_images(images, stray, self._inputs.token, device)
        given = torch.from_numpy(ids.astype(np.int64)).to(device)
        positions = positions if self._inputs.mrope else positions[0]
        return seen.mask(given), torch.from_numpy(positions.astype(np.int64)).to(device), seen


def _add_blank(ids: Array, positions: Array, stray: Array, token: int) -> tuple[Array, Array, Array]:
    """Add a sequence with one placeholder: behind a packed row, or as a row of its own."""
    rows, width = ids.shape
    if rows == 1:
        more = np.full((1, 1), token, ids.dtype)
        none, place = np.zeros((1, 1), bool), np.zeros((4, 1, 1), positions.dtype)
        return np.hstack((ids, more)), np.concatenate((positions, place), 2), np.hstack((stray, none))
    more = np.zeros((1, width), ids.dtype)
    more[0, 0] = token
    place = np.broadcast_to(np.arange(width), (4, 1, width))
    none = np.zeros((1, width), bool)
    return np.vstack((ids, more)), np.concatenate((positions, place), 1), np.vstack((stray, none))
