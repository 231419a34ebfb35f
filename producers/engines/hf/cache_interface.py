"""What a model remembers of the samples under way: the interface between the decode loop and K/V, in two makes.

`slot_memory.SlotMemory` holds K and V of all samples in one block and feeds them in one forward; `cohorts.CohortMemory`
holds transformers' own cache for every set of samples of one length, for models whose layers keep something else.
`decoder.Decoder` drives either, so that queue, random numbers, versions and swaps are the same code. Guarantees:
1. a memory knows the samples of the table by lane or by row and nothing of requests, versions or time;
2. `forward` feeds the last token of every live row and remembers it; what a row gets depends on its own tokens alone;
3. what `prefill` returns stays valid, and may be seated any number of times, until the weights change.
All calls come from the decode thread, inside `torch.inference_mode`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from producers.engines.hf.slots import Moves, SlotTable

PREFILL_TOKENS = 8192  # padded tokens of one prefill
Tokens = npt.NDArray[np.int32]
#: What a model raises that does not take what it is handed (and torch.OutOfMemoryError, which is nobody's answer).
UNFIT = (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError, AssertionError)


class Memory(Protocol):
    max_len: int  # tokens of a sample, prompt and response

    def prefill(self, prompts: Sequence[Tokens]) -> list[Any]:
        """What the model remembers of each of these token rows (one token or more each), to be seated later."""

    def seat(self, first: int, lanes: Sequence[int], kept: Any | None) -> None:
        """New samples in rows `first..first+len(lanes)`, each with a copy of `kept`; None: nothing to remember yet."""

    def forward(self, table: SlotTable) -> Tensor:
        """Logits of the next token of every live row, `[live, V]`; the last tokens are remembered."""

    def remake(self, table: SlotTable) -> None:
        """Compute anew, under the current weights, what is remembered of every live row."""

    def release(self, lanes: Sequence[int], moves: Moves) -> None:
        """These samples are gone, and rows have moved."""

    def forget(self) -> None:
        """Nothing is remembered any more: room that was taken is given back."""


def call_options(model: torch.nn.Module) -> dict[str, Any]:
    """Logits of the last position alone, where the model can leave the others out."""
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
