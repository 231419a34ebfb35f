"""Keeps an engine at its version while an evaluation needs it.

Guarantees:
1. a hold ends with `release`, or `limit_s` after its first `keep`, whatever its owner does;
2. an engine that already loads in place, or that commits, cannot be held: `keep` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.1  # of the weight-sync service while a version is kept: the report that it no longer is must not wait


class Hold:
    """`served` returns the version that the engine serves and will serve until the next transfer; -1 for none."""

    def __init__(self, served: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._served = served
        self._clock = clock
        self._version = -1
        self._until = 0.0

    @property
    def active(self) -> bool:
        """Whether the engine keeps its version now."""
        return 0 <= self._version == self._served() and self._clock() < self._until

    def keep(self, version: int, limit_s: float) -> bool:
        """Keep this version. False if the engine does not, because it left the version or the limit has passed."""
        if self._version != version:
            self._version, self._until = version, self._clock() + limit_s
        return self.active

    def release(self) -> None:
        """Take newer versions again."""
        self._version = -1
