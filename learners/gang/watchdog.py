"""Ends a rank that makes no progress, with a diagnosis: a collective whose peer stands still would wait for ever.

Guarantees:
1. without `progress()` for `limit_s` the stacks of all threads and what is waited for go to stderr, and the process
   ends with exit code 70;
2. it needs nothing of the main thread, which may hang inside a collective.
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
    """A thread. `diagnosis` says what this rank waits for; `end` leaves the process (tests replace it)."""

    def __init__(
        self,
        limit_s: float,
        *,
        diagnosis: Callable[[], str],
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._diagnosis = diagnosis
        self._end = end
        self._clock = clock
        self._last = clock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """A step is done."""
        self._last = self._clock()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit_s / 4)):
            silent = self._clock() - self._last
            if silent > self._limit_s:
                error = AsyncRLError("hang", f"no step for {silent:.0f} s. {self._diagnosis()}", where="learner")
                print(error.render(), file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=2, all_threads=True)
                self._end(EXIT_INTERNAL)
                return
