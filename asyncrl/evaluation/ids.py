"""Held-out evaluation: the ids that mark its work, and the settings that its producers sample by.

A run that trains
counts its groups 0, 1, 2, ...; the prompts of evaluations have ids of their own from `FIRST` on, so that a group says
by its number alone that it is never trained. Guarantees:
1. `evaluation_group` and `split_group` are inverse; ids stay below 2^53, so that they survive JSON anywhere;
2. `row_seed` depends on the run's seed, the row and the attempt, not on the step: evaluations of two steps use the same
   random numbers, which takes some of the noise out of their difference.
It holds no state. The figures are in `asyncrl.evaluation.statistics`, the bookkeeping in
`buffers.evaluation.evaluations`.

Example: row 3 of the evaluation of step 20.

>>> number = evaluation_group(20, 3); is_evaluation(number), is_evaluation(3), split_group(number)
(True, False, (20, 3))
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE

FIRST = 1 << 52  # ids of evaluations begin here
ROW_BITS = 24
MAX_ROWS = 1 << ROW_BITS
NO_SOURCE = "default"  # of rows without a data_source
METRICS = ("evaluation_", "val-core/", "val-aux/")  # how the numbers of an evaluation begin; the rest are labels
MARK = "eval_"  # events of evaluations in the history begin with it


def is_evaluation(group: int) -> bool:
    """Whether a group is a prompt of an evaluation."""
    return group >= FIRST


def evaluation_group(step: int, row: int) -> int:
    """The id of a row in the evaluation of a step."""
    return FIRST + (step << ROW_BITS) + row


def split_group(group: int) -> tuple[int, int]:
    """Step and row of an id."""
    return (group - FIRST) >> ROW_BITS, (group - FIRST) & (MAX_ROWS - 1)


def row_seed(seed: int, row: int, attempt: int = 0) -> int:
    """The seed of a row's samples, 56 bits. What failed by the text that it sampled would fail again: another attempt
    draws others.
    """
    text = f"{seed}/evaluation/{row}" + (f"/{attempt}" if attempt else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def row_source(row: str) -> str:
    """The data source in the JSON of a row."""
    try:
        found: Any = msgspec.json.decode(row)
    except UNREADABLE:
        return NO_SOURCE
    return str((found.get("data_source") if isinstance(found, dict) else "") or NO_SOURCE)
