"""The time that the service was awake: a monotonic clock that nearly stands still while the service does.

Read by `buffers.service.service` at every drain and tick. Guarantees:
1. between two readings at most `LONGEST_S` pass, however long it was really: a service that was stopped, or whose store
   did not answer, has not listened meanwhile, so nobody was silent and nobody's patience is over;
2. time passes nevertheless: a service that is only slow still ends leases and polls;
3. who wants to tell wall time is told of every second that was left out.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST_S = 1.0  # the service looks at the clock five times a second


class AwakeClock:
    """Seconds. `left_out` hears of what a reading left out."""

    def __init__(self, clock: Callable[[], float], left_out: Callable[[float], None]) -> None:
        self._clock = clock
        self._left_out = left_out
        self._read = clock()
        self._less = 0.0

    def __call__(self) -> float:
        """The time now, from the main thread alone."""
        read = self._clock()
        missed = read - self._read - LONGEST_S
        self._read = read
        if missed > 0:
            self._less += missed
            self._left_out(missed)
        return read - self._less
