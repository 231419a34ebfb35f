"""A thread for work that may hang and cannot be interrupted: collectives, a driver.

Guarantees: `run` returns or raises within its time; the thread is a daemon, so that hanging work never keeps a process
alive; after `close` it ends as soon as its work returns.

Example: `Worker("group").run(lambda: 6 * 7, timeout_s=1.0)` is 42.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from weightsync.transports.base import TransportError

T = TypeVar("T")

_Work = tuple["concurrent.futures.Future[Any]", Callable[[], Any]]


class Worker:
    """One thread, one piece of work at a time."""

    def __init__(self, name: str) -> None:
        self._name = f"weightsync-{name}"
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T], *, timeout_s: float) -> T:
        """The result of `work`, or its error. Raises TransportError after `timeout_s`; the work may go on."""
        future = self.submit(work)
        try:
            return future.result(max(timeout_s, 0.0))
        except concurrent.futures.TimeoutError:
            raise TransportError(f"{self._name}: not done within {timeout_s:.3g} s") from None
        finally:
            del future  # an error, its traceback and this frame would hold each other, and a process group with them

    def submit(self, work: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run `work` there; its result, or its error."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._queue.put((future, work))
        return future

    def close(self, last: Callable[[], None], *, within_s: float = 0.0) -> None:
        """Run `last` there after all other work, then end; wait at most `within_s`."""
        self._queue.put((concurrent.futures.Future(), last))
        self._queue.put(None)
        if within_s:
            self._thread.join(within_s)


def _work(tasks: queue.SimpleQueue[_Work | None]) -> None:
    while (task := tasks.get()) is not None:  # bounded: close() wakes it; a daemon ends with its process
        future, work = task
        if future.set_running_or_notify_cancel():  # from now on it cannot be cancelled
            try:
                future.set_result(work())
            except BaseException as error:  # the caller gets it
                future.set_exception(error)
        del task, future, work  # their references must not outlive them
