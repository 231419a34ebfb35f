"""Ends a rank that makes no progress, because a collective with a stuck peer would wait for ever.

Guarantees:
1. after `limit_s` without `progress()`, the stacks of all threads and a diagnosis go to stderr, and the process exits
   with code 70. Before the first one, which follows a checkpoint that is loaded, `first_s` applies if that is longer;
2. it does not need the main thread, which may hang inside a collective.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from asyncrl.errors import EXIT_INTERNAL, AsyncRLError


class Watchdog:
    """A thread. `diagnosis` describes what this rank waits for; `end` exits the process."""

    def __init__(
        self,
        limit_s: float,
        *,
        diagnosis: Callable[[], str],
        first_s: float = 0.0,
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._allowed_s = max(limit_s, first_s)
        self._diagnosis = diagnosis
        self._end = end
        self._clock = clock
        self._last = clock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        self._last = self._clock()
        self._allowed_s = self._limit_s

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit_s / 4)):
            silent = self._clock() - self._last
            if silent > self._allowed_s:
                error = AsyncRLError("hang", f"no step for {silent:.0f} s. {self._diagnosis()}", where="learner")
                print(error.render(), file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=2, all_threads=True)
                self._end(EXIT_INTERNAL)
                return
