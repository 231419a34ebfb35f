"""The producers whose engines hold the version that the running evaluation measures.

In memory: the versions are known from requests for work, after a restart of the service from the next ones. Guarantee:
`all_gone` is true only if the version is lost: every producer that held it asked with another version since, was
replaced or fell silent; or none asked for `limit_s` since the service started.

A producer that cannot keep the version until an evaluation is over (its hold has expired, or a swap has begun) gives
the prompts back. It gets none of this step until it asks with another version or `LEFT_S` have passed: a swap that
breaks off leaves it with this one.
"""

from __future__ import annotations

from buffers.groups.workers import Workers

LEFT_S = 10.0  # without held-out prompts after a return; without this wait they would be leased and returned in a loop


class Holders:
    """Versions of engines by producer."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._versions: dict[str, int] = {}
        self._held = -1  # version that had a holder in this life of the service
        self._since: float | None = None  # no holder is known since
        self._left: dict[str, tuple[int, int, float]] = {}  # producer -> step, version that it cannot keep, since when

    def note(self, producer: str, version: int) -> None:
        """The producer asked for work with this version; -1: it is another process."""
        self._versions[producer] = version
        if producer in self._left and self._left[producer][1] != version:
            del self._left[producer]

    def leave(self, producer: str, step: int, version: int, now: float) -> None:
        """The producer cannot keep this version for the evaluation of this step."""
        self._left[producer] = step, version, now

    def has_left(self, producer: str, step: int, version: int, now: float) -> bool:
        """Whether the producer left this version less than `LEFT_S` ago."""
        *left, since = self._left.get(producer, (-1, -1, now))
        return left == [step, version] and now - since < LEFT_S

    def begin(self, version: int) -> None:
        """A producer got the first lease of this version."""
        self._held, self._since = version, None

    def all_gone(self, version: int, now: float, limit_s: float) -> bool:
        """Whether no producer has the version any more. `limit_s`: longest silence of a living one."""
        alive = self._workers.alive("producer", now=now, limit_s=limit_s)
        self._versions = {name: held for name, held in self._versions.items() if name in alive}
        self._left = {name: left for name, left in self._left.items() if name in alive}
        if version in self._versions.values():
            self._held, self._since = version, None
            return False
        self._since = now if self._since is None else self._since
        return self._held == version or now - self._since > limit_s
