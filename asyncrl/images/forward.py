"""Rows with images as the arguments of a forward pass of transformers, for the learner and the hf engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.images.model_inputs import Pixels


class Seen(NamedTuple):
    """What a pass gets besides text: `arguments` of the model by name (None without images); `stray` bool `[R, W]`:
    placeholders that are plain tokens (None: there are none); `token`: the placeholder; `order`: the image of each
    place, where several places have the same one (None: each image has one place)."""

    arguments: dict[str, Tensor] | None
    stray: Tensor | None
    token: int
    order: list[int] | None = None

    def mask(self, input_ids: Tensor) -> Tensor:
        """The ids `[R, W]` without stray placeholders, which transformers would count as images."""
        return input_ids if self.stray is None else input_ids.masked_fill(self.stray, 0)


def join_images(images: Sequence[Pixels], device: torch.device) -> dict[str, Tensor] | None:
    """The arguments for these images, in the order of their tokens; None without images."""
    if not images:
        return None
    joined: dict[str, Tensor] = {
        name: torch.from_numpy(np.concatenate([one.arrays[name] for one in images])).to(device)
        for name in images[0].arrays
    }
    return {**joined, "image_grid_thw": torch.tensor([one.grid for one in images], device=device)}


def body_arguments(body: Any, seen: Seen | None) -> dict[str, Any]:
    """The arguments for the body of a model: its vision tower runs once for each different image."""
    if seen is None or seen.arguments is None:
        return {}
    if seen.order is None:
        return dict(seen.arguments)
    found = body.get_image_features(**seen.arguments, return_dict=True)
    found.pooler_output = [found.pooler_output[place] for place in seen.order]
    if (layers := getattr(found, "deepstack_features", None)) is not None:  # of Qwen3-VL
        found.deepstack_features = [[layer[place] for place in seen.order] for layer in layers]
    grid = seen.arguments["image_grid_thw"][seen.order]
    return {"mm_encoder_outputs": {"image": found}, "image_grid_thw": grid}


@contextmanager
def stray_placeholders(model: Any, seen: Seen | None) -> Iterator[None]:
    """Give stray placeholders, which `Seen.mask` replaced, their own embedding in this block."""
    if seen is None or seen.stray is None:
        yield
        return
    stray = seen.stray[..., None]

    def embed(module: Any, _given: Any, found: Tensor) -> Tensor:
        return torch.where(stray, module.weight[seen.token].to(found.dtype), found)

    hook = model.get_input_embeddings().register_forward_hook(embed)
    try:
        yield
    finally:
        hook.remove()
