"""A vision-language model on two ranks: passes with images, and passes of which one rank's have none.

`ranks` runs `run_all` on two ranks, `test_vision_ranks.py` on one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ranks
import vision_models
from backend_contract import digest

from asyncrl.images.model_inputs import ImageInputs
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.batch.micro_batches import Sample, packed_row
from learners.gang.gang import Gang

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava")
#: Images of the samples of each step, by rank: a blank takes the place of those that a rank does not have.
STEPS = ((((48, 32), (32, 80)), ()), ((), ((48, 48),)), ((), ()), (((32, 32),), ((64, 48),)))
LINES = 'data.max_prompt_tokens = 64\n[[reward]]\nfunction = "a:b"'


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Weights after the steps, and the log-probs of the last one, by family."""
    found = {}
    for family in FAMILIES:
        folder = out / family
        if gang.lead:
            vision_models.write_vision_folder(folder, family)
        gang.barrier()
        found[family] = train(folder, gang)
    return found


def train(folder: Path, gang: Gang) -> dict[str, Any]:
    config = ranks.settings(folder, LINES, f"learner.ranks={gang.size}")
    backend = FSDP2Backend(config, gang)
    inputs = ImageInputs(folder)
    logprobs: list[list[float]] = []
    for number, shown in enumerate(STEPS):
        samples = [make_sample(inputs, sides, seed=2 * number + rank) for rank, sides in enumerate(shown)]
        mine = samples if gang.size == 1 else [samples[gang.rank]]
        rows = [packed_row([sample]) for sample in mine]
        backend.train(rows, lambda values, *_: (-values.sum() / 8, {}))
        backend.step(lr=1e-3, max_norm=1e9)
        logprobs = [values.tolist() for values in backend.forward_logprobs(rows)]
    weights, *_ = digest(backend)
    return {"weights": weights, "logprobs": logprobs}


def make_sample(inputs: ImageInputs, sides: tuple[tuple[int, int], ...], *, seed: int) -> Sample:
    images = tuple(vision_models.png(*side, seed) for side in sides)
    prompt = inputs.expand([5, *[9, inputs.token, 11] * len(images), 7], images)
    answer = np.random.default_rng(seed).integers(3, 30, 5)
    ids = np.concatenate([prompt, answer]).astype(np.int32)
    return Sample(ids, len(prompt), np.zeros(5, np.float32), np.ones(5, np.uint8), 1.0, images=images)
