"""Supervised fine-tuning in plain torch, for the small initial models of the demonstration tasks.

It trains a causal language model of transformers on packed rows; only labelled tokens count in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from learners.backends.muon import Muon

IGNORE = -100  # label of a token that does not count in the loss
IMAGE_ARRAYS = ("pixel_values", "image_grid_thw")  # of a batch, not by token

Batch = Mapping[str, torch.Tensor]
OptimizerName = Literal["adamw", "muon"]
Progress = Callable[[int, float], None]


class Example(NamedTuple):
    """One row: prompt token ids, and completion token ids with the end-of-sequence token."""

    prompt: Sequence[int]
    completion: Sequence[int]


def pack(examples: Sequence[Example], *, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Pack rows into lines of equal width, several rows per line, to reduce padding.

    Rows do not attend to each other: `position_ids` restarts at each row, and transformers derives the mask from it.

    Args:
        examples: the rows, at least one.
        width: tokens per line, at least the longest row.
        pad_id: token id that fills the end of a line.

    Returns:
        `input_ids`, `labels` and `position_ids`, int64, all (lines, width). The first token of a row never has a label,
        because no token of the row precedes it.

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
    """Assign rows to lines by first fit, longest row first."""
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


def _length(example: Example) -> int:
    return len(example.prompt) + len(example.completion)


def completion_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per labelled token, of a right-padded or packed batch.

    No attention mask is needed: attention is causal, so a token never attends to the padding on its right.

    Args:
        model: a causal language model of transformers.
        batch: `input_ids`, `labels` and optionally `position_ids` or `mm_token_type_ids`, all (rows, tokens), from
            `pack` or right-padded; the arrays of images that a vision-language model takes.

    Returns:
        A scalar with gradient.

    Raises:
        ValueError: no token of the batch has a label.
    """
    labels = batch["labels"][:, 1:]
    counted = labels != IGNORE
    if not bool(counted.any()):
        raise ValueError("no token of the batch has a label")
    inputs = {key: value if key in IMAGE_ARRAYS else value[:, :-1] for key, value in batch.items() if key != "labels"}
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

    Muon's update is scaled to the size of an AdamW update, so `lr` means the same for both.

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
        made.append(Muon(matrices, lr=lr))
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

    With one thread the result depends only on the initial weights and the batches.

    Args:
        model: a causal language model of transformers; trained in place, left in training mode.
        batches: at least `steps` batches as made by `pack`; further ones are not read.
        lr: peak learning rate.
        steps: number of optimizer steps.
        warmup: steps over which the rate rises.
        decay: share of the steps, at the end, over which the rate falls.
        clip_norm: maximum norm of the whole gradient.
        optimizer: `adamw`, or `muon` for small models trained from scratch (see `make_optimizers`).
        progress: called after each step with the number of steps done and the loss.

    Returns:
        The loss of each step before its update, in nats per labelled token.

    Raises:
        ValueError: `steps` is negative, the batches run out, or a batch has no label.
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
