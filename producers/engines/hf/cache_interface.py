"""The interface between the decode loop and the KV cache, with two implementations.

`slot_cache.SlotMemory` holds K and V of all samples in one block and feeds them in one forward;
`cohort_cache.CohortMemory` holds transformers' own cache for every set of samples of one length, for models with other
layers. `decoder.Decoder` uses either. Guarantees:
1. a memory knows samples by lane or by row, not requests, versions or time;
2. `forward` feeds the last token of every live row and stores it; the result of a row depends on its own tokens alone;
3. the result of `prefill` stays valid, and may be seated any number of times, until the weights change.
All calls come from the decode thread, inside `torch.inference_mode`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from producers.engines.hf.slots import Moves, SlotTable

PREFILL_TOKENS = 8192  # padded tokens of one prefill
Tokens = npt.NDArray[np.int32]
#: Errors of a model that does not support its arguments (and torch.OutOfMemoryError, which callers raise again).
UNFIT = (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError, AssertionError)


class Prompt(NamedTuple):
    """Tokens to prefill, and their images as in `GenRequest`."""

    tokens: Tokens
    images: tuple[bytes, ...] = ()
    places: tuple[int, ...] = ()


class Memory(Protocol):
    max_len: int  # tokens of a sample, prompt and response
    verifies: bool  # `forward` takes drafts

    def prefill(self, prompts: Sequence[Prompt]) -> list[Any]:
        """The cache of each of these prompts (one token or more each), to be seated later."""

    def shift(self, prompt: Prompt) -> int:
        """Position of the token after a prompt minus its place: images move it."""

    def seat(self, first: int, lanes: Sequence[int], kept: Any | None) -> None:
        """Put new samples in rows `first..first+len(lanes)`, each with a copy of `kept`; None: an empty cache."""

    def forward(self, table: SlotTable, drafted: Tensor | None = None) -> Tensor:
        """Logits of the next token of every live row, `[live, V]`; the last tokens are stored. With `drafted` i8
        `[live, D]`, tokens that may follow (below 0: none), `[live, 1 + D, V]`: also those after each of them. Drafts
        are stored too, and later calls read those that became tokens of their row alone."""

    def remake(self, table: SlotTable) -> None:
        """Compute the cache of every live row again, with the current weights."""

    def release(self, lanes: Sequence[int], moves: Moves) -> None:
        """Remove these samples; rows have moved."""

    def forget(self) -> None:
        """Drop everything and free the memory."""


def call_options(model: torch.nn.Module) -> dict[str, Any]:
    """Options for the logits of the last position only, if the model supports it."""
    named = inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in named else {}


def pieces(lengths: Sequence[int]) -> list[slice]:
    """Neighbours whose padded rectangle has at most `PREFILL_TOKENS` tokens; one row at least.

    >>> pieces([3000, 3000, 3000])
    [slice(0, 2, None), slice(2, 3, None)]
    """
    found: list[slice] = []
    first, longest = 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if place > first and longest * (place - first + 1) > PREFILL_TOKENS:
            found.append(slice(first, place))
            first, longest = place, length
    if len(lengths):
        found.append(slice(first, len(lengths)))
    return found
