"""Virtual time: events at moments, and work that shares cores.

Guarantees:
1. nothing waits: time jumps from event to event; the same events give the same order (by time, then by their number);
2. work is counted in seconds of one core. If the demand exceeds the cores, all work is slowed down alike by
   `cores / demand`. Waiting (`schedule`) is not slowed down.

Example: two cores and a demand of three: a second of work takes 1.5 seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Do = Callable[[], None]


class Clock:
    """`now` in seconds, `work` in seconds of a core. `cores` 0: cores are not shared."""

    def __init__(self, *, cores: float = 0.0, demand: float = 0.0) -> None:
        self.now = 0.0
        self.work = 0.0
        self._cores = cores
        self._demand = demand
        self._moments: list[tuple[float, int, Do]] = []
        self._works: list[tuple[float, int, Do]] = []
        self._number = 0

    def schedule(self, delay_s: float, do: Do) -> None:
        """Call `do` in `delay_s` seconds."""
        self._number += 1
        heapq.heappush(self._moments, (self.now + delay_s, self._number, do))

    def schedule_work(self, work_s: float, do: Do) -> None:
        """Call `do` when `work_s` seconds of work are done."""
        self._number += 1
        heapq.heappush(self._works, (self.work + work_s, self._number, do))

    def ask(self, cores: float) -> None:
        """Change the demand by this number of cores."""
        self._demand += cores

    @property
    def pace(self) -> float:
        """Work done per second."""
        return 1.0 if not self._cores or self._demand <= self._cores else self._cores / self._demand

    def step(self) -> bool:
        """Go to the next event; False if there is none."""
        pace = self.pace
        moment = self._moments[0][0] if self._moments else float("inf")
        done = self.now + (self._works[0][0] - self.work) / pace if self._works else float("inf")
        if moment == done == float("inf"):
            return False
        until = max(self.now, min(moment, done))
        if moment <= done:
            self.work += (until - self.now) * pace
            self.now = until
            heapq.heappop(self._moments)[2]()
        else:
            self.now = until
            self.work, _, do = heapq.heappop(self._works)
            do()
        return True
