"""The signals that ask a launcher to end.

Guarantees:
1. SIGINT and SIGTERM ask, and SIGHUP unless it is ignored (`nohup`);
2. a SIGTERM within `REPEAT_S` of the first signal belongs to it: a service manager signals every process at once, with
   SIGTERM and SIGHUP, and launchers forward what their children get anyway. SIGHUP never asks again: a closed terminal
   sends several, and no user is left there. SIGINT always does: a user presses Ctrl-C.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

REPEAT_S = 2.0


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to end."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextmanager
def ignore_stop() -> Iterator[None]:
    """Ignore SIGTERM while the end of a run is written down: the run is over, and the launcher ends by itself."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopSignals:
    """Collects requests: the first one asks for a stop, later ones for more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests: list[signal.Signals] = []
        self._clock = clock
        self._first_at = 0.0

    def install(self) -> dict[signal.Signals, Any]:
        """Collect from now on; the handlers before."""
        return {number: signal.signal(number, self.note) for number in stop_signals()}

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        now = self._clock()
        if not self.requests:
            self._first_at = now
        elif number == signal.SIGHUP or (number == signal.SIGTERM and now < self._first_at + REPEAT_S):
            return
        self.requests.append(signal.Signals(number))
