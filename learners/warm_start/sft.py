"""Supervised fine-tuning in plain torch, and the warm starts of the demonstration tasks.

`sft` trains any causal language model of transformers on right-padded batches, counting only the tokens that carry
a label. `make_warm_start` uses it to build the small checkpoint from which the demonstrations start: first the
procedure is learned from a clean teacher, short prompts first, then the policy is softened with a teacher that makes
mistakes, so that reinforcement learning has something to sharpen.

Command line::

    python -m learners.warm_start.sft --task running_sum --out DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from asyncrl.demo import tasks
from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

IGNORE = -100
"""Label of a token that does not count in the loss."""

RECIPE_VERSION = 1
MARKER = "warm_start.json"

Batch = Mapping[str, torch.Tensor]
OptimizerName = Literal["adamw", "muon"]
Progress = Callable[[int, float], None]


class Example(NamedTuple):
    """One row: prompt token ids, and completion token ids with the end-of-sequence token."""

    prompt: Sequence[int]
    completion: Sequence[int]


def collate(examples: Sequence[Example], *, pad_id: int) -> dict[str, torch.Tensor]:
    """Join rows into one right-padded batch in which only completion tokens carry labels.

    Args:
        examples: the rows, at least one.
        pad_id: token id that fills the right side.

    Returns:
        `input_ids` and `labels`, int64, both (rows, longest row in tokens). A label stands at the position of its
        own token (not shifted); prompt and padding hold `IGNORE`.

    Raises:
        ValueError: there is no row, or a row has no completion.
    """
    if not examples or any(len(example.completion) == 0 for example in examples):
        raise ValueError("a batch needs rows, and each row needs a completion")
    width = max(len(example.prompt) + len(example.completion) for example in examples)
    ids = torch.full((len(examples), width), pad_id, dtype=torch.int64)
    labels = torch.full((len(examples), width), IGNORE, dtype=torch.int64)
    for row, (prompt, completion) in enumerate(examples):
        start, end = len(prompt), len(prompt) + len(completion)
        ids[row, :start] = torch.as_tensor(prompt, dtype=torch.int64)
        ids[row, start:end] = torch.as_tensor(completion, dtype=torch.int64)
        labels[row, start:end] = ids[row, start:end]
    return {"input_ids": ids, "labels": labels}


def bucketed_batches(
    examples: Sequence[Example], *, tokens_per_batch: int, pad_id: int, seed: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Group rows of like length, so that padding stays small, and shuffle the groups.

    Args:
        examples: all rows of one pass.
        tokens_per_batch: upper bound on rows x longest row of one batch, padding included; a row that is longer
            forms a batch of its own.
        pad_id: token id that fills the right side.
        seed: seed of the order.

    Returns:
        Batches as made by `collate`, each row in exactly one of them.

    Raises:
        ValueError: `tokens_per_batch` is not positive, or a row has no completion.
    """
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch must be positive, got {tokens_per_batch}")
    rng = random.Random(seed)
    order = list(range(len(examples)))
    rng.shuffle(order)
    order.sort(key=lambda index: _length(examples[index]))
    groups: list[list[Example]] = []
    for index in order:
        example = examples[index]
        if not groups or (len(groups[-1]) + 1) * _length(example) > tokens_per_batch:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    return [collate(group, pad_id=pad_id) for group in groups]


def _length(example: Example) -> int:
    return len(example.prompt) + len(example.completion)


def pack(examples: Sequence[Example], *, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Join rows into lines of equal width, several rows to a line, so that little is padded.

    Rows do not see each other: `position_ids` starts anew at each row, from which transformers derives the mask.

    Args:
        examples: the rows, at least one.
        width: tokens per line, at least the longest row.
        pad_id: token id that fills the end of a line.

    Returns:
        `input_ids`, `labels` and `position_ids`, int64, all (lines, width). The first token of a row never carries
        a label: nothing before it belongs to the row.

    Raises:
        ValueError: there is no row, a row has no completion, or a row is wider than a line.
    """
    if not examples or any(len(example.completion) == 0 for example in examples):
        raise ValueError("a batch needs rows, and each row needs a completion")
    lines = _fill_lines(examples, width)
    ids = torch.full((len(lines), width), pad_id, dtype=torch.int64)
    labels = torch.full((len(lines), width), IGNORE, dtype=torch.int64)
    positions = torch.zeros((len(lines), width), dtype=torch.int64)
    for number, line in enumerate(lines):
        start = 0
        for prompt, completion in line:
            end = start + len(prompt) + len(completion)
            ids[number, start:end] = torch.as_tensor([*prompt, *completion], dtype=torch.int64)
            positions[number, start:end] = torch.arange(end - start)
            counted = slice(start + max(1, len(prompt)), end)
            labels[number, counted] = ids[number, counted]
            start = end
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _fill_lines(examples: Sequence[Example], width: int) -> list[list[Example]]:
    """First fit, longest row first."""
    lines: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=_length, reverse=True):
        length = _length(example)
        if length > width:
            raise ValueError(f"a row of {length} tokens does not fit a line of {width}")
        place = next((number for number, left in enumerate(room) if left >= length), len(lines))
        if place == len(lines):
            lines.append([])
            room.append(width)
        lines[place].append(example)
        room[place] -= length
    return lines


def completion_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per labelled token, of a right-padded or packed batch.

    No attention mask is needed: attention is causal, so a token never sees the padding to its right.

    Args:
        model: a causal language model of transformers.
        batch: `input_ids`, `labels` and perhaps `position_ids`, all (rows, tokens), of `collate` or `pack`.

    Returns:
        A scalar that carries a gradient.

    Raises:
        ValueError: no token of the batch carries a label.
    """
    labels = batch["labels"][:, 1:]
    counted = labels != IGNORE
    if not bool(counted.any()):
        raise ValueError("no token of the batch carries a label")
    inputs = {key: batch[key][:, :-1] for key in ("input_ids", "position_ids") if key in batch}
    logits = model(**inputs, use_cache=False).logits
    return functional.cross_entropy(logits[counted].float(), labels[counted])


def learning_rate_factor(step: int, *, steps: int, warmup: int, decay: float) -> float:
    """Return the factor on the learning rate at `step` (counted from 0) of `steps`.

    It rises linearly over the first `warmup` steps, stays at 1, and falls linearly to near 0 over the last
    `decay` share of the steps.
    """
    rise = min(1.0, (step + 1) / max(1, warmup))
    falling = max(1, round(decay * steps))
    fall = 1.0 if decay <= 0.0 else min(1.0, (steps - step) / falling)
    return rise * fall


def make_optimizers(model: torch.nn.Module, *, lr: float, optimizer: OptimizerName) -> list[torch.optim.Optimizer]:
    """Return the optimizers of one `sft` call: AdamW for all, or Muon for the inner matrices and AdamW for the rest.

    Muon's step is scaled to the size of an AdamW step, so `lr` means the same for both.

    Raises:
        ValueError: unknown optimizer name.
    """
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"unknown optimizer {optimizer!r}; known: adamw, muon")
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inner = optimizer == "muon" and parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if inner else others).append(parameter)
    made: list[torch.optim.Optimizer] = []
    if others:
        made.append(torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True))
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def sft(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    *,
    lr: float,
    steps: int,
    warmup: int = 20,
    decay: float = 0.4,
    clip_norm: float = 1.0,
    optimizer: OptimizerName = "adamw",
    progress: Progress | None = None,
) -> list[float]:
    """Train on labelled tokens only, one optimizer step per batch.

    With one thread the result is a function of the initial weights and the batches.

    Args:
        model: a causal language model of transformers; trained in place, left in training mode.
        batches: at least `steps` batches as made by `collate`; more are left untouched.
        lr: highest learning rate.
        steps: number of optimizer steps.
        warmup: steps over which the rate rises.
        decay: share of the steps, at the end, over which the rate falls.
        clip_norm: largest norm of the whole gradient.
        optimizer: `adamw`, or `muon` for small models trained from scratch (see `make_optimizers`).
        progress: called after each step with the number of steps done and the loss.

    Returns:
        The loss of each step before its update, in nats per labelled token.

    Raises:
        ValueError: `steps` is negative, the batches run out, or a batch carries no label.
        FloatingPointError: a loss is not finite.
    """
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}")
    model.train()
    optimizers = make_optimizers(model, lr=lr, optimizer=optimizer)
    source = iter(batches)
    history: list[float] = []
    for step in range(steps):
        batch = next(source, None)
        if batch is None:
            raise ValueError(f"the batches ran out after {step} of {steps} steps")
        rate = lr * learning_rate_factor(step, steps=steps, warmup=warmup, decay=decay)
        history.append(_update(model, batch, optimizers, rate=rate, clip_norm=clip_norm))
        if progress is not None:
            progress(step + 1, history[-1])
    return history


def _update(
    model: torch.nn.Module, batch: Batch, optimizers: Sequence[torch.optim.Optimizer], *, rate: float, clip_norm: float
) -> float:
    loss = completion_loss(model, batch)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value}")
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    for each in optimizers:
        for group in each.param_groups:
            group["lr"] = rate
        each.step()
        each.zero_grad(set_to_none=True)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a warm start.

    Attributes:
        steps: optimizer steps.
        lr: highest learning rate.
        noise: the teacher's mistakes, see `tasks.demonstration`.
        tokens: about how many tokens a batch holds, prompts included.
        width: tokens per packed line.
        terms: smallest and largest number of terms, drawn log-uniformly; None means the task's own law.
        any_letter: start `running_sum` rows at a random letter, so that every letter is met in short rows too.
        warmup: see `sft`.
        decay: see `sft`.
        optimizer: see `sft`.
    """

    steps: int
    lr: float
    noise: float
    tokens: int
    width: int
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
        return tasks.pareto_terms(rng)
    low, high = stage.terms
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def recipe_hash(task: str, *, seed: int, stages: Sequence[Stage], model: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of all that decides a warm start's weights (the version of torch aside)."""
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
    """Build and save a warm-started tiny model of `task`, unless `out_dir` holds the very same one.

    The folder is an ordinary transformers checkpoint: config, safetensors weights, generation config and tokenizer.
    `warm_start.json` is written last; a folder without it is unfinished and is built anew. One builder at a time.
    Takes well under a minute on one core; run it with one torch thread to get the same weights each time.

    Args:
        task: `add` or `running_sum`.
        out_dir: folder to write to; created if missing.
        seed: seed of weights and demonstrations.
        stages: None means the task's own `WARM_START_STAGES`.
        model_options: further arguments of `make_tiny_qwen3`.
        report: called with one line of text now and then.
        report_every_s: seconds between two lines.

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
    tokenizer = make_tokenizer(target)
    model = make_tiny_qwen3(len(tasks.CHARACTERS) + len(SPECIAL_TOKENS), seed=seed, **options)
    losses: list[float] = []
    for number, stage in enumerate(plan, start=1):
        rng = random.Random(f"learners.warm_start.sft/{task}/{seed}/{number}")
        progress = _Printer(say, f"{task} stage {number}/{len(plan)}", stage.steps, report_every_s)
        batches = stage_batches(task, stage, tokenizer=tokenizer, rng=rng)
        losses += sft(
            model,
            batches,
            lr=stage.lr,
            steps=stage.steps,
            warmup=stage.warmup,
            decay=stage.decay,
            optimizer=stage.optimizer,
            progress=progress,
        )
    save_model(target, model)
    seconds = time.monotonic() - started
    write_marker(target, {"hash": digest, "task": task, "seed": seed, "seconds": round(seconds, 2), "losses": losses})
    say(f"{task}: saved to {target} after {seconds:.1f} s")
    return target


class _Printer:
    """Say a line at most every few seconds, and one at the end."""

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
    """Whether a folder holds the whole checkpoint that this recipe makes."""
    try:
        marker = json.loads((target / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    files = ("model.safetensors", "config.json", "tokenizer.json")
    return marker.get("hash") == digest and all((target / name).is_file() for name in files)


def write_marker(target: Path, content: Mapping[str, Any]) -> None:
    """Say that a folder is finished."""
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
    """Return the share of held-out prompts answered right by one sample each at temperature 1.

    Prompts are grouped by length to save work. The caller's random state is left as it was.

    Args:
        model: a causal language model with `generate`; left in training mode.
        tokenizer: its tokenizer, padding on the left.
        task: `add` or `running_sum`.
        size: number of held-out prompts, positive.
        seed: seed of the prompts and of the samples.
        rows_per_batch: prompts decoded together.
    """
    reward = tasks.add_reward if task == "add" else tasks.running_sum_reward
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
        prog="python -m learners.warm_start.sft", description="Build a warm start on one core."
    )
    parser.add_argument("--task", choices=sorted(WARM_START_STAGES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="sample N held-out prompts at the end")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()  # its bar for one small file would stand in the middle of our lines
    target = make_warm_start(options.task, options.out, seed=options.seed, report=lambda line: print(line, flush=True))
    if options.measure > 0:
        accuracy = _measure(target, task=options.task, size=options.measure)
        print(f"{options.task}: sampled accuracy {accuracy:.3f} on {options.measure} held-out prompts", flush=True)
    return 0


def _measure(target: Path, *, task: str, size: int) -> float:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(target), local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(str(target), local_files_only=True)
    return sampled_accuracy(model, tokenizer, task=task, size=size)


if __name__ == "__main__":
    raise SystemExit(main())
