"""Ids of held-out evaluations.

A run counts its training groups 0, 1, 2, ...; prompts of evaluations have ids from `FIRST` on, so the number alone
tells that a group is never trained. Guarantees:
1. `evaluation_group` and `split_group` are inverse; ids stay below 2^53, so they survive JSON in all languages;
2. `row_seed` depends on the run's seed, the row and the attempt, not on the step: evaluations of two steps use the same
   random numbers, which reduces the noise of their difference.

Example: row 3 of the evaluation of step 20.

>>> number = evaluation_group(20, 3); is_evaluation(number), is_evaluation(3), split_group(number)
(True, False, (20, 3))
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE

FIRST = 1 << 52  # ids of evaluations begin here
ROW_BITS = 24
MAX_ROWS = 1 << ROW_BITS
NO_SOURCE = "default"  # for rows without a data_source
SOURCE_CHARS = 200  # of a data_source that counts: tables and lines of the history repeat it
METRICS = ("evaluation_", "val-core/", "val-aux/")  # prefixes of an evaluation's numbers; other fields are labels
MARK = "eval_"  # prefix of evaluation events in the history


def is_evaluation(group: int) -> bool:
    """Whether a group is a prompt of an evaluation."""
    return group >= FIRST


def evaluation_group(step: int, row: int) -> int:
    """The id of a row in the evaluation of a step."""
    return FIRST + (step << ROW_BITS) + row


def split_group(group: int) -> tuple[int, int]:
    """Step and row of an id."""
    return (group - FIRST) >> ROW_BITS, (group - FIRST) & (MAX_ROWS - 1)


def measured_version(line: Mapping[str, Any]) -> int:
    """The version that an ended evaluation measured; its step if no sample was made, or in older lines.

    >>> measured_version({"step": 20, "evaluation_version": 21}), measured_version({"step": 20})
    (21, 20)
    """
    version = int(line.get("evaluation_version", -1))
    return version if version >= 0 else int(line["step"])


def name_version(line: Mapping[str, Any]) -> str:
    """For texts. Lines of older releases may mix versions.

    >>> name_version({"step": 20, "evaluation_version": 20}), name_version({"step": 20, "evaluation_version": -1})
    ('version 20', 'no version')
    >>> name_version({"step": 0, "evaluation_version_min": 0, "evaluation_version_max": 6})
    'versions 0 to 6 mixed'
    """
    oldest, newest = line.get("evaluation_version_min"), line.get("evaluation_version_max")
    if oldest != newest:
        return f"versions {oldest} to {newest} mixed"
    version = line.get("evaluation_version", oldest)
    return "no version" if version is None or version < 0 else f"version {version}"


def row_seed(seed: int, row: int, attempt: int = 0) -> int:
    """The seed of a row's samples, 56 bits. Another attempt draws other samples: one that failed because of its text
    would fail again.
    """
    text = f"{seed}/evaluation/{row}" + (f"/{attempt}" if attempt else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def row_source(row: str) -> str:
    """The data source in the JSON of a row."""
    try:
        found: Any = msgspec.json.decode(row)
    except UNREADABLE:
        return NO_SOURCE
    return str((found.get("data_source") if isinstance(found, dict) else "") or NO_SOURCE)[:SOURCE_CHARS]
