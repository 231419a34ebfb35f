"""Sets of ids as ranges: a million consecutive ids are two numbers."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence


class IdSet:
    """A set of group ids held as sorted ranges.

    >>> ids = IdSet([(0, 2)]); ids.add(3); ids.add(2); ids.ranges(), len(ids), 3 in ids, 4 in ids
    (((0, 4),), 4, True, False)
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._count = 0
        for start, end in sorted((int(a), int(b)) for a, b in ranges if b > a):
            if self._ends and start <= self._ends[-1]:
                self._count += max(0, end - self._ends[-1])
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
                self._count += end - start

    def __contains__(self, number: int) -> bool:
        return self.covers(number, number + 1)

    def covers(self, start: int, end: int) -> bool:
        """Whether all of `start` to `end - 1` are in it."""
        place = bisect.bisect_right(self._starts, start) - 1
        return place >= 0 and end <= self._ends[place]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end)

    def add(self, number: int) -> None:
        """Put one id in."""
        place = bisect.bisect_right(self._starts, number)
        if place and number < self._ends[place - 1]:
            return
        self._count += 1
        left = place > 0 and self._ends[place - 1] == number
        right = place < len(self._starts) and self._starts[place] == number + 1
        if left and right:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif left:
            self._ends[place - 1] = number + 1
        elif right:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number + 1)

    def discard(self, number: int) -> None:
        """Take one id out."""
        self.cut(number, number + 1)

    def cut(self, start: int, end: int) -> None:
        """Take `start` to `end - 1` out."""
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._starts, end)
        found = list(zip(self._starts[first:last], self._ends[first:last], strict=True))
        rest = [part for a, b in found for part in ((a, min(b, start)), (max(a, end), b)) if part[0] < part[1]]
        self._starts[first:last] = [part[0] for part in rest]
        self._ends[first:last] = [part[1] for part in rest]
        self._count += sum(b - a for a, b in rest) - sum(b - a for a, b in found)

    def missing(self, end: int) -> Iterator[int]:
        """The ids below `end` that are not in it."""
        for first, last in zip([0, *self._ends], [*self._starts, end], strict=True):
            yield from range(first, min(last, end))

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges `[first, end)` in order."""
        return tuple(zip(self._starts, self._ends, strict=True))


def ranges_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The ranges of some ids."""
    return IdSet((number, number + 1) for number in numbers).ranges()
