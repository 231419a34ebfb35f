"""A line in a worker's log every minute: how much it has done, how fast, and what it does now."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 60.0


def _print(text: str) -> None:
    print(text, flush=True)


class ProgressLine:
    """`what`: the things that are counted. `clock` counts seconds."""

    def __init__(
        self, what: str, *, say: Callable[[str], None] = _print, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._say = say
        self._clock = clock
        self._then, self._count = clock(), 0

    def tick(self, count: int, state: str) -> None:
        """Print the line, if a minute has passed since the last one. `count`: since the start of the process."""
        now = self._clock()
        if now - self._then < EVERY_S:
            return
        rate = (count - self._count) / (now - self._then)
        self._say(f"{count} {self._what}, {rate:.3g} per second in the last {now - self._then:.0f} s; {state}")
        self._then, self._count = now, count
