"""Right-padded rows for the tests of supervised training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learners.warm_start.sft import IGNORE, Example


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
