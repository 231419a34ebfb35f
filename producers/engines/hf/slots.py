"""The table of live samples: which sample is in which row, and the row state of the next step.

A sample has a lane (fixed while it lives: its tokens, log-probs and random numbers) and a row (its place in the packed
front of the K/V store). Guarantees:
1. rows `0..live` are exactly the live samples: when rows finish, the last live rows move into the holes, so a step
   costs only live rows (`release` returns the moves, the K/V store follows);
2. every live sample gets one token or more per step. `mark` notes the version that makes its tokens from now on: no
   per-token record;
3. the random numbers of a sample are a function of (seed, index) alone: `sample_uniforms`. A continued sample goes on
   in the same stream, at the place of its next token. It knows no model and no weights.

Example with capacity 4 and live samples a b c d in rows 0..3: b and c finish. One hole below the new front (row 1) is
filled by d; row 2 just falls off: a d, moves = ([3], [1]).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.engine import GenDelta, GenRequest
from asyncrl.versions import Runs
from asyncrl.wire import Support
from producers.engines.hf.sampling import uniform_dtype

NO_TOKEN = -1
NEVER = np.iinfo(np.int64).max
_MASK = (1 << 64) - 1
_NOTHING = np.zeros(0, np.int32)

# Columns of the integer state of a row.
LANE, LAST, POSITION, COUNT, LIMIT, TOP_K, SHIFT, STOP = range(8)


class Occupant(NamedTuple):
    """The sample of a lane, and which versions make its tokens: (first token of this request, version), ascending."""

    request: GenRequest
    sample: int  # its index in the group
    marks: list[tuple[int, int]]


class Moves(NamedTuple):
    """Moved rows: `sources[i]` went to `holes[i]`; `tokens` positions of K/V must be copied."""

    sources: list[int]
    holes: list[int]
    tokens: int


def sample_uniforms(seed: int, index: int, count: int) -> npt.NDArray[np.float64]:
    """The random numbers of one sample, float64 `[count]` in [0, 1): a counter-based stream keyed by both numbers."""
    key = np.array([seed & _MASK, index & _MASK], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def runs_between(marks: list[tuple[int, int]], start: int, stop: int) -> Runs:
    """Version runs of the tokens `start..stop`; `marks` as in `Occupant`.

    >>> runs_between([(0, 4), (7, 5)], 5, 9)
    ((4, 2), (5, 2))
    """
    runs: list[tuple[int, int]] = []
    at = bisect_right(marks, start, key=lambda mark: mark[0]) - 1
    while start < stop:
        until = min(stop, marks[at + 1][0]) if at + 1 < len(marks) else stop
        if until > start:
            runs.append((marks[at][1], until - start))
        start, at = until, at + 1
    return tuple(runs)


class SlotTable:
    """State of all rows, on `device`. `state` i8 `[slots, 7 + stops]`, `knobs` f4 `[slots, 3]`."""

    def __init__(self, slots: int, *, max_new_tokens: int, device: torch.device, stops: int = 4) -> None:
        self.slots = slots
        self.live = 0
        self.state = torch.zeros((slots, STOP + stops), dtype=torch.int64, device=device)
        self.knobs = torch.ones((slots, 3), dtype=torch.float32, device=device)  # temperature, top-p, min-p
        self.uniforms = torch.zeros((slots, max_new_tokens), dtype=uniform_dtype(device.type), device=device)
        self.tokens = torch.zeros((slots, max_new_tokens), dtype=torch.int32, device=device)
        self.logprobs = torch.zeros((slots, max_new_tokens), dtype=torch.float32, device=device)
        self.positions = np.zeros(slots, dtype=np.int64)  # host mirror of state[:, POSITION]
        self._due = np.full(slots, NEVER, dtype=np.int64)  # by row: position of the next delta
        self.lanes: list[int] = []  # lane of each live row
        self.occupants: dict[int, Occupant] = {}  # by lane
        self._free = list(range(slots))
        self._supports: dict[int, list[npt.NDArray[np.int32]]] = {}  # by lane: kept ids of every token
        self._prompts: dict[int, Tensor] = {}  # by lane: experts of the prompt's tokens, `[P - 1, layers, chosen]`
        self._experts: Tensor | None = None  # `[slots, max_new_tokens, layers, chosen]`, of the tokens after it
        self._cuts: set[int] = set()  # lanes that use top-k, top-p or min-p
        self._sent: dict[int, int] = {}  # tokens of a lane that were sent in deltas

    @property
    def free(self) -> int:
        return self.slots - self.live

    @property
    def held_tokens(self) -> int:
        """Cached tokens of the live samples."""
        return int(self.positions[: self.live].sum())

    @property
    def cuts(self) -> bool:
        """True if a live sample uses top-k, top-p or min-p."""
        return bool(self._cuts)

    @property
    def recording(self) -> Tensor | None:
        """Which live rows record the support of their draws, bool `[live]`; None if none does."""
        if not self._supports:
            return None
        return torch.tensor([lane in self._supports for lane in self.lanes], device=self.state.device)

    def add(
        self, request: GenRequest, indices: list[int], *, version: int, shift: int = 0, experts: Tensor | None = None
    ) -> int:
        """Put these samples after the live rows; the first row. The prompt without its last token must be in K/V.
        `version`: of the weights; `shift`: of the positions after the prompt; `experts` that its tokens in K/V went
        through."""
        first, count = self.live, len(indices)
        self._widen(len(request.stop_ids))
        prompt = request.prompt_ids
        lanes = [self._free.pop() for _ in indices]
        width = self.state.shape[1]
        stops = [*request.stop_ids, *([NO_TOKEN] * (width - STOP - len(request.stop_ids)))]
        common = [int(prompt[-1]), len(prompt) - 1, 0, request.max_new_tokens, request.top_k, shift, *stops]
        rows = slice(first, first + count)
        self.state[rows] = torch.tensor([[lane, *common] for lane in lanes], device=self.state.device)
        knobs = [request.temperature, request.top_p, request.min_p]
        self.knobs[rows] = torch.tensor(knobs, device=self.knobs.device)
        begun, length = request.begun, request.max_new_tokens
        numbers = np.stack([sample_uniforms(request.seed, index, begun + length)[begun:] for index in indices])
        if not self.uniforms.is_floating_point():
            numbers = (numbers * 2.0**31).astype(np.int64)
        self.uniforms[lanes, :length] = torch.from_numpy(numbers).to(self.uniforms.device)
        self.positions[rows] = len(prompt) - 1
        self._due[rows] = len(prompt) - 1 + request.delta_tokens if request.delta_tokens else NEVER
        for lane, index in zip(lanes, indices, strict=True):
            self.occupants[lane] = Occupant(request, index, [(0, version)])
            if request.top_k or request.top_p < 1.0 or request.min_p:
                self._cuts.add(lane)
            if request.support:
                self._supports[lane] = []
            if request.experts and experts is not None:
                self._prompts[lane] = experts
        self.lanes += lanes
        self.live += count
        return first

    def _widen(self, stops: int) -> None:
        missing = STOP + stops - self.state.shape[1]
        if missing > 0:
            self.state = torch.nn.functional.pad(self.state, (0, missing), value=NO_TOKEN)

    def numbers(self, state: Tensor, width: int = 1) -> Tensor:
        """The random number of the next `width` tokens of each live row, `[live * width]`; `state` is
        `self.state[:live]`. Behind the end of a row it is any number."""
        if width == 1:
            return self.uniforms[state[:, LANE], state[:, COUNT]]
        places = state[:, COUNT, None] + torch.arange(width, device=state.device)
        return self.uniforms[state[:, LANE, None], places.clamp(max=self.uniforms.shape[1] - 1)].flatten()

    def mark(self, version: int) -> None:
        """New weights make the next tokens of all live samples."""
        for row in range(self.live):
            self.occupants[self.lanes[row]].marks.append((self._count_tokens(row), version))

    def _count_tokens(self, row: int) -> int:
        """Tokens of a row that this request has made."""
        return int(self.positions[row]) - (len(self.occupants[self.lanes[row]].request.prompt_ids) - 1)

    def record(
        self,
        state: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        kept: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> list[int]:
        """Store this step's tokens `[live]`, log-probs, supports (`kept` bool `[live, V]`) and experts `[live, layers,
        chosen]`; the rows that finished, ascending.
        """
        if self._supports:
            self._record_supports(kept, range(self.live))
        lanes, counts = state[:, LANE], state[:, COUNT]
        self.tokens[lanes, counts] = tokens.int()
        self.logprobs[lanes, counts] = logprobs
        if experts is not None and self._prompts:
            if self._experts is None:
                self._experts = experts.new_zeros((*self.tokens.shape, *experts.shape[1:]))
            self._experts[lanes, counts] = experts
        state[:, LAST] = tokens
        state[:, POSITION : COUNT + 1] += 1
        self.positions[: self.live] += 1
        return self._ended(state)

    def count_accepted(self, state: Tensor, tokens: Tensor, drafted: Tensor) -> Tensor:
        """How many of the drawn tokens `[live, 1 + D]` each row has made, `[live]`: up to the first that differs from
        its draft `[live, D]`, or ends the sample."""
        stops = (tokens[:, :-1, None] == state[:, None, STOP:]).any(-1)
        return 1 + ((tokens[:, :-1] == drafted) & ~stops).cumprod(1).sum(1)

    def record_several(
        self, state: Tensor, tokens: Tensor, logprobs: Tensor, made: list[int], kept: Tensor | None = None
    ) -> list[int]:
        """As `record`, for the first `made` of each row's tokens and log-probs `[live, W]`; `kept` bool
        `[live * W, V]`. No row may get longer than its limit."""
        counts = torch.tensor(made, device=state.device)
        width = torch.arange(tokens.shape[1], device=state.device)
        taken = width < counts[:, None]
        if self._supports:
            owners = np.repeat(np.arange(self.live), made)
            self._record_supports(None if kept is None else kept[taken.flatten()], owners.tolist())
        lanes = state[:, LANE, None].expand_as(taken)[taken]
        places = (state[:, COUNT, None] + width)[taken]
        self.tokens[lanes, places] = tokens[taken].int()
        self.logprobs[lanes, places] = logprobs[taken]
        state[:, LAST] = tokens.gather(1, counts[:, None] - 1)[:, 0]
        state[:, POSITION : COUNT + 1] += counts[:, None]
        self.positions[: self.live] += made
        return self._ended(state)

    def _ended(self, state: Tensor) -> list[int]:
        ended = (state[:, STOP:] == state[:, LAST, None]).any(1) | (state[:, COUNT] >= state[:, LIMIT])
        rows: list[int] = ended.nonzero()[:, 0].tolist()
        return rows

    def _record_supports(self, kept: Tensor | None, owners: Sequence[int]) -> None:
        """`owners`: the row of each line of `kept`."""
        lines = [line for line, row in enumerate(owners) if self.lanes[row] in self._supports]
        found = [_NOTHING] * len(lines)
        if kept is not None:
            chosen = kept[lines]
            counts = chosen.sum(-1)
            ids = (chosen & (counts < kept.shape[1])[:, None]).nonzero()[:, 1].int().cpu().numpy()
            found = np.split(ids, np.cumsum((counts % kept.shape[1]).cpu().numpy())[:-1])
        for line, ids in zip(lines, found, strict=True):
            self._supports[self.lanes[owners[line]]].append(ids)

    def _support(self, lane: int, start: int, stop: int) -> Support | None:
        if lane not in self._supports:
            return None
        parts = self._supports[lane][start:stop]
        counts = np.array([part.size for part in parts], np.int32)
        return Support(counts, np.concatenate([_NOTHING, *parts]))

    def forget_experts(self) -> None:
        """Of live samples: a newer version makes the rest of them."""
        self._prompts.clear()

    def _experts_of(self, lane: int, count: int) -> npt.NDArray[Any] | None:
        prompt = self._prompts.get(lane)
        if prompt is None or self._experts is None:
            return None
        rest = self._experts[lane, :count]
        found: npt.NDArray[Any] = torch.cat([prompt.to(rest.device), rest]).cpu().numpy()
        return found

    def rows_due(self, ended: list[int]) -> list[int]:
        """Rows whose next delta is due, without those that have ended."""
        rows = np.nonzero(self.positions[: self.live] >= self._due[: self.live])[0].tolist()
        return [row for row in rows if row not in ended] if rows else rows

    def collect(self, rows: list[int], *, ended: bool = True) -> list[GenDelta]:
        """New tokens of the samples in these rows. Call it for ended samples before they are released."""
        deltas = []
        for row in rows:
            lane, count = self.lanes[row], self._count_tokens(row)
            request, index, marks = self.occupants[lane]
            sent = self._sent.get(lane, 0)
            tokens = self.tokens[lane, sent:count].cpu().numpy().copy()
            logprobs = self.logprobs[lane, sent:count].cpu().numpy().copy()
            finish = "" if not ended else "stop" if int(tokens[-1]) in request.stop_ids else "length"
            runs = runs_between(marks, sent, count)
            support = self._support(lane, sent, count)
            experts = self._experts_of(lane, count) if ended else None
            deltas.append(GenDelta(request.id, index, tokens, logprobs, runs, finish, sent, support, experts))
            if not ended:
                self._sent[lane] = count
                self._due[row] = self.positions[row] + request.delta_tokens
        return deltas

    def sequence(self, row: int) -> tuple[npt.NDArray[np.int32], tuple[bytes, ...], tuple[int, ...]]:
        """Prompt and response tokens of a row without the last one, i4 `[position]`: the tokens of its K/V; and the
        images of the prompt with their places."""
        lane = self.lanes[row]
        request = self.occupants[lane].request
        response = self.tokens[lane, : self._count_tokens(row)].cpu().numpy()
        ids = np.concatenate([request.prompt_ids, response])[:-1].astype(np.int32)
        return ids, request.images, request.image_places

    def rows_for(self, ids: set[str] | None) -> list[int]:
        """Live rows of these requests (None: all), ascending."""
        return [row for row, lane in enumerate(self.lanes) if ids is None or self.occupants[lane].request.id in ids]

    def release(self, rows: list[int]) -> Moves:
        """Remove these rows and fill the gaps with the last live rows."""
        left = self.live - len(rows)
        gone = set(rows)
        holes = [row for row in rows if row < left]
        sources = [row for row in range(left, self.live) if row not in gone]
        for row in rows:
            lane = self.lanes[row]
            del self.occupants[lane]
            self._cuts.discard(lane)
            self._supports.pop(lane, None)
            self._prompts.pop(lane, None)
            self._sent.pop(lane, None)
            self._free.append(lane)
        if holes:
            self.state[holes] = self.state[sources]
            self.knobs[holes] = self.knobs[sources]
            self.positions[holes] = self.positions[sources]
            self._due[holes] = self._due[sources]
            for source, hole in zip(sources, holes, strict=True):
                self.lanes[hole] = self.lanes[source]
        del self.lanes[left:]
        self.live = left
        return Moves(sources, holes, int(self.positions[holes].max()) if holes else 0)
