"""`data.ratios`: which data set gives the prompt of a group. No torch.

The choice is a function of the group's number alone, so every producer agrees and a resumed run goes on where it was.
Guarantees:
1. of `sum(ratios)` consecutive groups each data set gives exactly its ratio;
2. after any number of groups a data set is less than one group from its share.

Example: ratios 2 and 1: data sets 0, 1, 0, 0, 1, 0, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


class Mix:
    """Data sets of these numbers of rows, taken by these ratios. `starts`: the first row of each among all rows."""

    def __init__(self, sizes: Sequence[int], ratios: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.starts = tuple(accumulate(sizes, initial=0))[:-1]
        common = math.gcd(*ratios)
        self._ratios = [ratio // common for ratio in ratios]
        self._parts: list[int] = []
        self._before: list[int] = []
        self._plan()

    def _plan(self) -> None:
        """One period: each group goes to the data set whose next group is due first, of those that have begun to be
        due (earliest deadline first; at most one group apart, Tijdeman 1980).
        """
        period = sum(self._ratios)
        counts = [0] * len(self._ratios)
        for at in range(period):
            begun = [part for part, ratio in enumerate(self._ratios) if counts[part] * period < (at + 1) * ratio]
            part = min(begun, key=lambda part: (-(-(counts[part] + 1) * period // self._ratios[part]), part))
            self._parts.append(part)
            self._before.append(counts[part])
            counts[part] += 1
        assert counts == self._ratios

    def place(self, group: int) -> tuple[int, int]:
        """The data set of a group, and how many groups before it have the same one.

        >>> [Mix((4, 4), (2, 1)).place(group) for group in range(6)]
        [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
        """
        cycle, at = divmod(group, len(self._parts))
        part = self._parts[at]
        return part, cycle * self._ratios[part] + self._before[at]
