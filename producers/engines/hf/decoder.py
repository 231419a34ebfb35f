"""The decode loop of the hf engine, one step at a time, without threads and without asyncio.

A step: seat waiting samples in free rows, feed the live rows, sample one token per row, return the finished samples.
The cache is a `cache_interface.Memory`. Guarantees:
1. a prompt is prefilled once per group and version, and copied for its samples; prompts of several waiting groups are
   prefilled together. With a `PrefixCache`, prompts that begin like earlier samples are computed from there on;
2. a prefill holds the prompt without its last token; the first decode step feeds that one. So every token of a sample
   comes from a decode step, and its version is the version of that step;
3. tokens of a sample depend only on (weights, prompt, seed, index), up to the float noise of another batch shape.
   With a `Drafter` a step may feed drafts too: each token is drawn by its own random number from its own logits;
4. `swap` runs between two steps; with `recompute` the cache of live rows is computed again with the new weights; a
   shared prefill from before is never used after it, also if the version keeps its number;
5. after `halt` nothing is decoded until the next `swap`, nor while `paused`; while `draining` no new sample gets a row.
It raises torch's errors; the engine turns them into `engine.broken`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.engine import GenDelta, GenRequest
from asyncrl.runtime.routers import Routers
from producers.engines.hf.cache_interface import Memory, Prompt, pieces
from producers.engines.hf.prefix_cache import PrefixCache
from producers.engines.hf.sampling import Cut, Drawn, sample
from producers.engines.hf.slots import LAST, TOP_K, SlotTable
from producers.engines.ngram import Drafter

PREFILL_GROUPS = 16  # prompts to prefill in advance


class Prefix:
    """The cache of a prompt without its last token, made after swap `era`; `kept` None: it has one token. `shift`: of
    the positions after it; `experts` `[tokens, layers, chosen]`, if they are recorded."""

    __slots__ = ("era", "experts", "kept", "shift")

    def __init__(self, era: int, kept: Any | None, shift: int = 0, experts: Tensor | None = None) -> None:
        self.era = era
        self.kept = kept
        self.shift = shift
        self.experts = experts


class Waiting:
    """A request with samples that have no row yet."""

    __slots__ = ("prefix", "request", "todo")

    def __init__(self, request: GenRequest) -> None:
        self.request = request
        self.todo = list(request.indices)
        self.prefix: Prefix | None = None


class Decoder:
    """The state of one engine. Single-threaded."""

    def __init__(
        self,
        memory: Memory,
        table: SlotTable,
        *,
        recompute: bool,
        routers: Routers | None = None,
        prefixes: PrefixCache | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`routers`: of the model, to record the experts that tokens go through. `prefixes`: of `memory`. `drafter`: if
        `memory` verifies drafts; without `routers`."""
        self.memory = memory
        self.prefixes = prefixes
        self.drafter = drafter
        self._prefill = memory.prefill if prefixes is None else prefixes.prefill
        self._routers = routers
        self.table = table
        self.version = -1
        self.steps = 0
        self.generated_tokens = 0
        self.busy_s = 0.0
        self.halted = False  # until the next swap: the weights are being overwritten
        self.paused = False
        self.draining = False  # seat no new samples
        self._era = 0  # swaps so far: a version number may come again with other weights
        self._recompute = recompute
        self._waiting: deque[Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Samples without a row; any thread (the copy is one step of the interpreter)."""
        return sum(len(entry.todo) for entry in list(self._waiting))

    @property
    def idle(self) -> bool:
        """True if a step would do nothing."""
        return self.halted or self.paused or (not self.table.live and (self.draining or not self._waiting))

    def submit(self, request: GenRequest) -> None:
        """Queue a request after the others of its priority."""
        place = len(self._waiting)
        while place and self._waiting[place - 1].request.priority > request.priority:
            place -= 1
        self._waiting.insert(place, Waiting(request))

    @torch.inference_mode()
    def abort(self, ids: Sequence[str] | None) -> int:
        """Abort these requests (None: all); the number of aborted samples."""
        wanted = None if ids is None else set(ids)
        gone = [entry for entry in self._waiting if wanted is None or entry.request.id in wanted]
        for entry in gone:
            self._waiting.remove(entry)
        rows = self.table.rows_for(wanted)
        self._release(rows)
        return len(rows) + sum(len(entry.todo) for entry in gone)

    @torch.inference_mode()
    def step(self) -> list[GenDelta]:
        """One token or more for every live sample; returns ended samples and due deltas."""
        if self.halted or self.paused:
            return []
        started = time.perf_counter()
        self._admit()
        deltas: list[GenDelta] = []
        if self.table.live:
            rows = self._decode() if self.drafter is None else self._decode_drafts(self.drafter)
            self.steps += 1
            if due := self.table.rows_due(rows):
                deltas = self.table.collect(due, ended=False)
            if rows:
                deltas += self.table.collect(rows)
                self._release(rows)
        self.busy_s += time.perf_counter() - started
        return deltas

    @torch.inference_mode()
    def swap(self, version: int, change: Callable[[], None]) -> float:
        """Make new weights current by `change`; the next step opens a run of `version`. Returns the seconds of the
        pause."""
        started = time.perf_counter()
        change()
        self.version = version
        self.halted = False
        self._era += 1
        self.table.mark(version)
        self.table.forget_experts()
        if self.prefixes is not None:
            self.prefixes.clear()
        if self._recompute and self.table.live:
            self.memory.remake(self.table)
        return time.perf_counter() - started

    def halt(self) -> None:
        """Stop until the next swap: the weights are being overwritten."""
        self.halted = True

    def forget(self) -> None:
        """Free K and V, those of ended samples too; no sample may be alive."""
        self.memory.forget()
        if self.prefixes is not None:
            self.prefixes.clear()

    def reset(self) -> None:
        """Forget versions, counters and the cache; no sample may be alive."""
        self.forget()
        self.version, self.steps, self.generated_tokens, self.busy_s = -1, 0, 0, 0.0

    # ------------------------------------------------------------ a step

    def _decode(self) -> list[int]:
        """One token for every live row; the rows that ended."""
        live = self.table.live
        state = self.table.state[:live]
        logits, experts = self._forward(self.memory.forward, self.table)
        drawn = self._sample(logits, state, live)
        self.generated_tokens += live
        return self.table.record(state, drawn.tokens, drawn.logprobs, drawn.kept, experts)

    def _decode_drafts(self, drafter: Drafter) -> list[int]:
        """The same, and drafts if they pay."""
        table = self.table
        started, lanes = drafter.clock(), list(table.lanes)
        guesses = drafter.propose(lanes, [table.occupants[lane].request for lane in lanes])
        if guesses is None:
            rows = self._decode()
            made = table.state[: len(lanes), LAST, None].tolist()
        else:
            state, drafted = table.state[: len(lanes)], torch.from_numpy(guesses).to(table.state.device)
            drawn = self._sample(self.memory.forward(table, drafted).flatten(0, 1), state, len(lanes))
            tokens = drawn.tokens.view(len(lanes), -1)
            found = torch.cat([table.count_accepted(state, tokens, drafted)[:, None], tokens], 1).tolist()
            made = [line[1 : 1 + line[0]] for line in found]
            counts = [len(line) for line in made]
            rows = table.record_several(state, tokens, drawn.logprobs.view_as(tokens), counts, drawn.kept)
            self.generated_tokens += sum(counts)
        width = 0 if guesses is None else guesses.shape[1]
        drafter.learn(lanes, made, width, drafter.clock() - started)
        return rows

    def _forward(self, run: Callable[[Any], Any], given: Any) -> tuple[Any, Tensor | None]:
        """The result of a forward pass, and the experts of its tokens if they are recorded."""
        if self._routers is None:
            return run(given), None
        with self._routers.recording() as found:
            result = run(given)
        return result, found[0]

    def _sample(self, logits: Tensor, state: Tensor, live: int) -> Drawn:
        """A token for each line of `logits`: as many for every live row, one after the other."""
        knobs, top_k, exact = self.table.knobs[:live], state[:, TOP_K], self.table.recording
        width = len(logits) // live
        if width > 1:
            knobs, top_k = knobs.repeat_interleave(width, 0), top_k.repeat_interleave(width)
            exact = None if exact is None else exact.repeat_interleave(width)
        cut = Cut(knobs[:, 1], top_k, knobs[:, 2]) if self.table.cuts else None
        return sample(logits, self.table.numbers(state, width), knobs[:, 0], cut=cut, exact=exact)

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
            made = entry.prefix
            first = self.table.add(entry.request, indices, version=self.version, shift=made.shift, experts=made.experts)
            self.memory.seat(first, self.table.lanes[first:], made.kept)
            if not entry.todo:
                self._waiting.popleft()

    def _prefill_ahead(self) -> None:
        """Prefill the first waiting prompts together, as many as fit in one prefill."""
        stale = [entry for entry in self._waiting if entry.prefix is None or entry.prefix.era != self._era]
        chosen = stale[:PREFILL_GROUPS]
        chosen = chosen[pieces([len(entry.request.prompt_ids) - 1 for entry in chosen])[0]]
        for entry in chosen:
            entry.prefix = Prefix(self._era, None, experts=None if self._routers is None else self._routers.nothing())
        several = [entry for entry in chosen if len(entry.request.prompt_ids) > 1]
        if several:
            asked = [entry.request for entry in several]
            prompts = [Prompt(one.prompt_ids[:-1], one.images, one.image_places) for one in asked]
            found, experts = self._forward(self._prefill, prompts)
            padded = [None] * len(several) if experts is None else experts.chunk(len(several))
            for entry, prompt, kept, row in zip(several, prompts, found, padded, strict=True):
                held = None if row is None else row[: len(prompt.tokens)]
                entry.prefix = Prefix(self._era, kept, self.memory.shift(prompt), held)

    def _release(self, rows: list[int]) -> None:
        if self.prefixes is not None:
            for row in rows:
                self._keep_prefix(row, self.prefixes)
        lanes = [self.table.lanes[row] for row in rows]
        if self.drafter is not None:
            self.drafter.forget(lanes)
        self.memory.release(lanes, self.table.release(rows))

    def _keep_prefix(self, row: int, prefixes: PrefixCache) -> None:
        """Of a row that ends, if all of its K and V are of the current weights."""
        tokens, images, _ = self.table.sequence(row)
        versions = self.table.occupants[self.table.lanes[row]].marks
        if not images and (self._recompute or len(versions) == 1):
            prefixes.keep_row(row, tokens)
