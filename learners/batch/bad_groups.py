"""Finds the groups that break the assembling or the loss of a step.

Guarantees:
1. the search halves the batch: with k bad groups of n it asks about 2 k log2(n) times, at most 2 n;
2. a group is bad only if it breaks alone; where no group does, nothing is blamed;
3. a bad group comes with what it broke: the error and the innermost places of its trace, or what is not finite.
It trains nothing and knows no ranks: `ask` does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import GroupData
    from learners.batch.micro_batches import StepBatch

#: What is wrong with these groups by themselves; the empty string where nothing is.
Ask = Callable[[Sequence["GroupData"]], str]

REASON_LIMIT = 480  # characters; the buffer keeps 500
PLACES = 3  # innermost frames of a trace


def find_bad_groups(groups: Sequence[GroupData], ask: Ask) -> dict[int, str]:
    """Bad groups and why, of a batch that is known to be broken as a whole."""
    if len(groups) == 1:
        why = ask(groups)
        return {groups[0].group: why} if why else {}
    middle = len(groups) // 2
    found: dict[int, str] = {}
    for half in (groups[:middle], groups[middle:]):
        if len(half) == 1 or ask(half):
            found.update(find_bad_groups(half, ask))
    return found


def not_finite(cut: StepBatch) -> str:
    """Which numbers of an assembled batch would spoil the gradient; the empty string where all are finite."""
    for share in cut.shares:
        for part in share:
            for micro in part.micro:
                trained = micro.mask.astype(bool)
                for name in ("advantages", "behaviour"):
                    if getattr(micro, name).size != trained.size:
                        return f"packer: {getattr(micro, name).size} {name} for {trained.size} tokens"
                    if not np.isfinite(getattr(micro, name)[trained]).all():
                        return f"packer: {name} are not finite"
    return ""


def describe_error(place: str, error: BaseException) -> str:
    """`loss: ValueError: too long | losses.py:41 in token_loss | ...`, the innermost place first."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES:]
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]
    return " | ".join([f"{place}: {type(error).__name__}: {error}", *places])[:REASON_LIMIT]
