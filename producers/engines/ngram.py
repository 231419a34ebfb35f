"""Drafts for speculative decoding: the tokens that followed the last ones where they occurred before, in the sample's
own prompt and response (prompt lookup decoding, A. Saxena 2023; vLLM's method "ngram").

A decoder feeds a draft with the last token in one forward pass, draws the token of each place with that place's random
number, and keeps the tokens up to the first that differs from the draft: that one is drawn from the right logits too.
So a draft changes the time of a token and never the token. Guarantees:
1. a draft leaves room for the token that is drawn after it: no sample gets longer than it may;
2. drafts are fed only if the estimates promise more tokens per second: the acceptance of each sample, and the time of a
   step against a plain one, by its width and number of rows. A draft that was not fed is compared with the drawn token
   all the same, so the estimate of a sample goes on for the price of a search in its text;
3. it holds no tensors and knows no model.

Example: a text ends in 5 6 7 and has 5 6 7 8 9 before: the draft is 8 9 and what followed. The text 5 6 5 6 5 6 repeats
itself: its draft goes on with 5 6 as long as it may.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.engine import GenRequest

NO_TOKEN = -1
SIZES = (3, 2)  # tokens that must have occurred before, the first that has
START_RATE = 0.3  # of the first samples; later ones begin with the average of those that ended
RATE_STEP, START_STEP = 0.2, 0.1  # of moving averages: per draft token, per sample
START_COST = 0.1  # of one more place per row, in plain steps, until it was measured
COST_STEP, FORGET_COST = 0.2, 0.005
PLAIN_STEPS, PLAIN_KEPT = 3, 9  # with a number of rows: before a draft is fed; the last ones, whose median counts
PAYS = 1.05  # the least promised speed-up of a step that feeds drafts


Costs = npt.NDArray[np.float64]


class Line:
    """A sample: its tokens as characters, which `str.rfind` finds, and the share of its draft tokens that come true."""

    __slots__ = ("draft", "end", "rate", "text")

    def __init__(self, request: GenRequest, rate: float) -> None:
        self.text = "".join(map(chr, request.prompt_ids.tolist()))
        self.end = len(self.text) + request.max_new_tokens - 1  # where the last token is drawn
        self.rate = rate
        self.draft = ""


def find_draft(text: str, most: int) -> str:
    """At most `most` characters that may follow the text; empty if its end did not occur before.

    >>> find_draft("abcde abc", 3), find_draft("ababab", 4), find_draft("abcdef", 3)
    ('de ', 'abab', '')
    """
    for size in SIZES:
        found = text.rfind(text[-size:], 0, -1) if len(text) > size and most > 0 else -1
        if found >= 0:
            following = text[found + size :]
            return (following * (most // len(following) + 1))[:most]
    return ""


def _size(rows: int) -> int:
    """Steps with nearly as many rows count as equal: two sizes for each doubling."""
    return round(2 * math.log2(rows))


class Drafter:
    """Drafts of the live samples, by lane, and the decision how many places a step feeds per row."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """At most `most` draft tokens per sample and step. `clock`: of what a step costs."""
        self.most = most
        self.clock = clock
        self.drafted = self.accepted = 0  # tokens that were fed, and those that came true
        self._lines: dict[int, Line] = {}
        self._start_rate = START_RATE
        self._plain_s: dict[int, deque[float]] = {}  # times of plain steps, by `_size`
        self._start_costs: Costs = np.array([START_COST * width for width in range(1, most + 1)], np.float64)
        self._costs: dict[int, Costs] = {}  # more time of a step by its width, in plain steps

    def propose(self, lanes: Sequence[int], requests: Sequence[GenRequest]) -> npt.NDArray[np.int64] | None:
        """Draft tokens to feed in this step, i8 `[rows, width]` with `NO_TOKEN` behind shorter ones; None: feed none.
        A lane that is new gets the text of its request."""
        for lane, request in zip(lanes, requests, strict=True):
            line = self._lines.get(lane)
            if line is None:
                line = self._lines[lane] = Line(request, self._start_rate)
            line.draft = self.draft(lane, line.text, min(self.most, line.end - len(line.text)))
        lines = [self._lines[lane] for lane in lanes]
        width = self.decide(lines) if any(line.draft for line in lines) else 0
        if not width:
            return None
        rows = np.full((len(lines), width), NO_TOKEN, np.int64)
        for row, line in zip(rows, lines, strict=True):
            guess = [ord(token) for token in line.draft[:width]]
            row[: len(guess)] = guess
        return rows

    def draft(self, lane: int, text: str, most: int) -> str:
        """The draft of a sample."""
        del lane
        return find_draft(text, most)

    def decide(self, lines: Sequence[Line]) -> int:
        """The draft tokens per row to feed. The first steps with a number of rows are plain: costs are relative."""
        known = len(self._plain_s.get(_size(len(lines)), ())) >= PLAIN_STEPS
        return self.choose_width(lines) if known else 0

    def choose_width(self, lines: Sequence[Line]) -> int:
        """The draft tokens per row that make most tokens per second; 0 if a plain step does."""
        lengths = np.array([len(line.draft) for line in lines])
        rates = np.array([line.rate for line in lines])
        places = np.arange(1, int(lengths.max()) + 1)
        expected = np.where(places <= lengths[:, None], rates[:, None] ** places, 0.0).sum(0).cumsum()
        costs = self._costs_for(_size(len(lines)))
        speeds = (1.0 + expected / len(lines)) / (1.0 + costs[: len(places)])
        best = int(speeds.argmax())
        return best + 1 if speeds[best] > PAYS else 0

    def learn(self, lanes: Sequence[int], made: Sequence[Sequence[int]], width: int, seconds: float) -> None:
        """What a step made: the tokens of each row, the draft tokens per row that it fed, and its time."""
        for lane, tokens in zip(lanes, made, strict=True):
            line = self._lines[lane]
            for guess, token in zip(line.draft[: max(1, width)], tokens, strict=False):
                came_true = ord(guess) == token
                line.rate += RATE_STEP * (came_true - line.rate)
                self.accepted += came_true and width > 0
                if not came_true:
                    break
            self.drafted += min(width, len(line.draft))
            line.text += "".join(map(chr, tokens))
        self._learn_cost(_size(len(lanes)), width, seconds)

    def _learn_cost(self, size: int, width: int, seconds: float) -> None:
        plain = self._plain_s.setdefault(size, deque(maxlen=PLAIN_KEPT))
        costs = self._costs_for(size)
        costs += FORGET_COST * (np.minimum(costs, self._start_costs) - costs)  # to try again one day
        if not width:
            plain.append(seconds)
        elif plain:
            seen = max(0.0, seconds / statistics.median(plain) - 1.0)
            first = costs[width - 1] == self._start_costs[width - 1]
            costs[width - 1] += (1.0 if first else COST_STEP) * (seen - costs[width - 1])

    def _costs_for(self, size: int) -> Costs:
        """Those of the nearest size to begin with."""
        if size not in self._costs:
            nearest = min(self._costs, key=lambda other: abs(other - size), default=size)
            self._costs[size] = self._costs.get(nearest, self._start_costs).copy()
        return self._costs[size]

    def forget(self, lanes: Sequence[int]) -> None:
        """These samples ended."""
        for lane in lanes:
            if (line := self._lines.pop(lane, None)) is not None:
                self._start_rate += START_STEP * (line.rate - self._start_rate)
