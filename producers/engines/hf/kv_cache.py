"""The key-value memory of the slot sampler, and its three caches for transformers.

`KVStore` holds K and V of each layer as `[slots, kv_heads, length, head_dim]`; the live rows are the first ones. A
decode step passes `SlotCache` as `past_key_values`: it writes one position per row and returns the live rows up to the
longest. A prefill passes `CaptureCache`: it keeps the K and V of each layer; a
prefill behind known tokens passes `ExtendingCache`. Guarantees:
1. memory starts as zeros, so that a masked position is never NaN; it grows with the longest sample, by doubling up to
   `max_len`, one layer at a time, and does not shrink;
2. nothing outside the live rows and the visible length is read;
3. layers may differ in heads and widths (also K from V), but all keep every token. Neither is a `transformers.Cache`: a
   model that needs more than `update` (windows that forget, states) fails in the probe of `slot_cache`, and gets
   `cohort_cache` instead.

Example: 64 slots, 8 KV heads of 128, bfloat16: 256 KiB for each position of a layer. 32 layers hold 256 positions in
2 GiB; the first sample beyond them makes it 4 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FIRST_LENGTH = 256  # positions of a store at its start
KV = list[tuple[Tensor, Tensor]]  # by layer


class CaptureCache:
    """Keeps K and V of a prefill, `[B, kv_heads, T, head_dim]` per layer; there is no past."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: KV = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the layer's K and V; it attends only to them."""
        if layer != len(self.layers):
            raise RuntimeError(f"layer {layer} stores keys and values after {len(self.layers)} layers")
        self.layers.append((keys, values))
        return keys, values

    def get_seq_length(self, _layer: int = 0) -> int:
        return 0


class ExtendingCache:
    """A prefill of several rows behind K and V that they have: `heads[n]` by layer, `[1, kv_heads, T_n, head_dim]`.

    They are padded on the right to the longest one, `past` tokens; the mask hides the padding.
    """

    is_compileable = False

    def __init__(self, heads: Sequence[KV]) -> None:
        self._heads = heads
        self.past = max(head[0][0].shape[2] for head in heads)
        self.new = CaptureCache()

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the layer's new K and V; K and V of past and new tokens, `[N, kv_heads, past + new, head_dim]`."""
        self.new.update(keys, values, layer)
        old_keys, old_values = ([self._pad(head[layer][side]) for head in self._heads] for side in (0, 1))
        return torch.cat([torch.cat(old_keys), keys], 2), torch.cat([torch.cat(old_values), values], 2)

    def _pad(self, part: Tensor) -> Tensor:
        return torch.nn.functional.pad(part, (0, 0, 0, self.past - part.shape[2]))

    def get_seq_length(self, _layer: int = 0) -> int:
        return self.past


class KVStore:
    """K and V of all slots: `layers[i]` are keys and values `[slots, kv_heads, length, head_dim]`."""

    def __init__(self, like: KV, *, slots: int, max_len: int) -> None:
        """With the layers of a prefill: `[1, kv_heads, T, head_dim]` each."""
        self.slots = slots
        self.max_len = max_len
        self.length = 0
        self.layers: KV = [(keys[:0], values[:0]) for keys, values in like]  # no memory yet

    @staticmethod
    def nbytes(like: KV, *, slots: int, max_len: int) -> int:
        """Bytes of a store at its full length."""
        return sum(part[:, :, 0].numel() * part.element_size() for pair in like for part in pair) * slots * max_len

    def reach(self, length: int) -> None:
        """Make room for this many positions of every row."""
        if length <= self.length:
            return
        while self.length < length:
            self.length = min(self.max_len, max(FIRST_LENGTH, 2 * self.length))
            if self.length == self.max_len:
                break
        for layer, (keys, values) in enumerate(self.layers):
            self.layers[layer] = (self._longer(keys), self._longer(values))

    def _longer(self, old: Tensor) -> Tensor:
        rows, heads, length, width = old.shape
        new = torch.zeros((self.slots, heads, self.length, width), dtype=old.dtype, device=old.device)
        if rows:
            new[:, :, :length] = old
        return new

    def write(self, first: int, count: int, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fill rows `first..first+count` from the left with `[count or 1, kv_heads, T, head_dim]` by layer."""
        tokens = parts[0][0].shape[2]
        self.reach(tokens)
        for held, new in zip(self.layers, parts, strict=True):
            for block, part in zip(held, new, strict=True):
                block[first : first + count, :, :tokens] = part

    def move(self, sources: Tensor, holes: Tensor, tokens: int) -> None:
        """Copy rows `sources` to rows `holes`, the first `tokens` positions."""
        for pair in self.layers:
            for block in pair:
                block[holes, :, :tokens] = block[sources, :, :tokens]


class SlotCache:
    """One decode step's view of the store: row `i` writes at `positions[i]` (`[live, fed]`) and sees the first
    `visible` positions.

    `bands`: for `attention.attend`.
    """

    is_compileable = False

    def __init__(
        self, store: KVStore, rows: Tensor, positions: Tensor, visible: int, *, bands: Sequence[Any] = ()
    ) -> None:
        self._store = store
        self._rows = rows
        self._positions = positions
        self._live = rows.shape[0]
        self._visible = visible
        self._bands = bands

    def update(self, keys: Tensor, values: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[live, kv_heads, fed, head_dim]`; K and V as `[live, kv_heads, visible, head_dim]`, views."""
        all_keys, all_values = self._store.layers[layer]
        all_keys[self._rows[:, None], :, self._positions] = keys.transpose(1, 2)
        all_values[self._rows[:, None], :, self._positions] = values.transpose(1, 2)
        seen: Any = all_keys[: self._live, :, : self._visible]
        if self._bands:
            seen.bands = self._bands
        return seen, all_values[: self._live, :, : self._visible]

    def get_seq_length(self, _layer: int = 0) -> int:
        """The visible length without the new tokens, for models that need one number; positions are given per row."""
        return self._visible - self._positions.shape[1]
