"""Requests that wait in the service until they can be answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from asyncrl.net.responder import Call


class Poll(msgspec.Struct):
    """A request that waits in the service until it can be answered, at most until `until` (monotonic time)."""

    call: Call
    until: float
    looked: bool = False  # it was asked once whether there is work


class Polls:
    """The waiting requests of a role by the name of their process. `kind_of`: what decides whether there is work for a
    message.

    Hundreds may wait, and every drain asks: one that was looked at is seen again if there is work for some kind that
    waits, or at the end of its time.
    """

    def __init__(self, kind_of: Callable[[Any], Hashable]) -> None:
        self._kind_of = kind_of
        self._waiting: dict[str, Poll] = {}
        self._new: list[str] = []
        #: Of all that wait, and perhaps of some that wait no longer: the kinds, and the earliest end.
        self._kinds: set[Any] = set()
        self._until = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, name: str) -> Poll | None:
        """The request of a process that waits."""
        return self._waiting.get(name)

    def add(self, name: str, poll: Poll) -> None:
        """It waits from now on, in place of an earlier request of this process."""
        self._waiting[name] = poll
        self._new.append(name)
        self._kinds.add(self._kind_of(poll.call.message))
        self._until = min(self._until, poll.until)

    def remove(self, name: str) -> None:
        """The request waits no longer, if there is one."""
        self._waiting.pop(name, None)

    def to_look_at(
        self, now: float, *, has_work: Callable[[Any], bool], everyone: bool = False
    ) -> list[tuple[str, Poll]]:
        """Names and requests, in the order in which they came. `has_work` of a kind; `everyone`: all of them."""
        new, self._new = self._new, []
        if not (everyone or now >= self._until or any(map(has_work, self._kinds))):
            found = ((name, self._waiting.get(name)) for name in dict.fromkeys(new))
            return [(name, poll) for name, poll in found if poll is not None]
        self._kinds = {self._kind_of(poll.call.message) for poll in self._waiting.values()}
        self._until = min((poll.until for poll in self._waiting.values()), default=math.inf)
        return list(self._waiting.items())
