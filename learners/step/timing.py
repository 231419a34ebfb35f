"""Splits the time of a step into parts that add up to the wall time.

Guarantees:
1. every moment between two calls of `take` is in exactly one part: their sum is `step_s`, and all `step_s` add up to
   the time of the loop;
2. a part measured inside another one (`inside`) is subtracted from it.

Example: a lap of 2 s "wait" with 0.5 s "fetch" inside it, one of 3 s "train": wait_s 1.5, fetch_s 0.5, train_s 3,
step_s 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: wait: for the batch. fetch: read and check its payloads. assemble: advantages, rows, distribution to the ranks.
#: proximal: forward passes without gradient. train: the rest of the update. publish, commit (with the records of the
#: step before), checkpoint (after the step before).
PARTS = ("wait", "fetch", "assemble", "proximal", "train", "publish", "commit", "checkpoint")


class StepTimes:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._spent = dict.fromkeys(PARTS, 0.0)

    def lap(self, part: str, **inside: float) -> None:
        """Add the time since the last call to `part`, without the seconds of the parts `inside` it."""
        now = self._clock()
        left = now - self._last
        self._last = now
        for name, seconds in inside.items():
            taken = min(max(seconds, 0.0), left)
            self._spent[name] += taken
            left -= taken
        self._spent[part] += left

    def take(self) -> dict[str, float]:
        """Return `<part>_s` of every part and their sum `step_s` since the last call."""
        found = {f"{part}_s": seconds for part, seconds in self._spent.items()}
        self._spent = dict.fromkeys(PARTS, 0.0)
        return found | {"step_s": sum(found.values())}
