"""Warm starts for the arithmetic tasks of the demonstration (`asyncrl.demo.tasks`).

The policy first learns the procedure from a correct teacher, starting with short prompts. A teacher with mistakes then
makes the policy less certain, so that reinforcement learning can improve it. Command line::

    python -m learners.warm_start.arithmetic --task running_sum --out DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from asyncrl.demo import tasks
from asyncrl.runtime.model_folder import load_model, load_tokenizer
from learners.warm_start.sft import Example, OptimizerName, pack, sft
from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

RECIPE_VERSION = 2
MARKER = "warm_start.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a warm start.

    Attributes:
        steps: optimizer steps.
        lr: peak learning rate.
        noise: the teacher's error rate, see `tasks.demonstration`.
        tokens: approximate tokens per batch, prompts included (tasks of text).
        width: tokens per packed line (tasks of text).
        terms: smallest and largest number of terms, drawn log-uniformly; None: the task's own distribution.
        any_letter: start rows at a random letter, so that every letter also occurs in short rows.
        warmup: see `sft`.
        decay: see `sft`.
        optimizer: see `sft`.
    """

    steps: int
    lr: float
    noise: float
    tokens: int = 0
    width: int = 0
    terms: tuple[int, int] | None = None
    any_letter: bool = False
    warmup: int = 20
    decay: float = 0.4
    optimizer: OptimizerName = "muon"


WARM_START_STAGES: Mapping[str, tuple[Stage, ...]] = {
    "add": (
        Stage(steps=250, lr=3e-3, noise=0.0, tokens=1280, width=40),
        Stage(steps=60, lr=5e-4, noise=0.5, tokens=1280, width=40, warmup=5),
    ),
    "running_sum": (
        Stage(steps=150, lr=3e-3, noise=0.0, tokens=1024, width=84, terms=(2, 4), decay=0.2),
        Stage(
            steps=180, lr=3e-3, noise=0.0, tokens=1280, width=160, terms=(2, tasks.MAX_TERMS), any_letter=True, warmup=5
        ),
        Stage(steps=60, lr=5e-4, noise=0.34, tokens=1536, width=160, warmup=5),
    ),
    "long_sum": (
        Stage(steps=150, lr=3e-3, noise=0.0, tokens=1536, width=160, terms=(2, 4), decay=0.2),
        Stage(
            steps=180, lr=3e-3, noise=0.0, tokens=3072, width=352, terms=(2, tasks.MAX_TERMS), any_letter=True, warmup=5
        ),
        Stage(steps=60, lr=5e-4, noise=0.05, tokens=3072, width=352, warmup=5),
    ),
}
"""Stages per task, in order."""


def stage_batches(
    task: str, stage: Stage, *, tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield an endless stream of fresh demonstrations, packed as by `pack`."""
    eos, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    while True:
        prompts: list[str] = []
        answers: list[str] = []
        total = 0
        while total < stage.tokens:
            prompt, answer = _draw_row(task, stage, rng)
            prompts.append(prompt)
            answers.append(answer)
            total += len(prompt) + len(answer) + 1
        pairs = zip(_encode(tokenizer, prompts), _encode(tokenizer, answers), strict=True)
        yield pack([Example(prompt, [*answer, eos]) for prompt, answer in pairs], width=stage.width, pad_id=pad)


def _draw_row(task: str, stage: Stage, rng: random.Random) -> tuple[str, str]:
    terms = _draw_terms(task, stage, rng)
    first = rng.randint(0, tasks.MAX_TERMS - terms) if stage.any_letter else 0
    values = tasks.draw_operands(task, rng, terms=terms)
    answer = tasks.demonstration(task, values, noise=stage.noise, rng=rng, first=first)
    return tasks.prompt_text(task, values, first=first), answer


def _draw_terms(task: str, stage: Stage, rng: random.Random) -> int:
    if task == "add":
        return 2
    if stage.terms is None:
        return tasks.draw_terms(task, rng)
    low, high = stage.terms
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def recipe_hash(task: str, *, seed: int, stages: Sequence[Stage], model: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of everything that determines a warm start's weights, except torch's version."""
    recipe = {
        "version": RECIPE_VERSION,
        "task": task,
        "seed": seed,
        "stages": [asdict(stage) for stage in stages],
        "model": dict(model),
        "characters": tasks.CHARACTERS,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def make_warm_start(
    task: str,
    out_dir: str | Path,
    *,
    seed: int = 0,
    stages: Sequence[Stage] | None = None,
    model_options: Mapping[str, Any] | None = None,
    report: Callable[[str], None] | None = None,
    report_every_s: float = 3.0,
) -> Path:
    """Build and save a warm-started tiny model of `task`, unless `out_dir` already holds the same one.

    The folder is an ordinary transformers checkpoint: config, safetensors weights, generation config and tokenizer.
    `warm_start.json` is written last; a folder without it is incomplete and is rebuilt. Only one process may build in a
    folder at a time. It takes about a minute on one core; weights are reproducible with one torch thread.

    Args:
        task: one of `tasks.TASKS`.
        out_dir: folder to write to; created if missing.
        seed: seed of weights and demonstrations.
        stages: stages to train; None: those of the task in `WARM_START_STAGES`.
        model_options: further arguments of `make_tiny_qwen3`.
        report: called with lines that report the progress.
        report_every_s: minimum seconds between two progress lines.

    Returns:
        `out_dir` as a path.

    Raises:
        ValueError: unknown task.
        OSError: the folder cannot be written.
    """
    if task not in WARM_START_STAGES:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(WARM_START_STAGES)}")
    say = report if report is not None else _silent
    plan = tuple(WARM_START_STAGES[task] if stages is None else stages)
    options = dict(model_options or {})
    digest = recipe_hash(task, seed=seed, stages=plan, model=options)
    target = Path(out_dir)
    if is_current(target, digest):
        say(f"{task}: {target} is up to date")
        return target
    (target / MARKER).unlink(missing_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:  # nothing is written to the target before the model is ready
        tokenizer = make_tokenizer(scratch)
    model = make_tiny_qwen3(len(tasks.CHARACTERS) + len(SPECIAL_TOKENS), seed=seed, **options)
    batches = partial(stage_batches, task, tokenizer=tokenizer)
    losses = train_stages(model, batches, task=task, stages=plan, seed=seed, report=say, report_every_s=report_every_s)
    make_tokenizer(target)
    save_model(target, model)
    seconds = time.monotonic() - started
    write_marker(target, {"hash": digest, "task": task, "seed": seed, "seconds": round(seconds, 2), "losses": losses})
    say(f"{task}: saved to {target} after {seconds:.1f} s")
    return target


def train_stages(
    model: torch.nn.Module,
    make_batches: Callable[..., Iterator[dict[str, torch.Tensor]]],
    *,
    task: str,
    stages: Sequence[Stage],
    seed: int,
    report: Callable[[str], None],
    report_every_s: float,
) -> list[float]:
    """Train `model` in place on all stages of `task`; return the loss of each step.

    Args:
        model: trained in place.
        make_batches: from a stage and `rng`, an endless stream of batches.
        task: name in reports and of the random streams.
        stages: in order.
        seed: of the demonstrations.
        report: takes the lines of progress.
        report_every_s: seconds between two of them.
    """
    losses: list[float] = []
    for number, stage in enumerate(stages, start=1):
        rng = random.Random(f"learners.sft/{task}/{seed}/{number}")
        progress = _Printer(report, f"{task} stage {number}/{len(stages)}", stage.steps, report_every_s)
        losses += sft(
            model,
            make_batches(stage, rng=rng),
            lr=stage.lr,
            steps=stage.steps,
            warmup=stage.warmup,
            decay=stage.decay,
            optimizer=stage.optimizer,
            progress=progress,
        )
    return losses


class _Printer:
    """Reports progress at most every few seconds, and at the end."""

    def __init__(self, say: Callable[[str], None], label: str, steps: int, every_s: float) -> None:
        self._say, self._label, self._steps, self._every_s = say, label, steps, every_s
        self._last = time.monotonic()

    def __call__(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if step == self._steps or now - self._last >= self._every_s:
            self._last = now
            self._say(f"{self._label}: step {step}/{self._steps} loss {loss:.3f}")


def _silent(line: str) -> None:
    return None


def is_current(target: Path, digest: str) -> bool:
    """Return whether a folder holds the complete checkpoint that this recipe makes."""
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    files = ("model.safetensors", "config.json", "tokenizer.json")
    return marker.get("hash") == digest and all((target / name).is_file() for name in files)


def write_marker(target: Path, content: Mapping[str, Any]) -> None:
    """Mark a folder as complete."""
    partial = target / (MARKER + ".partial")
    partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
    partial.replace(target / MARKER)


def sampled_accuracy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: str,
    size: int = 256,
    seed: int = 0,
    rows_per_batch: int = 64,
) -> float:
    """Return the share of held-out prompts answered correctly by one sample each at temperature 1.

    Prompts are sorted by length to save computation. The caller's random state does not change.

    Args:
        model: a causal language model with `generate`; left in training mode.
        tokenizer: its tokenizer, padding on the left.
        task: one of `tasks.TASKS`.
        size: number of held-out prompts, positive.
        seed: seed of the prompts and of the samples.
        rows_per_batch: prompts decoded together.
    """
    reward = getattr(tasks, f"{task}_reward")
    rows = sorted(tasks.prompt_rows(task, size, seed, split="heldout"), key=lambda row: len(row["prompt"]))
    total = 0.0
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, size, rows_per_batch):
            part = rows[start : start + rows_per_batch]
            inputs = tokenizer([row["prompt"] for row in part], return_tensors="pt", padding=True)
            made = model.generate(  # type: ignore[operator]
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tasks.max_answer_tokens(task) + 1,
            )
            texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for row, text in zip(part, texts, strict=True):
                total += reward(row["data_source"], text, row["reward_model"]["ground_truth"])
    model.train()
    return total / size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m learners.warm_start.arithmetic", description="Build a warm start on one core."
    )
    parser.add_argument("--task", choices=sorted(WARM_START_STAGES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="sample N held-out prompts at the end")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()  # a progress bar would break up the output lines
    target = make_warm_start(options.task, options.out, seed=options.seed, report=lambda line: print(line, flush=True))
    if options.measure > 0:
        accuracy = _measure(target, task=options.task, size=options.measure)
        print(f"{options.task}: sampled accuracy {accuracy:.3f} on {options.measure} held-out prompts", flush=True)
    return 0


def _measure(target: Path, *, task: str, size: int) -> float:
    model = load_model(target, "language", trust_remote_code=False)
    tokenizer = load_tokenizer(target, trust_remote_code=False)
    return sampled_accuracy(model, tokenizer, task=task, size=size)


if __name__ == "__main__":
    raise SystemExit(main())
