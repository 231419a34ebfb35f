"""Right-padded rows and their loss in plain torch, to compare supervised training with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

IGNORE = -100  # label of a token that does not count in the loss


class Example(NamedTuple):
    """One row: token ids of the prompt and of the completion."""

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


def completion_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per labelled token, of a batch of `collate`."""
    labels = batch["labels"][:, 1:]
    counted = labels != IGNORE
    logits = model(input_ids=batch["input_ids"][:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits[counted].float(), labels[counted])
