"""Rows with images as the arguments of a forward pass of transformers, for the learner and the hf engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.images.model_inputs import ImageInputs, Pixels


class Seen(NamedTuple):
    """What a pass gets besides text: `arguments` of the model by name (None without images); `stray` bool `[R, W]`:
    placeholders that are plain tokens (None: there are none); `token`: the placeholder. For `body_arguments`: `tokens`
    of each image of `arguments`, and `order`: the image of each place, as several places may have the same one."""

    arguments: dict[str, Tensor] | None
    stray: Tensor | None
    token: int
    tokens: Sequence[int] = ()
    order: Sequence[int] = ()

    def mask(self, input_ids: Tensor) -> Tensor:
        """The ids `[R, W]` without stray placeholders, which transformers would count as images."""
        return input_ids if self.stray is None else input_ids.masked_fill(self.stray, 0)


def join_images(images: Sequence[Pixels], device: torch.device) -> dict[str, Tensor] | None:
    """The arguments for these images, in the order of their tokens; None without images."""
    if not images:
        return None
    return {
        name: torch.from_numpy(np.concatenate([one.arrays[name] for one in images])).to(device)
        for name in images[0].arrays
    }


def see_images(images: Sequence[Pixels], stray: npt.NDArray[np.bool_], token: int, device: torch.device) -> Seen:
    """What a pass gets of the images of its rows, in the order of their places: each different one once. `stray` as in
    `Seen`."""
    different = list({id(one): one for one in images}.values())  # pixels of an image are kept
    place = {id(one): number for number, one in enumerate(different)}
    held = torch.from_numpy(stray).to(device) if stray.any() else None
    tokens = [one.tokens for one in different]
    return Seen(join_images(different, device), held, token, tokens, [place[id(one)] for one in images])


def see_rows(
    inputs: ImageInputs, rows: Sequence[tuple[Any, ...]], width: int, device: torch.device
) -> tuple[Tensor, Seen]:
    """Positions `[3, R, width]` (plain ones `[R, width]`) and images of rows padded on the right; `rows`: arguments of
    `ImageInputs.row`, which may raise ValueError."""
    positions = np.tile(np.arange(width), (3, len(rows), 1))
    stray = np.zeros((len(rows), width), bool)
    images: list[Pixels] = []
    for number, one in enumerate(rows):
        row = inputs.row(*one)
        positions[:, number, : len(row.stray)] = row.positions
        stray[number, : len(row.stray)] = row.stray
        images += row.images
    seen = see_images(images, stray, inputs.token, device)
    return torch.from_numpy(positions if inputs.mrope else positions[-1]).to(device), seen


def body_arguments(body: Any, seen: Seen | None) -> dict[str, Any]:
    """The arguments for a model or its body: the vision tower runs once for each different image."""
    if seen is None or seen.arguments is None:
        return {}

    def place(features: Sequence[Tensor] | Tensor) -> Tensor:
        """Features of the images, or of their tiles, `[..., H]`, at all places: `[tokens, H]`."""
        whole = torch.cat(list(features))[: sum(seen.tokens)]  # a blank tile has more features than tokens
        parts = torch.split(whole, list(seen.tokens))
        return torch.cat([parts[image] for image in seen.order])

    found = body.get_image_features(**seen.arguments, return_dict=True)
    placed = place(found.pooler_output)
    found.pooler_output = placed if isinstance(found.pooler_output, Tensor) else [placed]
    if (layers := getattr(found, "deepstack_features", None)) is not None:  # of Qwen3-VL
        found.deepstack_features = [[place(layer)] for layer in layers]
    grids = {name: grid[list(seen.order)] for name, grid in seen.arguments.items() if name == "image_grid_thw"}
    return {"mm_encoder_outputs": {"image": found}, **grids}


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
