"""Who may send a sample to a server now: so many at once, the urgent first, nobody while the door is shut.

Guarantees:
1. at most `limit` are inside; among those who wait the smallest priority enters first, then who came first;
2. while it is shut nobody enters; who is inside stays inside;
3. who stops waiting (a cancelled task) never takes a place.

Example: limit 2, a and b inside, c (priority 5) and then d (priority 0) wait. a leaves: d enters.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """Not shared between event loops."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self.is_open = True
        self._count = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiting)

    @asynccontextmanager
    async def place(self, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a place and hold it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (priority, self._count, future))
        self._admit()
        try:
            # bounded: places are left as samples end, and a broken engine cancels its samples
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # let in and cancelled in the same moment
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def shut(self) -> None:
        """Let nobody in from now on."""
        self.is_open = False

    def open(self) -> None:
        """Let in who waits."""
        self.is_open = True
        self._admit()

    def _leave(self) -> None:
        self.inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self.is_open and self._waiting and self.inside < self.limit:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                self.inside += 1
                future.set_result(None)
