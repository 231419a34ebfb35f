"""Warm start and prompts of the code demonstration (`asyncrl.demo.code`).

Command line (under a minute on one core)::

    python -m learners.warm_start.code --out runs/models/code --data runs/data/code.jsonl

Guarantee: a folder with `warm_start.json` is complete; a folder of the same recipe is not written again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.demo import code, tasks
from learners.warm_start.arithmetic import Stage, is_current, recipe_hash, write_marker
from learners.warm_start.sft import Example, pack, sft
from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

ROWS = 4096
STAGES = (
    Stage(steps=120, lr=3e-3, noise=0.0, tokens=1280, width=60),
    Stage(steps=40, lr=5e-4, noise=0.28, tokens=1280, width=60, warmup=5),
)


def batches(stage: Stage, tokenizer: Any, rng: random.Random) -> Iterator[dict[str, torch.Tensor]]:
    """Yield an endless stream of demonstrations, packed as by `pack`."""
    eos, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    while True:
        rows, total = [], 0
        while total < stage.tokens:
            steps = code.draw_steps(rng)
            texts = code.prompt_text(steps), code.demonstration(steps, noise=stage.noise, rng=rng)
            prompt, answer = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
            rows.append(Example(prompt, [*answer, eos]))
            total += len(prompt) + len(answer) + 1
        yield pack(rows, width=stage.width, pad_id=pad)


def make_code_model(target: Path, *, seed: int = 0, stages: Sequence[Stage] = STAGES) -> Path:
    """Build and save the warm start, unless the folder already holds the same one."""
    digest = recipe_hash("code", seed=seed, stages=stages, model={"characters": code.CHARACTERS})
    if is_current(target, digest):
        return target
    (target / "warm_start.json").unlink(missing_ok=True)
    tokenizer = make_tokenizer(target, characters=code.CHARACTERS)
    model = make_tiny_qwen3(len(code.CHARACTERS) + len(SPECIAL_TOKENS), seed=seed)
    losses: list[float] = []
    for number, stage in enumerate(stages, start=1):
        rng = random.Random(f"learners.code_recipe/{seed}/{number}")
        losses += sft(
            model,
            batches(stage, tokenizer, rng),
            lr=stage.lr,
            steps=stage.steps,
            warmup=stage.warmup,
            decay=stage.decay,
            optimizer=stage.optimizer,
        )
        print(f"code      stage {number} of {len(stages)}: loss {losses[-1]:.3f}", flush=True)
    save_model(target, model)
    write_marker(target, {"hash": digest, "task": "code", "seed": seed, "losses": losses})
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m learners.warm_start.code", description="Build the model and prompts of the task."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/models/code"), help="folder of the checkpoint")
    parser.add_argument("--data", type=Path, default=Path("runs/data/code.jsonl"), help="file of the prompts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    make_code_model(options.out, seed=options.seed)
    print(f"prompts   {tasks.write_jsonl(options.data, code.prompt_rows(ROWS, options.seed))} rows -> {options.data}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
