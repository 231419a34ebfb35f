"""Groups of a guest whose images are not those of their tokens: the learner quarantines them and trains the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_batches import a_group, a_sample
from msgspec.structs import replace
from test_learner_loop import gang, make_config, make_learner, model_dir
from vision_models import png, vision_folder

from asyncrl.images.digests import image_digest
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData
from learners.batch.assembly import image_problem
from learners.gang.gang import Gang

assert gang and model_dir  # fixtures
IMAGE, LARGE = png(48, 32, 1), png(64, 64, 2)
DAMAGED = IMAGE[:-40]  # its header, all that a buffer reads, is whole
HELD = {image_digest(one): one for one in (IMAGE, LARGE, DAMAGED)}


def group(number: int, prompt: Any, *, row: tuple[bytes, ...] = (), later: tuple[tuple[int, bytes], ...] = ()) -> Any:
    response = np.array([8, 9, 10, 2], np.int32)
    images = tuple((place, image_digest(image)) for place, image in later)
    masks = np.array([1, 0, 0, 1], np.uint8)
    samples = [
        replace(a_sample(index, response, [-1.0] * 4, float(index), mask=masks), images=images) for index in range(2)
    ]
    return a_group(number, prompt, samples, row={"images": [image_digest(image) for image in row]} if row else {})


def groups(inputs: ImageInputs) -> tuple[GroupData, dict[int, tuple[GroupData, str]]]:
    """A right group, and wrong ones with a part of their reason."""
    right = inputs.expand([5, inputs.token, 7], (IMAGE,))
    text = np.array([5, 6, 7], np.int32)
    return group(1, right, row=(IMAGE,)), {
        2: (group(2, text, row=(IMAGE,)), "fewer placeholders"),
        3: (group(3, right, row=(LARGE,)), "fewer placeholders"),
        4: (group(4, right, row=(IMAGE,), later=((1, IMAGE),)), "fewer placeholders"),
        5: (group(5, text, row=(DAMAGED,)), "damaged"),
    }


def test_the_learner_trains_the_rest(gang: Gang, tmp_path: Path) -> None:
    folder = vision_folder("qwen2_5_vl")
    config = make_config(folder, tmp_path / "run", steps=1)
    learner, buffer, _, services = make_learner(config, gang)
    good, bad = groups(ImageInputs(folder))
    every = (*(one for one, _ in bad.values()), good)
    buffer.batches[1] = ClaimedBatch(1, 0, False, every, {}, {}, images=HELD)
    assert learner.run() == ""
    services.close()
    told = {call[2][0]: call[3] for call in buffer.calls if call[0] == "quarantine"}
    assert told.keys() == bad.keys(), told
    for number, (_, why) in bad.items():
        assert told[number].startswith("image: ") and why in told[number]
    assert "commit" in buffer.names()


@pytest.mark.parametrize("family", ["llava", "internvl", "qwen3_vl"])
def test_images_of_every_family_are_looked_at(family: str) -> None:
    inputs = ImageInputs(vision_folder(family))
    good, bad = groups(inputs)
    assert image_problem(good, HELD, inputs) == ""
    assert "reads text alone" in image_problem(good, HELD, None)
    larger = inputs.pixels(LARGE).tokens > inputs.pixels(IMAGE).tokens  # else it has its placeholders
    for number, (one, why) in bad.items():
        assert (why in image_problem(one, HELD, inputs)) == (larger or number != 3)
