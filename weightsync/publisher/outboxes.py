"""The publisher's ends of the transports that the configuration allows, each opened when it is first needed.

When that is: with `stream` or `disk` set, when the first version is announced; with
`auto` `local` at once (it needs nothing), `collective` and `stream` once the service has a member that is not on this
host (it asks for the rendezvous), `disk` never (it copies everything once more: only where it is set). Guarantees:
1. nothing listens, and nothing is written, before that;
2. an address is offered only of an outbox that has the version.
Transports are imported when they are opened: a run on one host loads neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from asyncrl.wire import RoundReply
from weightsync.publisher.delta_chain import Staged
from weightsync.transports.base import Outbox, TransportError

#: What `weightsync.transport` allows.
ALLOWED = {
    "auto": ("local", "collective", "stream"),
    "local": ("local",),
    "collective": ("collective",),
    "stream": ("stream",),
    "disk": ("disk",),
}
#: Opened for the first version where they are the only ones.
AT_ONCE = ("stream", "disk")


class Outboxes:
    """All of one publisher, by what `weightsync.transport` says. `make` gives an outbox by transport name."""

    def __init__(self, transport: str, make: Callable[[str], Outbox]) -> None:
        self._names = ALLOWED[transport]
        self._make = make
        self._open: dict[str, Outbox] = {}
        self._lock = threading.Lock()

    def ways(self, version: Staged) -> dict[str, str]:
        """Transports that may carry the version, with their addresses; empty: opened when it is asked for.

        Raises:
            TransportError: the version was overwritten before it could be offered.
            Unavailable: no room (`disk.full`); trying again may help.
            ConfigError: an address that this host does not have.
        """
        ways = {}
        for name in self._names:
            if name == "local":
                ways[name] = str(version.slot.path)
            elif name in self._open or (name in AT_ONCE and len(self._names) == 1):
                ways[name] = self._get(name).offer(version)
            else:
                ways[name] = ""
        return ways

    def need(self) -> None:
        """A member cannot map shared memory: open what reaches it. Raises ConfigError like `ways`."""
        for name in self._names:
            if name != "local":
                self._get(name).open()

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None:
        """Lead the collective group of the reply. Raises TransportError."""
        if "collective" not in self._names:
            raise TransportError("the collective transport is not allowed here")
        self._get("collective").send(reply, blobs, deadline_s=deadline_s)

    def _get(self, name: str) -> Outbox:
        with self._lock:
            if name not in self._open:
                self._open[name] = self._make(name)
            return self._open[name]

    def close(self) -> None:
        with self._lock:
            for outbox in self._open.values():
                outbox.close()
            self._open.clear()
