"""An event loop in its own thread, for transports with blocking callers.

Guarantees: every call ends within its time; `close` ends the thread and everything that runs on it.

Example: `LoopThread("pull").start(asyncio.sleep(0.1, "done")).result(1.0)` is "done".
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from weightsync.transports.base import TransportError

CLOSE_S = 5.0  # a context with unsent messages takes two

T = TypeVar("T")


class LoopThread:
    """One loop; usable from any thread, one at a time."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"weightsync-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine there; its future. Raises TransportError once it is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise TransportError(f"{self._thread.name} is closed") from None

    def call(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """Run a function there and wait for it. Raises its errors, and TransportError after `timeout_s`."""

        async def run() -> T:
            return work()

        try:
            return self.start(run()).result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise TransportError(f"{self._thread.name} does not answer within {timeout_s:g} s") from None

    def close(self, last: Callable[[], None]) -> None:
        """Run `last` there, cancel the rest and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        with suppress(TransportError):  # another thread closed it
            self.start(self._finish(last))
        self._thread.join(CLOSE_S)

    async def _finish(self, last: Callable[[], None]) -> None:
        try:
            last()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=1.0)
            self._loop.stop()
