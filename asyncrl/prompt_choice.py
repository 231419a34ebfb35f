"""`data.sampler = "difficulty"`: which row of the data a group gets, by what earlier groups of each row taught.

A group whose samples all have the same reward gives no gradient: its prompt is too easy or too hard by now. For every
row two numbers are kept: how many of its newest groups had different rewards (`mixed`) and how many had not (`same`).
Guarantees:
1. `choose` is a function of (run.seed, group, numbers), and the numbers one of the outcomes in their order, on every
   machine: they are whole, and a draw needs comparisons alone. So the history of a run determines all choices;
2. a row is drawn at most `CANDIDATES` times as often as by chance, and at least `1 / CHANCE` times as often;
3. a row costs two bytes.

Method: Thompson sampling (Thompson 1933). `CANDIDATES` rows are drawn by chance; each gets a number from the posterior
Beta(1 + mixed, d + same) of the probability that its next group has different rewards; the largest one wins. `d` is the
ratio of `same` to `mixed` over all rows, from 1 to `MOST`: where few rows teach, an unknown one is tried less. With
whole a and b a number from Beta(a, b) is the a-th smallest of a + b - 1 uniform ones. One group in `CHANCE` takes the
first candidate as it is. The policy changes, so at most `MOST` outcomes count: beyond, both numbers are halved.

>>> choice = PromptChoice(2, seed=7)
>>> for _ in range(4): choice.observe(0, mixed=False)
>>> for _ in range(4): choice.observe(1, mixed=True)
>>> sum(choice.choose(group) for group in range(1000)) > 900
True
"""

from __future__ import annotations

import hashlib
import random

CANDIDATES = 32
CHANCE = 8
MOST = 8
MOST_ROWS = 1 << 27  # 256 MiB of numbers


class PromptChoice:
    """The numbers of `rows` rows, all 0 at first, and the choice by them. `mixed` and `same`: u1 `[rows]`."""

    def __init__(self, rows: int = 0, *, seed: int = 0) -> None:
        self.seed = seed
        self.mixed = bytearray(rows)
        self.same = bytearray(rows)
        self.count()

    def __len__(self) -> int:
        return len(self.mixed)

    def resize(self, rows: int) -> None:
        """The data has this many rows now: the first ones keep their numbers."""
        for numbers in (self.mixed, self.same):
            del numbers[rows:]
            numbers.extend(bytes(rows - len(numbers)))
        self.count()

    def count(self) -> None:
        """The sums of the numbers, after they were written from outside."""
        self._all_mixed, self._all_same = sum(self.mixed), sum(self.same)

    def choose(self, group: int) -> int:
        """The row of a group."""
        text = f"{self.seed}/prompt/{group}".encode()
        draw = random.Random(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")).random
        if draw() * CHANCE < 1:
            return int(draw() * len(self))
        doubt = max(1, min(MOST, self._all_same // max(1, self._all_mixed)))
        best, chosen = -1.0, 0
        for _ in range(CANDIDATES):
            row = int(draw() * len(self))
            mixed = self.mixed[row]
            found = sorted(draw() for _ in range(mixed + self.same[row] + doubt))[mixed]
            if found > best:
                best, chosen = found, row
        return chosen

    def observe(self, row: int, *, mixed: bool) -> None:
        """A group of the row had different rewards, or had not."""
        before = self.mixed[row], self.same[row]
        if sum(before) >= MOST:
            self.mixed[row] //= 2
            self.same[row] //= 2
        numbers = self.mixed if mixed else self.same
        numbers[row] += 1
        self._all_mixed += self.mixed[row] - before[0]
        self._all_same += self.same[row] - before[1]
