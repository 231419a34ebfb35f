"""The time that the service was awake: a monotonic clock that nearly stops while the service does.

Guarantees:
1. between two readings at most `LONGEST_S` pass, however long it was really: a service that was stopped, or whose store
   did not answer, has not listened meanwhile, so no worker was silent and no deadline is over;
2. time still passes: a service that is only slow ends leases and polls;
3. every second that was left out is reported, so that wall time stays right.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST_S = 1.0  # the service looks at the clock five times a second


class AwakeClock:
    """Seconds. `left_out` is called with the seconds that a reading left out."""

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
