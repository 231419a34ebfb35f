"""The key-value memory of the slot sampler, and the two caches that transformers sees of it.

Called by the decoder. `KVStore` holds K and V as `[layers, slots, kv_heads, max_len, head_dim]`; the live rows are the
first ones. `SlotCache` is what a decode step passes as `past_key_values`: it writes one position per row and shows the
live rows up to the longest. `CaptureCache` is what a prefill passes: it keeps what each layer computed. Guarantees:
1. memory is allocated once, as zeros, so that a masked position is never NaN;
2. nothing outside the live rows and the visible length is read.
Neither is a `transformers.Cache`: a model that wants more than `update` (windows, states) fails at start, in the probe.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CaptureCache:
    """Keeps K and V of a prefill, `[B, kv_heads, T, head_dim]` per layer; there is no past."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take what the layer computed and let it attend to just that."""
        if layer != len(self.layers):
            raise RuntimeError(f"layer {layer} stores keys and values after {len(self.layers)} layers")
        self.layers.append((keys, values))
        return keys, values

    def get_seq_length(self, _layer: int = 0) -> int:
        """No past."""
        return 0

    def stacked(self) -> tuple[Tensor, Tensor]:
        """K and V as `[layers, B, kv_heads, T, head_dim]`. Raises RuntimeError where layers differ in shape."""
        shapes = {(tuple(keys.shape), tuple(values.shape)) for keys, values in self.layers}
        if len(shapes) != 1:
            raise RuntimeError(f"layers store keys and values of {len(shapes)} different shapes")
        keys, values = zip(*self.layers, strict=True)
        return torch.stack(keys), torch.stack(values)


class KVStore:
    """K and V of all slots. `keys` and `values`: `[layers, slots, kv_heads, max_len, head_dim]`."""

    def __init__(self, keys: Tensor, values: Tensor, *, slots: int, max_len: int) -> None:
        """Sized like the sample `keys` and `values` of a prefill, `[layers, 1, kv_heads, T, head_dim]`."""
        self.max_len = max_len
        self.keys = _zeros(keys, slots, max_len)
        self.values = _zeros(values, slots, max_len)

    @staticmethod
    def nbytes(keys: Tensor, values: Tensor, *, slots: int, max_len: int) -> int:
        """Bytes that a store of this size takes."""
        per_token = (keys[:, 0, :, 0].numel() + values[:, 0, :, 0].numel()) * keys.element_size()
        return per_token * slots * max_len

    def write(self, first: int, count: int, keys: Tensor, values: Tensor) -> None:
        """Fill rows `first..first+count` from the left with `[layers, count or 1, kv_heads, T, head_dim]`."""
        tokens = keys.shape[3]
        self.keys[:, first : first + count, :, :tokens] = keys
        self.values[:, first : first + count, :, :tokens] = values

    def move(self, sources: Tensor, holes: Tensor, tokens: int) -> None:
        """Copy rows `sources` to rows `holes`, the first `tokens` positions."""
        for block in (self.keys, self.values):
            block[:, holes, :, :tokens] = block[:, sources, :, :tokens]


def _zeros(like: Tensor, slots: int, max_len: int) -> Tensor:
    layers, _, heads, _, width = like.shape
    return torch.zeros((layers, slots, heads, max_len, width), dtype=like.dtype, device=like.device)


class SlotCache:
    """One decode step's view of the store: row `i` writes at `positions[i]` and sees the first `visible` positions."""

    is_compileable = False

    def __init__(self, store: KVStore, rows: Tensor, positions: Tensor, visible: int) -> None:
        self._store = store
        self._rows = rows
        self._positions = positions
        self._live = rows.shape[0]
        self._visible = visible

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[live, kv_heads, 1, head_dim]`; K and V as `[live, kv_heads, visible, head_dim]`, views."""
        all_keys, all_values = self._store.keys[layer], self._store.values[layer]
        all_keys[self._rows, :, self._positions] = keys[:, :, 0]
        all_values[self._rows, :, self._positions] = values[:, :, 0]
        return all_keys[: self._live, :, : self._visible], all_values[: self._live, :, : self._visible]

    def get_seq_length(self, _layer: int = 0) -> int:
        """Positions are given per row; models that ask for one number get the visible length less the new token."""
        return self._visible - 1
