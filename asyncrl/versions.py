"""Weight versions and lag: the arithmetic of staleness.

A version is the number of learner steps done when the
weights were published; version 0 is the start weights. Guarantees:
1. a lag is `training version - oldest version`, where the training version is the one that the step starts from;
2. runs are the run-length form of per-token versions: `[(version, tokens), ...]` without empty runs;
3. nothing here holds state.

Example: a sample with 3 tokens of version 4 and 2 of version 5 has runs `((4, 3), (5, 2))`, oldest version 4,
and lag 2 in the step that starts from version 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Runs = tuple[tuple[int, int], ...]


def runs_of(versions: Iterable[int]) -> Runs:
    """The run-length form of per-token versions.

    >>> runs_of([4, 4, 4, 5, 5])
    ((4, 3), (5, 2))
    """
    runs: list[tuple[int, int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + 1)
        else:
            runs.append((version, 1))
    return tuple(runs)


def expand(runs: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """Per-token versions, int32 `[T]`."""
    if not runs:
        return np.zeros(0, dtype=np.int32)
    values, counts = zip(*runs, strict=True)
    return np.repeat(np.asarray(values, dtype=np.int32), np.asarray(counts))


def joined_runs(first: Runs, second: Runs) -> Runs:
    """The runs of tokens in a row.

    >>> joined_runs(((4, 3),), ((4, 1), (5, 2)))
    ((4, 4), (5, 2))
    """
    if first and second and first[-1][0] == second[0][0]:
        return (*first[:-1], (first[-1][0], first[-1][1] + second[0][1]), *second[1:])
    return (*first, *second)


def cut_runs(runs: Runs, start: int, stop: int) -> Runs:
    """The runs of the tokens `start .. stop`.

    >>> cut_runs(((4, 3), (5, 2), (6, 1)), 2, 5)
    ((4, 1), (5, 2))
    """
    found: list[tuple[int, int]] = []
    at = 0
    for version, count in runs:
        inside = min(stop, at + count) - max(start, at)
        if inside > 0:
            found.append((version, inside))
        at += count
    return tuple(found)


def oldest_version(runs: Iterable[tuple[int, int]]) -> int | None:
    """The smallest version of the runs, None where there are none."""
    return min((version for version, _ in runs), default=None)


def lag(training_version: int, oldest: int) -> int:
    """Steps between the weights that made a token and those that the training step starts from; 0 is on-policy."""
    return training_version - oldest
