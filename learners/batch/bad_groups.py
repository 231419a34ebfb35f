"""Finds the groups that break the assembly or the loss of a step.

Guarantees:
1. the search halves the batch: with k bad groups of n it asks about 2 k log2(n) times, at most 2 n;
2. a group is bad only if it fails alone; if none does, no group is reported;
3. a bad group comes with a reason: the error and the innermost frames of its trace, or what is not finite.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncrl.wire.batch_arrays import GroupData
    from learners.batch.micro_batches import StepBatch

#: Returns the failure of these groups alone; empty if there is none.
Ask = Callable[[Sequence["GroupData"]], str]

REASON_LIMIT = 480  # characters; the buffer keeps 500
PLACES = 3  # innermost frames of a trace


def find_bad_groups(groups: Sequence[GroupData], ask: Ask) -> dict[int, str]:
    """Return bad groups and their reasons, from a batch that fails as a whole."""
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
    """Return what in an assembled batch would break the gradient; empty if everything is finite."""
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
    """Example: `loss: ValueError: too long | losses.py:41 in token_loss | ...`, the innermost frame first."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES:]
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]
    return " | ".join([f"{place}: {type(error).__name__}: {error}", *places])[:REASON_LIMIT]
