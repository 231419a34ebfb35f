"""The decode loop of the slot sampler, one step at a time, without threads and without asyncio.

Called by `producers.engines.hf` on its decode thread, and by tests directly. A step is: seat waiting samples in free
rows, one forward over the live rows, one token per row, hand out the finished ones. Guarantees:
1. a prompt is prefilled once per group and version, and its K/V copied to the rows of its samples; prompts of several
   waiting groups share one right-padded prefill (causal attention never looks at the padding);
2. a prefill holds the prompt without its last token; the first decode step feeds that one. So every token of a sample
   comes from a decode step, and its version is the version of that step;
3. tokens of a sample depend on (weights, prompt, seed, index) alone, up to the float noise of another batch shape;
4. `swap` runs between two steps; with `recompute` all live K/V is made again under the new weights; a shared prefill
   of before is never used after it, also where the version keeps its number;
5. after `halt` nothing is decoded until the next `swap`, nor while `paused`; while `draining` nobody new gets a row.
It raises what torch raises; the engine turns that into `engine.broken`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.engine import GenDelta, GenRequest
from producers.engines.kv import CaptureCache, KVStore, SlotCache
from producers.engines.sampling import sample
from producers.engines.slots import LAST, POSITION, TOP_K, SlotTable

VIEW_STEP = 16  # the visible length is rounded up to this, so that shapes repeat
PREFILL_TOKENS = 8192  # padded tokens of one prefill
PREFILL_GROUPS = 16  # prompts prefilled ahead of their turn


class Prefix:
    """K/V of a prompt without its last token, `[layers, 1, kv_heads, P - 1, head_dim]`, made after swap `era`."""

    __slots__ = ("era", "keys", "values")

    def __init__(self, era: int, keys: Tensor | None, values: Tensor | None) -> None:
        self.era = era
        self.keys = keys
        self.values = values


class Waiting:
    """A request with samples that have no row yet."""

    __slots__ = ("prefix", "request", "todo")

    def __init__(self, request: GenRequest) -> None:
        self.request = request
        self.todo = list(request.indices)
        self.prefix: Prefix | None = None


class Decoder:
    """The state of one engine. Single-threaded."""

    def __init__(self, model: torch.nn.Module, store: KVStore, table: SlotTable, *, recompute: bool) -> None:
        self.model = model
        self.store = store
        self.table = table
        self.version = -1
        self.steps = 0
        self.generated_tokens = 0
        self.busy_s = 0.0
        self.halted = False  # until the next swap: the weights are being overwritten
        self.paused = False
        self.draining = False  # seat nobody
        self._era = 0  # swaps so far: a version number may come again with other weights
        self._recompute = recompute
        self._waiting: deque[Waiting] = deque()
        self._eras: list[tuple[int, int]] = []  # (first step, version)
        device = table.state.device
        self._device = device
        self._rows = torch.arange(table.slots, device=device)
        self._places = torch.arange(store.max_len, device=device)

    @property
    def waiting(self) -> int:
        """Samples without a row; any thread (the copy is one step of the interpreter)."""
        return sum(len(entry.todo) for entry in list(self._waiting))

    @property
    def idle(self) -> bool:
        """True where a step would do nothing."""
        return self.halted or self.paused or (not self.table.live and (self.draining or not self._waiting))

    def submit(self, request: GenRequest) -> None:
        """Queue a request behind the others of its priority."""
        place = len(self._waiting)
        while place and self._waiting[place - 1].request.priority > request.priority:
            place -= 1
        self._waiting.insert(place, Waiting(request))

    @torch.inference_mode()
    def abort(self, ids: Sequence[str] | None) -> int:
        """Give up these requests (None: all); the number of samples given up."""
        wanted = None if ids is None else set(ids)
        gone = [entry for entry in self._waiting if wanted is None or entry.request.id in wanted]
        for entry in gone:
            self._waiting.remove(entry)
        rows = self.table.rows_of(wanted)
        self._release(rows)
        return len(rows) + sum(len(entry.todo) for entry in gone)

    @torch.inference_mode()
    def step(self) -> list[GenDelta]:
        """One token for every live sample; what is to be handed out after it: ended samples and deltas that are due."""
        if self.halted or self.paused:
            return []
        started = time.perf_counter()
        self._admit()
        live = self.table.live
        deltas: list[GenDelta] = []
        if live:
            state = self.table.state[:live]
            tokens, logprobs = self._sample(self._forward(state, live), state, live)
            rows = self.table.record(state, tokens, logprobs)
            self.steps += 1
            self.generated_tokens += live
            if due := self.table.due(rows):
                deltas = self.table.collect(due, self._eras, ended=False)
            if rows:
                deltas += self.table.collect(rows, self._eras)
                self._release(rows)
        self.busy_s += time.perf_counter() - started
        return deltas

    @torch.inference_mode()
    def swap(self, version: int, change: Callable[[], None]) -> float:
        """Make new weights current by `change`; the next step opens a run of `version`. Seconds stood still."""
        started = time.perf_counter()
        change()
        self.version = version
        self.halted = False
        self._era += 1
        self._eras.append((self.steps, version))
        if self._recompute and self.table.live:
            self._remake()
        return time.perf_counter() - started

    def halt(self) -> None:
        """Stand still until the next swap: the weights are being overwritten."""
        self.halted = True

    def reset(self) -> None:
        """Forget versions and counters; no sample may be alive."""
        self.version, self.steps, self.generated_tokens, self.busy_s = -1, 0, 0, 0.0
        self._eras.clear()

    # ------------------------------------------------------------ forward

    def _forward(self, state: Tensor, live: int) -> Tensor:
        """Logits of the next token, `[live, V]`."""
        longest = int(self.table.positions[:live].max()) + 1
        visible = min(-(-longest // VIEW_STEP) * VIEW_STEP, self.store.max_len)
        positions = state[:, POSITION]
        mask = (self._places[:visible] <= positions[:, None])[:, None, None]
        cache = SlotCache(self.store, self._rows[:live], positions, visible)
        output = self.model(
            input_ids=state[:, LAST, None], position_ids=positions[:, None], attention_mask=mask,
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits: Tensor = output.logits[:, -1]
        return logits

    def _sample(self, logits: Tensor, state: Tensor, live: int) -> tuple[Tensor, Tensor]:
        knobs = self.table.knobs[:live]
        cuts = self.table.cuts
        return sample(
            logits, self.table.numbers(state), knobs[:, 0],
            top_p=knobs[:, 1] if cuts else None, top_k=state[:, TOP_K] if cuts else None,
        )  # fmt: skip

    def _prefill(self, rows: list[npt.NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
        """K and V of these token rows, right-padded: `[layers, rows, kv_heads, longest, head_dim]`."""
        longest = max(len(row) for row in rows)
        padded = np.zeros((len(rows), longest), dtype=np.int64)
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        places = self._places[:longest]
        cache = CaptureCache()
        self.model(
            input_ids=torch.from_numpy(padded).to(self._device), position_ids=places[None].expand(len(rows), -1),
            attention_mask=(places <= places[:, None])[None, None], past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        return cache.stacked()

    # ------------------------------------------------------------ rows

    def _admit(self) -> None:
        """Seat waiting samples, first come first served within a priority, while rows are free."""
        while not self.draining and self.table.free and self._waiting:
            entry = self._waiting[0]
            if entry.prefix is None or entry.prefix.era != self._era:
                self._prefill_ahead()
                continue
            indices = entry.todo[: self.table.free]
            del entry.todo[: len(indices)]
            first = self.table.add(entry.request, indices, step=self.steps)
            if entry.prefix.keys is not None and entry.prefix.values is not None:
                self.store.write(first, len(indices), entry.prefix.keys, entry.prefix.values)
            if not entry.todo:
                self._waiting.popleft()

    def _prefill_ahead(self) -> None:
        """Prefill the first waiting prompts together: one forward for several groups."""
        chosen: list[Waiting] = []
        longest = 0
        for entry in self._waiting:
            if entry.prefix is not None and entry.prefix.era == self._era:
                continue
            longest = max(longest, len(entry.request.prompt_ids) - 1)
            if chosen and (longest * (len(chosen) + 1) > PREFILL_TOKENS or len(chosen) == PREFILL_GROUPS):
                break
            chosen.append(entry)
        prompts = [entry.request.prompt_ids[:-1] for entry in chosen]
        if not any(len(prompt) for prompt in prompts):  # one-token prompts have nothing to keep
            for entry in chosen:
                entry.prefix = Prefix(self._era, None, None)
            return
        keys, values = self._prefill(prompts)
        for place, (entry, prompt) in enumerate(zip(chosen, prompts, strict=True)):
            part = (slice(None), slice(place, place + 1), slice(None), slice(0, len(prompt)))
            entry.prefix = Prefix(self._era, keys[part], values[part])

    def _remake(self) -> None:
        """Make the K/V of all live rows again under the current weights."""
        rows = [self.table.sequence(row) for row in range(self.table.live)]
        first = 0
        while first < len(rows):
            last, longest = first, 0
            while last < len(rows):
                longest = max(longest, len(rows[last]))
                if last > first and longest * (last - first + 1) > PREFILL_TOKENS:
                    break
                last += 1
            if any(len(row) for row in rows[first:last]):
                self.store.write(first, last - first, *self._prefill(rows[first:last]))
            first = last

    def _release(self, rows: list[int]) -> None:
        moves = self.table.release(rows)
        if moves.holes:
            sources, holes = (torch.tensor(side, device=self._device) for side in (moves.sources, moves.holes))
            self.store.move(sources, holes, moves.tokens)
