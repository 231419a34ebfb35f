"""Warm start of the tool demonstration: a tiny model that mostly knows how to call a calculator, and its prompts.

Command line: `python -m learners.warm_start.calculator --out runs/models/calculator --data runs/data/calculator.jsonl`.
Each turn of a demonstration is a row whose prompt contains the earlier turns and observations. With one thread the
weights depend only on the seed. It takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from asyncrl.demo import calculator
from asyncrl.demo.tasks import write_jsonl
from learners.warm_start.sft import Batch, Example, pack, sft
from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

ROWS = 4096
BATCH_ROWS = 48
WIDTH = 128


class Stage(NamedTuple):
    """One stage of the training."""

    steps: int
    lr: float
    noise: float


STAGES = (Stage(70, 3e-3, 0.0), Stage(30, 5e-4, 0.35))


def make(
    out: Path, *, seed: int = 0, stages: Sequence[Stage] = STAGES, report: Callable[[str], None] | None = None
) -> Path:
    """Train the model and save it as a transformers checkpoint."""
    tokenizer = make_tokenizer_folder(out)
    model = make_tiny_qwen3(len(SPECIAL_TOKENS) + len(calculator.CHARACTERS) + len(calculator.WORDS), seed=seed)
    for number, stage in enumerate(stages, start=1):
        rng = random.Random(f"learners.calculator_start/{seed}/{number}")
        losses = sft(
            model, batches(tokenizer, noise=stage.noise, rng=rng), lr=stage.lr, steps=stage.steps, optimizer="muon"
        )
        if report is not None:
            report(f"calculator stage {number}/{len(stages)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    save_model(out, model)
    return out


def make_tokenizer_folder(out: Path) -> PreTrainedTokenizerBase:
    """Build the tokenizer, save it under `out` and return it."""
    return make_tokenizer(
        out, characters=calculator.CHARACTERS, words=calculator.WORDS, chat_template=calculator.TEMPLATE
    )


def batches(tokenizer: PreTrainedTokenizerBase, *, noise: float, rng: random.Random) -> Iterator[Batch]:
    """Yield an endless stream of demonstrations, packed as by `pack`."""
    pad = int(tokenizer.pad_token_id)
    while True:
        rows = [row for _ in range(BATCH_ROWS) for row in _rows(tokenizer, noise, rng)]
        yield pack(rows, width=WIDTH, pad_id=pad)


def _rows(tokenizer: PreTrainedTokenizerBase, noise: float, rng: random.Random) -> list[Example]:
    """Return the rows of one conversation, one per turn of the model."""
    one, other = rng.randint(11, 99), rng.randint(11, 99)
    first, found, answer = calculator.demonstration(one, other, noise=noise, rng=rng)
    eos = int(tokenizer.eos_token_id)
    opened = f"<bos>user\n{one}*{other}<eos>\n<bos>assistant\n"
    rows = [Example(_ids(tokenizer, opened), [*_ids(tokenizer, first), eos])]
    if found:
        shown = f"{opened}{first}<eos>\n<bos>tool\n{found}<eos>\n<bos>assistant\n"
        rows.append(Example(_ids(tokenizer, shown), [*_ids(tokenizer, answer), eos]))
    return rows


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m learners.warm_start.calculator", description="Build a warm start.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--data", type=Path, help="also write prompts to this .jsonl")
    parser.add_argument("--seed", type=int, default=0)
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began = time.monotonic()
    make(options.out, seed=options.seed, report=lambda line: print(line, flush=True))
    print(f"calculator: saved to {options.out} after {time.monotonic() - began:.1f} s", flush=True)
    if options.data:
        write_jsonl(options.data, calculator.prompt_rows(ROWS, options.seed))
        print(f"prompts: {ROWS} rows -> {options.data}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
