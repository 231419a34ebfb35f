"""K and V of all samples in one block, one forward per step: for models that keep K and V of every token.

Guarantees:
1. a step feeds one token of every live row, at its own position, with its own mask: no padding is computed. With drafts
   every row feeds as many as the longest; the mask hides a wrong draft until its place is written again;
2. layers with a window (`sliding_attention`) or with chunks (`chunked_attention`) keep all tokens and get a mask for
   their visible part: exact, but with more memory than they need;
3. prompts share one right-padded prefill: causal attention never reads the padding. A long one is computed in parts, so
   that memory grows with its length, not with the square;
4. a model that does not store plain K and V of every layer is refused when the memory is made.
It does not prove that the model respects masks and positions: `self_check` does.

Example: rows at positions 3 and 700, window 512: row 0 sees places 0..3 in every layer, row 1 sees 0..700 in full
layers and 189..700 in those with the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.images.forward import body_arguments, see_rows, stray_placeholders
from asyncrl.images.model_inputs import ImageInputs
from producers.engines.hf.attention import Band, plan
from producers.engines.hf.cache_interface import UNFIT, Prompt, Tokens, call_options, pieces
from producers.engines.hf.kv_cache import KV, CaptureCache, ExtendingCache, KVStore, SlotCache
from producers.engines.hf.slots import LAST, POSITION, SHIFT, Moves, SlotTable

PART_TOKENS = 4096  # of a prefill
PART_PAIRS = PART_TOKENS**2  # elements of its mask: a part behind many tokens is shorter
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class Sight(NamedTuple):
    """The visible past of a layer; 0: no limit."""

    window: int = 0
    chunk: int = 0

    def mask(self, places: Tensor, positions: Tensor) -> Tensor:
        """Which of `places` are visible from each of `positions`: bool, of their common shape."""
        seen = places <= positions
        if self.window:
            seen &= places > positions - self.window
        if self.chunk:
            seen &= places // self.chunk == positions // self.chunk
        return seen


def sights(config: Any, *, max_len: int) -> dict[str, Sight]:
    """The visible past by type of layer. Raises ValueError with unsupported types."""
    window = getattr(config, "sliding_window", None) or 0
    if not getattr(config, "use_sliding_window", True) or window >= max_len:
        window = 0
    chunk = getattr(config, "attention_chunk_size", None) or 0
    known = {FULL: Sight(), SLIDING: Sight(window=window), CHUNKED: Sight(chunk=chunk if chunk < max_len else 0)}
    types = set(getattr(config, "layer_types", None) or ())
    if others := sorted(types - set(known)):
        raise ValueError(f"layers of type {', '.join(others)}")
    if not types:  # one kind of layer, given by the window alone
        return {FULL: Sight(window=window)}
    return {kind: known[kind] for kind in sorted(types)}


class SlotMemory:
    verifies = True

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        slots: int,
        max_len: int,
        device: torch.device,
        where: str,
        images: ImageInputs | None = None,
        part_tokens: int = PART_TOKENS,
    ) -> None:
        """Prompts are computed in parts of `part_tokens`. Raises ConfigError `config.model` if the model keeps anything
        but K and V."""
        self.model = model
        self._images = images
        self.max_len = max_len
        self.part_tokens = part_tokens
        self._device = device
        self._options = call_options(model)
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        # Eager attention adds the mask to the scores, "sdpa" takes it as it is.
        self._additive = getattr(text, "_attn_implementation", "") == "eager"
        self._dtype = next(model.parameters()).dtype
        self._rows = torch.arange(0, device=device)
        self._places = torch.arange(max_len, device=device)
        try:
            self._sights = sights(text, max_len=max_len)
            self.like = self._capture([Prompt(np.zeros(1, dtype=np.int32))])
            if len(self.like) == 0 or any(part.dim() != 4 for pair in self.like for part in pair):
                raise ValueError(f"{len(self.like)} layers store keys and values as [rows, heads, tokens, width]")
        except torch.OutOfMemoryError:
            raise
        except UNFIT as error:
            raise ConfigError(
                "config.model",
                f"its layers do not keep keys and values of every token: {error}",
                where=where,
            ) from error
        self.store = KVStore(self.like, slots=slots, max_len=max_len)

    # ------------------------------------------------------------ Memory

    def prefill(self, prompts: Sequence[Prompt]) -> list[Any]:
        """K and V of each prompt by layer, `[1, kv_heads, T, head_dim]`; a long one in parts."""
        first = [one if one.images else one._replace(tokens=one.tokens[: self.part_tokens]) for one in prompts]
        layers = self._capture(first)

        def part(held: Tensor, row: int) -> Tensor:
            return held[row : row + 1, :, : len(first[row].tokens)]

        found = [[(part(k, row), part(v, row)) for k, v in layers] for row in range(len(prompts))]
        whole = all(len(one.tokens) == len(other.tokens) for one, other in zip(first, prompts, strict=True))
        return found if whole else self.extend(prompts, found)

    def extend(self, prompts: Sequence[Prompt], heads: Sequence[KV]) -> list[KV]:
        """As `prefill`, where the first tokens of the prompts have K and V already, `heads`: only the rest is computed,
        without images.
        """
        known = [head[0][0].shape[2] for head in heads]
        while any(len(prompt.tokens) > count for prompt, count in zip(prompts, known, strict=True)):
            part = max(1, min(self.part_tokens, PART_PAIRS // (max(known) + self.part_tokens)))
            rest = [prompt.tokens[count:][:part] for prompt, count in zip(prompts, known, strict=True)]
            heads = self._extend(rest, known, heads)
            known = [head[0][0].shape[2] for head in heads]
        return list(heads)

    def _extend(self, rest: Sequence[Tokens], known: Sequence[int], heads: Sequence[KV]) -> list[KV]:
        """K and V of `heads`, of `known` tokens, and of these tokens behind them."""
        cache, padded = ExtendingCache(heads), torch.from_numpy(_pad(rest)).to(self._device)
        counts = torch.tensor(known, device=self._device)[:, None]
        positions = (counts + self._places[: padded.shape[1]]).clamp(max=self.max_len - 1)
        past = self._places[: cache.past]
        places = torch.cat([torch.where(past < counts, past, self.max_len), positions], 1)  # padding is never seen
        mask = self._mask(places[:, None, None], positions[:, None, :, None])
        self._call(padded, positions, mask, cache)

        def whole(row: int, old: Tensor, made: Tensor) -> Tensor:
            return torch.cat([old, made[row : row + 1, :, : len(rest[row])]], 2)

        made = cache.new.layers
        return [
            [(whole(row, k, keys), whole(row, v, values)) for (k, v), (keys, values) in zip(head, made, strict=True)]
            for row, head in enumerate(heads)
        ]

    def copy_row(self, row: int, tokens: int) -> KV:
        """A copy of K and V of the first tokens of a row, by layer."""
        return [tuple(part[row : row + 1, :, :tokens].clone() for part in pair) for pair in self.store.layers]  # type: ignore[misc]

    def shift(self, prompt: Prompt) -> int:
        """Of models with positions by time, height and width."""
        return 0 if self._images is None else self._images.shift(*prompt)

    def seat(self, first: int, lanes: Sequence[int], kept: Any | None) -> None:
        """Copy K and V of the prompt to the rows."""
        if kept is not None:
            self.store.write(first, len(lanes), kept)

    def forward(self, table: SlotTable, drafted: Tensor | None = None) -> Tensor:
        """One token of every live row, and its draft."""
        live = table.live
        state = table.state[:live]
        ids = state[:, LAST, None]
        if drafted is not None:
            ids = torch.cat([ids, drafted.clamp(min=0)], 1)
        fed = ids.shape[1]
        bands = plan(table.positions[:live] + fed, device=self._device)
        visible = min(bands[-1].visible, self.max_len)
        self.store.reach(visible)
        if len(self._rows) < live:
            self._rows = torch.arange(self.store.slots, device=self._device)
        # The last place is never fed: draft tokens that would be beyond the sample's end may share it.
        positions = (state[:, POSITION, None] + self._places[:fed]).clamp(max=self.max_len - 1)
        cache = SlotCache(self.store, self._rows[:live], positions, visible, bands=_clip_bands(bands, visible, fed))
        mask = self._mask(self._places[:visible], positions[:, None, :, None])
        output = self._call(ids, positions + state[:, SHIFT, None], mask, cache, logits=fed)
        logits: Tensor = output.logits[:, -fed:]
        return logits[:, 0] if drafted is None else logits

    def remake(self, table: SlotTable) -> None:
        """Prefill every live row again, some at a time."""
        rows = [Prompt(*table.sequence(row)) for row in range(table.live)]
        for piece in pieces([len(row.tokens) for row in rows]):
            longest = max(len(row.tokens) for row in rows[piece])
            if longest > self.part_tokens:
                for row, kept in zip(range(piece.start, piece.stop), self.prefill(rows[piece]), strict=True):
                    self.store.write(row, 1, kept)
            elif longest:
                self.store.write(piece.start, piece.stop - piece.start, self._capture(rows[piece]))

    def release(self, lanes: Sequence[int], moves: Moves) -> None:
        """Move the last rows into the holes."""
        del lanes
        if moves.holes:
            sources, holes = (torch.tensor(side, device=self._device) for side in (moves.sources, moves.holes))
            self.store.move(sources, holes, moves.tokens)

    def forget(self) -> None:
        """Start again with a small store."""
        self.store = KVStore(self.like, slots=self.store.slots, max_len=self.max_len)

    # ------------------------------------------------------------ forward

    def _capture(self, prompts: Sequence[Prompt]) -> KV:
        """K and V of these prompts by layer, `[N, kv_heads, T, head_dim]`, T the longest one's tokens."""
        padded = _pad([prompt.tokens for prompt in prompts])
        places = self._places[: padded.shape[1]]
        cache = CaptureCache()
        ids = torch.from_numpy(padded).to(self._device)
        positions, seen = places[None].expand(len(padded), -1), None
        if self._images is not None and any(prompt.images for prompt in prompts):
            positions, seen = see_rows(self._images, prompts, padded.shape[1], self._device)
            ids = seen.mask(ids)
        with stray_placeholders(self.model, seen):
            mask = self._mask(places, places[None, None, :, None])
            self._call(ids, positions, mask, cache, **body_arguments(self.model, seen))
        return cache.layers

    def _mask(self, places: Tensor, positions: Tensor) -> Any:
        """Which `places` `[..., T]` the tokens at `positions` `[N, 1, S, 1]` see: `[N, 1, S, T]`; by type of layer if
        there are several."""
        seen = {}
        for kind, sight in self._sights.items():
            mask = sight.mask(places, positions)
            if self._additive:
                mask = torch.zeros_like(mask, dtype=self._dtype).masked_fill(~mask, torch.finfo(self._dtype).min)
            seen[kind] = mask
        return seen if len(seen) > 1 else next(iter(seen.values()))

    def _call(self, ids: Tensor, positions: Tensor, mask: Any, cache: Any, *, logits: int = 1, **images: Any) -> Any:
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **dict.fromkeys(self._options, logits),
            **images,
        )


def _clip_bands(bands: list[Band], visible: int, fed: int) -> list[Band]:
    """Bands for the attention: none for a single call with one token; the last one ends at the visible block."""
    return [*bands[:-1], bands[-1]._replace(visible=visible)] if len(bands) > 1 or fed > 1 else []


def _pad(rows: Sequence[Tokens]) -> Any:
    """Right-padded with zeros, i8 `[N, longest]`."""
    padded = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded
