"""Claimed batches made by hand: the types that the learner gets from `asyncrl.wire.batch_arrays`, with what tests
leave open.

Used by the tests of training that need no buffer. Nothing is checked here: a test may make what no buffer would hand
out. Example: `a_sample(0, [5, 6, 7], reward=1.0)` has log-probs of 0 and three tokens of version 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData, SampleData

Runs = tuple[tuple[int, int], ...]


def a_sample(
    index: int,
    response: Any,
    logprobs: Any = None,
    reward: float = 0.0,
    *,
    mask: Any = None,
    runs: Runs | None = None,
    finish: str = "stop",
    parts: dict[str, float] | None = None,
    rows: tuple[tuple[int, int], ...] = (),
) -> SampleData:
    """Log-probs are 0 and all tokens of version 0 where nothing else is said."""
    tokens = np.asarray(response, np.int32)
    logs = np.zeros(tokens.size, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    spans = ((0, tokens.size),) if runs is None else runs
    return SampleData(index, tokens, logs, mask, spans, finish, float(reward), parts or {}, {}, rows)


def a_group(
    number: int, prompt_ids: Any, samples: Sequence[SampleData], *, bound: int = 4, row: dict[str, Any] | None = None
) -> GroupData:
    """A group under this bound of staleness."""
    return GroupData(number, bound, row or {}, np.asarray(prompt_ids, np.int32), tuple(samples), {})


def a_batch(
    step: int,
    version: int,
    groups: Sequence[GroupData],
    *,
    replayed: bool = False,
    invalid: dict[int, str] | None = None,
) -> ClaimedBatch:
    """The batch of a step that starts from `version`."""
    return ClaimedBatch(step, version, replayed, tuple(groups), {}, invalid or {})
