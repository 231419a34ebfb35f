"""transformers' own caches, one for each set of samples of equal length: the memory of every other decoder.

A cohort is a set of samples that were seated together and always have equal lengths, so that the model makes its own
masks, positions and states and sees no padding. Guarantees:
1. a forward has the shape that `generate()` gives it for a batch of prompts of equal length;
2. a prompt is prefilled once and its cache copied for every sample of the group; cohorts share no memory;
3. the cache is the model's own, changed only by its `reorder_cache`; a model without such a cache is refused.
It is slow if samples come one by one: a step costs one forward per cohort. Samples never change their cohort.

Example: two groups of 8 samples: two forwards of 8 rows a step; when 3 samples of the first end, of 5 and of 8 rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from producers.engines.hf.cache_interface import UNFIT, Prompt, Tokens, call_options, pieces
from producers.engines.hf.slots import LAST, Moves, SlotTable

CACHE_NAMES = ("past_key_values", "cache_params")
PROBED = 8  # tokens of the shorter of two measured caches


class Cohort:
    """Samples of one length, by lane, in the order of the rows of their cache (None: nothing was fed yet)."""

    __slots__ = ("cache", "lanes")

    def __init__(self, lanes: list[int], cache: Any | None) -> None:
        self.lanes = lanes
        self.cache = cache


class CohortMemory:
    verifies = False

    def __init__(self, model: torch.nn.Module, *, max_len: int, device: torch.device, where: str) -> None:
        """Raises ConfigError `config.model` if the model has no cache that can be copied by rows."""
        self.model = model
        self.max_len = max_len
        self.cohorts: list[Cohort] = []
        self._device = device
        self._options = call_options(model)
        named = inspect.signature(model.forward).parameters
        self._name = next((name for name in CACHE_NAMES if name in named), "")
        what = f"cache by one of the names {', '.join(CACHE_NAMES)}"
        if self._name:
            what = "cache with reorder_cache"
            if callable(getattr(self._probe(where), "reorder_cache", None)):
                return
        raise ConfigError("config.model", f"{type(model).__name__} has no {what}", where=where)

    @torch.inference_mode()
    def _probe(self, where: str, *, tokens: int = 1) -> Any:
        """The cache of `tokens` tokens."""
        try:
            return self._feed(torch.zeros((1, tokens), dtype=torch.int64, device=self._device), None)[1]
        except torch.OutOfMemoryError:
            raise
        except UNFIT as error:
            raise ConfigError(
                "config.model", f"it makes no cache: {type(error).__name__}: {error}", where=where
            ) from error

    def nbytes(self, *, slots: int, where: str) -> int:
        """Bytes of the caches of this many samples at full length, estimated from two short caches: the constant part,
        and the part per token in layers without a window, or up to it."""
        short, long = (getattr(self._probe(where, tokens=n), "layers", []) for n in (PROBED, 2 * PROBED))
        total = 0
        for before, after in zip(short, long, strict=True):
            window = getattr(after, "get_max_length", lambda: -1)()
            reach = self.max_len if window < 0 else min(window, self.max_len)
            size = _layer_bytes(before)
            total += size + (_layer_bytes(after) - size) * max(0, reach - PROBED) // PROBED
        return total * slots

    # ------------------------------------------------------------ Memory

    def prefill(self, prompts: Sequence[Prompt]) -> list[Any]:
        """The cache of each prompt, one forward each."""
        return [self._feed_rows([prompt.tokens]) for prompt in prompts]

    def shift(self, prompt: Prompt) -> int:
        """0: models with images have slots."""
        del prompt
        return 0

    def seat(self, first: int, lanes: Sequence[int], kept: Any | None) -> None:
        del first
        cache = None if kept is None else self._select(copy.deepcopy(kept), [0] * len(lanes))
        self.cohorts.append(Cohort(list(lanes), cache))

    def forward(self, table: SlotTable, drafted: Tensor | None = None) -> Tensor:
        """One token of every live row, one forward per cohort."""
        assert drafted is None
        row_of = {lane: row for row, lane in enumerate(table.lanes)}
        rows, parts = [], []
        for cohort in self.cohorts:
            mine = torch.tensor([row_of[lane] for lane in cohort.lanes], device=self._device)
            logits, cohort.cache = self._feed(table.state[mine, LAST, None], cohort.cache)
            rows.append(mine)
            parts.append(logits)
        gathered = torch.cat(parts)
        return torch.empty_like(gathered).index_copy_(0, torch.cat(rows), gathered)

    def remake(self, table: SlotTable) -> None:
        """Prefill every cohort again; one that is too large for one prefill is split."""
        row_of = {lane: row for row, lane in enumerate(table.lanes)}
        made: list[Cohort] = []
        for cohort in self.cohorts:
            rows = [table.sequence(row_of[lane])[0] for lane in cohort.lanes]
            for piece in pieces([len(row) for row in rows]):
                made.append(Cohort(cohort.lanes[piece], self._feed_rows(rows[piece]) if len(rows[0]) else None))
        self.cohorts = made

    def release(self, lanes: Sequence[int], moves: Moves) -> None:
        """Remove these samples from their caches."""
        del moves  # cohorts identify samples by lane
        gone = set(lanes)
        for cohort in self.cohorts:
            left = [place for place, lane in enumerate(cohort.lanes) if lane not in gone]
            if len(left) < len(cohort.lanes):
                cohort.lanes = [cohort.lanes[place] for place in left]
                if left and cohort.cache is not None:
                    cohort.cache = self._select(cohort.cache, left)
        self.cohorts = [cohort for cohort in self.cohorts if cohort.lanes]

    def forget(self) -> None:
        self.cohorts = []

    # ------------------------------------------------------------ forward

    def _feed(self, ids: Tensor, cache: Any | None) -> tuple[Tensor, Any]:
        """Logits of the last position `[N, V]` and the cache after these tokens `[N, T]`."""
        given = {} if cache is None else {self._name: cache}
        output = self.model(input_ids=ids, use_cache=True, **given, **self._options)
        return output.logits[:, -1], output[self._name]

    def _feed_rows(self, rows: Sequence[Tokens]) -> Any:
        """The cache of rows of equal length."""
        return self._feed(torch.from_numpy(np.stack(rows).astype(np.int64)).to(self._device), None)[1]

    def _select(self, cache: Any, rows: list[int]) -> Any:
        """These rows of the cache, which is changed."""
        cache.reorder_cache(torch.tensor(rows, device=self._device))
        return cache


def _layer_bytes(layer: Any) -> int:
    """Bytes of all tensors of a cache layer, also in dicts of it."""
    held = [part for value in vars(layer).values() for part in (value.values() if isinstance(value, dict) else [value])]
    return sum(part.numel() * part.element_size() for part in held if isinstance(part, torch.Tensor))
