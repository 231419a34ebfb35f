"""Warm start of the demonstration task of images (`asyncrl.demo.shapes`).

A tiny vision-language model first learns to see from a correct teacher; a teacher that mostly guesses then makes it
uncertain, so that reinforcement learning can improve it. Command line (about a minute on one core)::

    python -m learners.warm_start.shapes --out DIR [--family qwen2_5_vl] [--seed 0]

Guarantee: a folder with `warm_start.json` is complete; a folder of the same recipe is not written again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from asyncrl.demo import shapes
from learners.warm_start.arithmetic import Stage, is_current, recipe_hash, train_stages, write_marker
from learners.warm_start.sft import IGNORE
from learners.warm_start.tiny_model import save_model
from learners.warm_start.tiny_vision import (
    FAMILIES,
    Family,
    image_processor,
    make_tiny_vision,
    make_vision_tokenizer,
)

ROWS = 64  # demonstrations per step
STAGES = (
    Stage(steps=180, lr=3e-3, noise=0.0),
    Stage(steps=60, lr=2e-4, noise=0.7, warmup=5, optimizer="adamw"),
)


def encode_rows(
    texts: Sequence[tuple[str, str]], pictures: Sequence[Any], tokenizer: Any, processor: Any
) -> dict[str, torch.Tensor]:
    """Return a right-padded batch of questions with one picture each, and their answers.

    Args:
        texts: pairs of question and answer, one per row.
        pictures: one picture per row.
        tokenizer: of `make_vision_tokenizer`.
        processor: of `image_processor`.

    Returns:
        `input_ids`, `labels` and `mm_token_type_ids` (1: a token of a picture), int64, all (rows, tokens);
        `pixel_values` (patches, values) and `image_grid_thw` (rows, 3).
    """
    arrays = processor(list(pictures), return_tensors="pt")
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows, labels = [], []
    for (question, answer), grid in zip(texts, arrays["image_grid_thw"].tolist(), strict=True):
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        count = grid[0] * grid[1] * grid[2] // processor.merge_size**2
        prompt = [token for one in tokenizer.encode(text) for token in [one] * (count if one == image else 1)]
        said = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + said))
        labels.append(torch.tensor([IGNORE] * len(prompt) + said))
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return {
        "input_ids": ids,
        "labels": pad(labels, batch_first=True, padding_value=IGNORE),
        "mm_token_type_ids": (ids == image).long(),
        "pixel_values": arrays["pixel_values"],
        "image_grid_thw": arrays["image_grid_thw"],
    }


def batches(stage: Stage, *, tokenizer: Any, processor: Any, rng: random.Random) -> Iterator[dict[str, torch.Tensor]]:
    """Yield an endless stream of demonstrations of the stage's teacher."""
    while True:
        texts, pictures = [], []
        for _ in range(ROWS):
            question, truth, picture = shapes.draw_row(rng)
            texts.append((question, shapes.demonstration(question, truth, noise=stage.noise, rng=rng)))
            pictures.append(picture)
        yield encode_rows(texts, pictures, tokenizer, processor)


def make_shapes_model(
    target: Path, *, family: Family = "qwen2_5_vl", seed: int = 0, stages: Sequence[Stage] = STAGES
) -> Path:
    """Build and save the warm start, unless the folder already holds the same one."""
    digest = recipe_hash("shapes", seed=seed, stages=stages, model={"family": family, "rows": ROWS})
    if is_current(target, digest):
        return target
    (target / "warm_start.json").unlink(missing_ok=True)
    started = time.monotonic()
    tokenizer = make_vision_tokenizer(target)
    processor = image_processor()
    model = make_tiny_vision(family, tokenizer, seed=seed)
    losses = train_stages(
        model,
        partial(batches, tokenizer=tokenizer, processor=processor),
        task="shapes",
        stages=stages,
        seed=seed,
        report=lambda line: print(line, flush=True),
        report_every_s=5.0,
    )
    processor.save_pretrained(str(target))
    save_model(target, model)
    seconds = round(time.monotonic() - started, 2)
    write_marker(target, {"hash": digest, "task": "shapes", "seed": seed, "seconds": seconds, "losses": losses})
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m learners.warm_start.shapes", description="Build a warm start on one core."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()  # a progress bar would break up the output lines
    make_shapes_model(options.out, family=options.family, seed=options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
