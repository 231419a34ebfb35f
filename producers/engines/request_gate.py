"""Limits the samples at a server: at most `limit` at once, by priority, none while the gate is shut.

Guarantees:
1. at most `limit` are inside; of the waiting ones the smallest priority enters first, then the oldest;
2. while it is shut none enters; samples inside stay inside;
3. a cancelled waiter never takes a place.

Example: limit 2, a and b inside, c (priority 5) and then d (priority 0) wait. a leaves: d enters.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestGate:
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
            # bounded: samples end, and a broken engine cancels its samples
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # admitted and cancelled in the same moment
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def shut(self) -> None:
        """Admit no more samples."""
        self.is_open = False

    def open(self) -> None:
        """Admit the waiting samples."""
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
