"""K and V of prompts and samples that ended, for prompts that begin like them: the turns of a session, the first turns
of a group, and a system prompt that all sessions share.

Guarantees:
1. K and V of a token depend on the tokens up to it and the weights alone, so the longest common beginning of a prompt
   and an entry is taken over, and only the rest of the prompt is computed. Prompts with images are computed whole;
2. entries are of the current weights: `clear` at every swap;
3. at most `most_tokens` tokens are held. An entry that another one begins with is dropped, then the one that was used
   longest ago.

Example: a turn of 200 tokens behind a context of 3,000, an observation of 50: the next prefill computes 51 tokens (the
last sampled token has no K and V yet), not 3,249.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from producers.engines.hf.cache_interface import Prompt, Tokens
from producers.engines.hf.kv_cache import KV
from producers.engines.hf.slot_cache import SlotMemory

SHORTEST = 4  # tokens: a shorter common beginning is not worth its copy


class _Entry(NamedTuple):
    tokens: Tokens
    layers: KV  # `[1, kv_heads, T, head_dim]`


class PrefixCache:
    """Wraps the prefill of `memory`. `computed` and `reused` count tokens of prompts."""

    def __init__(self, memory: SlotMemory, *, most_tokens: int) -> None:
        self._memory = memory
        self._most = most_tokens
        self._entries: list[_Entry] = []  # the one used last at the end
        self.computed = self.reused = 0

    @property
    def held_tokens(self) -> int:
        return sum(len(entry.tokens) for entry in self._entries)

    def clear(self) -> None:
        """The weights change."""
        self._entries.clear()

    def prefill(self, prompts: Sequence[Prompt]) -> list[Any]:
        """As `Memory.prefill`; equal prompts are computed once."""
        found: dict[Any, Any] = {}
        keys = [(prompt.tokens.tobytes(), prompt.images, prompt.places) for prompt in prompts]
        different = dict(zip(keys, prompts, strict=True))
        begun = {key: None if prompt.images else self._find(prompt.tokens) for key, prompt in different.items()}
        whole = [key for key, head in begun.items() if head is None]
        if whole:
            found |= zip(whole, self._memory.prefill([different[key] for key in whole]), strict=True)
        longer = [key for key, head in begun.items() if head is not None]
        if longer:
            heads: Any = [begun[key] for key in longer]
            found |= zip(longer, self._memory.extend([different[key] for key in longer], heads), strict=True)
        for key, prompt in different.items():
            if not prompt.images:
                self._add(prompt.tokens, partial(_copy, found[key]))
        taken = sum(head[0][0].shape[2] for head in begun.values() if head is not None)
        asked = sum(len(prompt.tokens) for prompt in prompts)
        computed = sum(len(prompt.tokens) for prompt in different.values()) - taken
        self.computed, self.reused = self.computed + computed, self.reused + asked - computed
        return [found[key] for key in keys]

    def keep_row(self, row: int, tokens: Tokens) -> None:
        """Keep what the memory holds of a row that ends: K and V of these tokens."""
        if len(tokens) >= SHORTEST:
            self._add(tokens, lambda: self._memory.copy_row(row, len(tokens)))

    def _find(self, tokens: Tokens) -> KV | None:
        """K and V of the longest known beginning of these tokens."""
        best, most = None, SHORTEST - 1
        for entry in self._entries:
            common = _common(entry.tokens, tokens)
            if common > most:
                best, most = entry, common
        if best is None:
            return None
        self._entries.sort(key=lambda entry: entry is best)
        return [(keys[:, :, :most], values[:, :, :most]) for keys, values in best.layers]

    def _add(self, tokens: Tokens, copy: Callable[[], KV]) -> None:
        shared = [_common(entry.tokens, tokens) for entry in self._entries]
        if len(tokens) > self._most or len(tokens) in shared:  # some entry begins with it
            return
        kept = [entry for entry, common in zip(self._entries, shared, strict=True) if common < len(entry.tokens)]
        self._entries = [*kept, _Entry(tokens, copy())]
        while self.held_tokens > self._most:
            del self._entries[0]


def _copy(layers: KV) -> KV:
    return [(keys.clone(), values.clone()) for keys, values in layers]


def _common(one: Tokens, other: Tokens) -> int:
    """The number of equal tokens at the beginning."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
