"""Recipes of the small start models of the demonstration tasks, trained with the parts of the mode sft.

Guarantee: a folder with `warm_start.json` is complete; a folder of the same recipe is not written again. With one
thread the weights depend only on recipe, sizes and seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from asyncrl.config import OptimConfig
from asyncrl.demo.tasks import CHARACTERS, write_jsonl
from learners.backends.base import to_device
from learners.backends.optimizers import make_optimizer
from learners.batch.micro_batches import Sample
from learners.models.policy_model import PolicyModel
from learners.step.lr_schedule import learning_rate
from learners.step.supervised import minibatch, sft_loss
from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

RECIPE_VERSION = 2
MARKER = "warm_start.json"
ROW_TOKENS = 512  # of a micro-batch of padded rows
ROWS = 4096  # prompts of a task

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a warm start.

    Attributes:
        steps: optimizer steps.
        lr: highest learning rate; it falls linearly to 0 after the warm-up.
        noise: share of the teacher's mistakes, see `demonstration` of the task.
        tokens: about how many tokens a batch holds, prompts included.
        terms: smallest and largest number of terms, drawn log-uniformly; None means the task's own law.
        any_letter: start `running_sum` rows at a random letter, so that every letter is met in short rows too.
        warmup: steps over which the rate rises.
    """

    steps: int
    lr: float
    noise: float
    tokens: int = 1280
    terms: tuple[int, int] | None = None
    any_letter: bool = False
    warmup: int = 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A start model: its task, vocabulary, stages, and `draw`, which returns prompts with their answers."""

    task: str
    stages: Sequence[Stage]
    draw: Callable[[Stage, random.Random], Rows]
    characters: str = CHARACTERS
    words: Sequence[str] = ()
    chat_template: str = ""

    def tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """Return the tokenizer, saved in a folder."""
        return make_tokenizer(folder, characters=self.characters, words=self.words, chat_template=self.chat_template)

    def digest(self, *, seed: int, sizes: Mapping[str, Any]) -> str:
        """Return the SHA-256, in hex, of all that decides the weights (the version of torch aside)."""
        content = {
            "version": RECIPE_VERSION,
            "task": self.task,
            "seed": seed,
            "stages": [asdict(stage) for stage in self.stages],
            "model": dict(sizes),
            "vocabulary": [self.characters, *self.words],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def build(
    recipe: Recipe,
    target: Path,
    *,
    seed: int = 0,
    sizes: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
    report_every_s: float = 3.0,
) -> Path:
    """Build and save a start model, unless the folder holds the very same one.

    The folder is an ordinary transformers checkpoint: config, safetensors weights, generation config and tokenizer.
    `warm_start.json` is written last; a folder without it is unfinished and is built anew. One builder at a time.

    Args:
        recipe: what is trained.
        target: folder to write to; created if missing.
        seed: seed of weights and demonstrations.
        sizes: further arguments of `make_tiny_qwen3`.
        report: called with one line of text now and then.
        report_every_s: seconds between two lines.

    Raises:
        OSError: the folder cannot be written.
        FloatingPointError: a loss is not finite.
    """
    digest = recipe.digest(seed=seed, sizes=sizes or {})
    if is_current(target, digest):
        report(f"{recipe.task}: {target} is up to date")
        return target
    (target / MARKER).unlink(missing_ok=True)
    started = time.monotonic()
    tokenizer = recipe.tokenizer(target)
    vocabulary = len(SPECIAL_TOKENS) + len(recipe.characters) + len(recipe.words)
    model = make_tiny_qwen3(vocabulary, seed=seed, **(sizes or {}))
    losses: list[float] = []
    last = started
    for number, stage in enumerate(recipe.stages, start=1):
        rng = random.Random(f"learners.warm_start/{recipe.task}/{seed}/{number}")
        for step, loss in enumerate(train(model, batches(recipe, stage, tokenizer, rng), stage), start=1):
            losses.append(loss)
            if step == stage.steps or time.monotonic() - last >= report_every_s:
                last = time.monotonic()
                where = f"stage {number}/{len(recipe.stages)}: step {step}/{stage.steps}"
                report(f"{recipe.task} {where} loss {loss:.3f}")
    save_model(target, model)
    seconds = time.monotonic() - started
    content = {"hash": digest, "task": recipe.task, "seed": seed, "seconds": round(seconds, 2), "losses": losses}
    partial = target / (MARKER + ".partial")
    partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
    partial.replace(target / MARKER)
    report(f"{recipe.task}: saved to {target} after {seconds:.1f} s")
    return target


def is_current(target: Path, digest: str) -> bool:
    """Whether a folder holds the whole checkpoint that this recipe makes."""
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    files = ("model.safetensors", "config.json", "tokenizer.json")
    return marker.get("hash") == digest and all((target / name).is_file() for name in files)


def batches(
    recipe: Recipe, stage: Stage, tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> Iterator[list[Sample]]:
    """Yield an endless stream of fresh demonstrations."""
    while True:
        rows: list[Sample] = []
        total = 0
        while total < stage.tokens:
            made = [demonstration(tokenizer, prompt, answer) for prompt, answer in recipe.draw(stage, rng)]
            total += sum(row.tokens.size for row in made)
            rows += made
        yield rows


def demonstration(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Sample:
    """Return a row for training on the tokens of the answer and the end-of-sequence token."""
    one, other = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
    tokens = np.array([*one, *other, tokenizer.eos_token_id], np.int32)
    count = len(other) + 1
    return Sample(tokens, len(one), np.zeros(count, np.float32), np.ones(count, np.uint8), 0.0)


def train(model: torch.nn.Module, rows: Iterator[list[Sample]], stage: Stage) -> Iterator[float]:
    """Train a model in place, one optimizer step per batch; yield each loss before its update, in nats per token.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    policy = PolicyModel(model.train())
    # Muon for matrices of the layers: the best choice for small models trained from scratch
    optim = OptimConfig(name="muon", lr=stage.lr, beta2=0.99, warmup_steps=stage.warmup, schedule="linear")
    optimizer = make_optimizer(policy, policy.model.model.layers, optim, fused=True)
    for step in range(1, stage.steps + 1):
        loss = _gradients(policy, next(rows))
        torch.nn.utils.clip_grad_norm_(policy.parameters(), optim.max_grad_norm)
        optimizer.step(learning_rate(optim, step=step, steps=stage.steps))
        optimizer.forget()
        yield loss


def _gradients(policy: PolicyModel, rows: list[Sample]) -> float:
    """Forward and backward of one batch; its loss."""
    (part,) = minibatch([[row] for row in rows], ranks=1, max_tokens=ROW_TOKENS, packing=False)
    loss, total = sft_loss(part), 0.0
    for number, micro in enumerate(part.micro):
        inputs = to_device(micro, torch.device("cpu"))
        logprobs, entropy = policy(inputs.input_ids, inputs.position_ids, inputs.positions, inputs.targets)
        value, _ = loss(logprobs, entropy, inputs, number)
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
    if not math.isfinite(total):
        raise FloatingPointError(f"the loss is {total}")
    return total


def build_on_one_core(recipe: Recipe, target: Path, *, seed: int) -> None:
    """Build a start model with one torch thread, which gives the same weights each time, and print the progress."""
    torch.set_num_threads(1)
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()  # its bar for one small file would stand in the middle of our lines
    build(recipe, target, seed=seed, report=lambda line: print(line, flush=True))


def main_with_prompts(
    recipe: Recipe, prompt_rows: Callable[[int, int], Sequence[Mapping[str, Any]]], arguments: Sequence[str] | None
) -> int:
    """Run the command line of a task that writes a model and its prompts; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m learners.warm_start.{recipe.task}", description="Model and prompts of the task."
    )
    model, data = Path("runs/models", recipe.task), Path("runs/data", f"{recipe.task}.jsonl")
    parser.add_argument("--out", type=Path, default=model, help="folder of the checkpoint")
    parser.add_argument("--data", type=Path, default=data, help="file of the prompts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    build_on_one_core(recipe, options.out, seed=options.seed)
    print(f"prompts   {write_jsonl(options.data, prompt_rows(ROWS, options.seed))} rows -> {options.data}")
    return 0
