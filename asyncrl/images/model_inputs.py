"""From a prompt's images to the inputs of a vision-language model: placeholder tokens, pixels, positions.

An engine and the learner make the same inputs from the same bytes, so that their log-probs agree. Guarantees:
1. a prompt with n images has n placeholder tokens before `expand`, and afterwards as many for each image as the model
   has features of it;
2. pixels are those of transformers' image processor of the model folder, and depend on the bytes of the image alone;
   an InternVL gets tiles, as transformers' InternVLProcessor makes them;
3. placeholders beyond those of the images are plain tokens: a policy may sample one (`Row.stray`). So images behind
   sampled tokens have known places; those before are at the first placeholders.

Example: Qwen2.5-VL, patches of 14 pixels, 2 x 2 of them merged: an image of 56 x 84 pixels has 2 x 3 = 6 tokens, with
the positions (5, 5..6, 5..7) by time, height and width after a text of 5 tokens. The next token has position 8.
LLaVA-1.5: every image has 576 tokens, with positions as text.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncrl.config import Config
from asyncrl.config.model_facts import MROPE_MODELS, VISION_MODELS
from asyncrl.errors import ConfigError
from asyncrl.images.decoding import open_image
from asyncrl.images.rows import takes_images
from asyncrl.runtime.model_folder import load_config, load_image_processor, load_tokenizer, model_json

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int32]
KEPT_BYTES = 256 << 20  # of pixels, in the memory of one process
TOWERS = ("clip_vision_model", "siglip_vision_model", "internvl_vision")  # squares of one size


class Pixels(NamedTuple):
    """One image as the processor gives it: `arrays` by the name of the model's argument; `grid`: patches by time,
    height and width, or `(1, 1, tokens)` of a family with plain positions; `tokens`: placeholders that stand for it."""

    arrays: dict[str, Array]
    grid: tuple[int, int, int]
    tokens: int


class Row(NamedTuple):
    """A sequence of token ids as model inputs: `positions` i8 `[3, T]` (of a family with plain ones the last row);
    `stray` bool `[T]`: placeholders that stand for no image; `images` in the order of their tokens."""

    positions: Array
    stray: Array
    images: tuple[Pixels, ...]


class ImageInputs:
    def __init__(self, folder: str | Path, *, max_pixels: int = 0, trust_remote_code: bool = False) -> None:
        """`max_pixels`: larger images are scaled down to it; 0: to the processor's own limit.

        Raises:
            ConfigError: `config.model`: another family or vision tower, or no image processor in the folder.
        """
        kind = str(model_json(folder).get("model_type"))
        if kind not in VISION_MODELS:
            what = f"model_type {kind!r}: images work with {', '.join(VISION_MODELS)}"
            raise ConfigError("config.model", what, where=str(folder))
        try:
            model = load_config(folder, trust_remote_code=trust_remote_code)
            self._processor = load_image_processor(folder, trust_remote_code=trust_remote_code)
            self._around: list[int] = []
            if kind == "internvl":  # its chat template writes the placeholder alone, its processor the rest
                tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
                self._around = tokenizer.convert_tokens_to_ids(["<img>", "</img>"])
                if None in self._around:
                    raise ValueError("its tokenizer has no <img> and </img>")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError("config.model", f"no image processor: {error}", where=str(folder)) from None
        self.token = int(model.image_token_id)
        self.mrope = kind in MROPE_MODELS
        self.merge, self._tile, self._square = 1, 1, np.zeros(2, int)
        if self.mrope:
            self.merge = int(model.vision_config.spatial_merge_size)
        elif (tower := model.vision_config.model_type) in TOWERS:
            self._square = np.broadcast_to(model.vision_config.image_size, 2)
            self._tile = _tile_tokens(model)
        else:
            what = f"vision tower {tower!r}: {kind} works with {', '.join(TOWERS)}"
            raise ConfigError("config.model", what, where=str(folder))
        self.options = self._limit(kind, max_pixels)  # of the processor
        self._kept: OrderedDict[bytes, Pixels] = OrderedDict()
        self._kept_bytes = 0
        self._keeping = threading.Lock()  # the producer and its engine share one

    def _limit(self, kind: str, most: int) -> dict[str, Any]:
        """Options of the processor for images of at most `most` pixels; LLaVA has one size."""
        if kind == "internvl":
            return {"crop_to_patches": True, **({"max_patches": most // int(self._square.prod()) or 1} if most else {})}
        if not self.mrope or not most:
            return {}
        return {"size": {"shortest_edge": min(self._processor.size["shortest_edge"], most), "longest_edge": most}}

    def pixels(self, image: bytes) -> Pixels:
        """Inputs of one encoded image (PNG, JPEG, ...); the newest ones are kept."""
        with self._keeping:
            found = self._kept.get(image)
            if found is not None:
                self._kept.move_to_end(image)
                return found
        given = self._processor(images=[open_image(image)], return_tensors="np", **self.options)
        found = self._pack(np.asarray(given["pixel_values"], np.float32), given.get("image_grid_thw"))
        with self._keeping:
            self._keep(image, found)
        return found

    def _pack(self, values: Array, grids: Array | None) -> Pixels:
        """`grids` `[1, 3]`: of a family with positions by time, height and width."""
        if grids is None:
            tokens = len(values) * self._tile
            return Pixels({"pixel_values": values}, (1, 1, tokens), tokens)
        time, height, width = (int(one) for one in grids[0])
        arrays = {"pixel_values": values, "image_grid_thw": np.asarray(grids, np.int64)}
        return Pixels(arrays, (time, height, width), time * height * width // self.merge**2)

    def _keep(self, image: bytes, pixels: Pixels) -> None:
        if image in self._kept:
            return
        self._kept[image] = pixels
        self._kept_bytes += sum(array.nbytes for array in pixels.arrays.values())
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._kept_bytes -= sum(array.nbytes for array in old.arrays.values())

    def blank(self) -> Pixels:
        """The smallest image, for a pass that has none. It has one token; of a tile the first feature stands there."""
        if not self.mrope:
            return self._pack(np.zeros((1, 3, *self._square), np.float32), None)._replace(grid=(1, 1, 1), tokens=1)
        vision = self._processor
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        values = np.zeros((self.merge**2, width), np.float32)
        return self._pack(values, np.array([[1, self.merge, self.merge]]))

    def expand(self, ids: Sequence[int] | Ids, images: Sequence[bytes]) -> Ids:
        """The ids with each placeholder repeated for the tokens of its image, i4 `[P]`.

        Raises:
            ValueError: another number of placeholders than of images.
        """
        given = np.asarray(ids, np.int32)
        places = (given == self.token).nonzero()[0]
        if len(places) != len(images):
            raise ValueError(f"{len(images)} images for {len(places)} placeholders in the prompt")
        if self._around and len(places):
            both = np.stack((places, places + 1), axis=1).reshape(-1)
            given = np.insert(given, both, np.tile(self._around, len(places)))
            places = (given == self.token).nonzero()[0]
        counts = np.ones(len(given), np.int64)
        counts[places] = [self.pixels(image).tokens for image in images]
        return np.repeat(given, counts)

    def collapse(self, ids: Ids, images: Sequence[bytes]) -> Ids:
        """The ids with one placeholder for each image: what `expand` was given, for engines that expand themselves.

        Raises:
            ValueError: as `row`, or there are more placeholders.
        """
        row, given = self.row(ids, images), np.asarray(ids, np.int32)
        if row.stray.any():
            raise ValueError("placeholders that stand for no image")
        kept = given != self.token
        place = 0
        for one in row.images:
            place += int((given[place:] == self.token).argmax())
            kept[place] = True
            place += one.tokens
        found: Ids = given[kept]
        return found

    def row(self, ids: Ids, images: Sequence[bytes], places: Sequence[int] = ()) -> Row:
        """Inputs of a sequence whose parts with images `expand` made. `places`: where the last of the images begin, if
        sampled tokens come before them; the other images have the first placeholders.

        Raises:
            ValueError: the placeholders of an image are not there, or not next to each other.
        """
        found = tuple(self.pixels(image) for image in images)
        stray = np.asarray(ids) == self.token
        parts: list[Array] = []
        place = start = 0  # next token, next position
        for one, first in zip(found, self._find_places(stray, found, places), strict=True):
            end = first + one.tokens
            if first < place or not stray[first:end].all() or end > len(ids):
                raise ValueError(f"an image of {one.tokens} tokens has fewer placeholders")
            parts += [_text(first - place, start), self._grid(one.grid, start + first - place)]
            start += first - place + max(one.grid[1:]) // self.merge
            stray[first:end] = False
            place = end
        parts.append(_text(len(ids) - place, start))
        return Row(np.concatenate(parts, axis=1), stray, found)

    def places(self, ids: Ids, images: Sequence[bytes]) -> tuple[int, ...]:
        """Where each image begins in a sequence without sampled tokens that `expand` made."""
        found = [self.pixels(image) for image in images]
        return tuple(self._find_places(np.asarray(ids) == self.token, found, ()))

    @staticmethod
    def _find_places(held: Array, images: Sequence[Pixels], known: Sequence[int]) -> Iterator[int]:
        """`held` bool `[T]`: placeholders; `known`: places of the last images."""
        place = 0
        for one in images[: len(images) - len(known)]:
            later = held[place:].nonzero()[0]
            first = place + int(later[0]) if len(later) else len(held)
            yield first
            place = first + one.tokens
        yield from known

    def shift(self, ids: Ids, images: Sequence[bytes], places: Sequence[int] = ()) -> int:
        """Position of the token after a sequence, minus its place: 0 without images. Arguments as of `row`."""
        return int(self.row(ids, images, places).positions.max()) + 1 - len(ids) if images else 0

    def _grid(self, grid: tuple[int, int, int], start: int) -> Array:
        time, height, width = grid[0], grid[1] // self.merge, grid[2] // self.merge
        axes = np.meshgrid(np.arange(time), np.arange(height), np.arange(width), indexing="ij")
        return np.stack([axis.reshape(-1) for axis in axes]) + start


def _tile_tokens(model: Any) -> int:
    """Features of one square of a LLaVA or InternVL, by the shapes of the configuration."""
    vision = model.vision_config
    patches = int((np.broadcast_to(vision.image_size, 2) // vision.patch_size).prod())
    classes = vision.model_type == "clip_vision_model" and model.vision_feature_select_strategy == "full"
    return int(patches * getattr(model, "downsample_ratio", 1) ** 2) + int(classes)


def test_image(width: int, height: int) -> bytes:
    """A PNG for the checks at the start of an engine and a learner."""
    from PIL import Image

    data = io.BytesIO()
    values = (np.arange(width * height * 3) * 7 % 251).astype(np.uint8)
    Image.fromarray(values.reshape(height, width, 3)).save(data, "PNG")
    return data.getvalue()


def open_inputs(config: Config) -> ImageInputs | None:
    """Those of the run's model; None for a language model. Raises like `ImageInputs`."""
    if not takes_images(config.model.path):
        return None
    return _open(config.model.path, config.data.max_image_pixels, config.model.trust_remote_code)


@cache
def _open(folder: str, max_pixels: int, trust_remote_code: bool) -> ImageInputs:
    """One per process, so that its parts share the pixels that are kept."""
    return ImageInputs(folder, max_pixels=max_pixels, trust_remote_code=trust_remote_code)


def _text(count: int, start: int) -> Array:
    """Positions of text `[3, count]`: the same on every axis."""
    return np.tile(np.arange(start, start + count), (3, 1))
