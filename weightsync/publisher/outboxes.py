"""The publisher's ends of the transports that the configuration allows; each is opened when it is first needed.

With `stream` or `disk` set that is when the first version is announced. With `auto`, `local` at once (it needs
nothing), `collective` and `stream` once the service has a member on another host (it asks for the rendezvous), `disk`
never (it copies everything once more: only if it is set). Guarantees:
1. before that nothing listens and nothing is written;
2. an address is offered only if its outbox has the version.
Transports are imported when they are opened: a run on one host loads none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.wire import RoundReply
from weightsync.publisher.delta_chain import Staged
from weightsync.transports.base import Outbox, TransportError

if TYPE_CHECKING:
    from weightsync.transports.collective import CollectiveOutbox

#: Transports by `weightsync.transport`.
ALLOWED = {
    "auto": ("local", "collective", "stream"),
    "local": ("local",),
    "collective": ("collective",),
    "stream": ("stream",),
    "disk": ("disk",),
    "direct": ("direct", "local", "stream"),  # these for members that miss a group
}
#: Opened for the first version if they are the only ones.
OPEN_FIRST = ("stream", "disk")


class Outboxes:
    """The outboxes for one value of `weightsync.transport`. `make` gives an outbox by transport name."""

    def __init__(self, transport: str, make: Callable[[str], Outbox]) -> None:
        self._names = ALLOWED[transport]
        self._make = make
        self._open: dict[str, Outbox] = {}
        self._lock = threading.Lock()

    def addresses(self, version: Staged) -> dict[str, str]:
        """Transports that may carry the version, with their addresses; empty: opened on request.

        Raises:
            TransportError: the version was overwritten before it could be offered.
            Unavailable: no room (`disk.full`); a retry may help.
            ConfigError: an address that this host does not have.
        """
        found = {}
        for name in self._names:
            if name == "direct":
                found[name] = self.group().open()
            elif version.slot is None:
                found[name] = ""
            elif name == "local":
                found[name] = str(version.slot.path)
            elif name in self._open or (name in OPEN_FIRST and len(self._names) == 1):
                found[name] = self._get(name).offer(version)
            else:
                found[name] = ""
        return found

    def open_remote(self) -> None:
        """Open the transports that reach members without this shared memory. Raises ConfigError like `addresses`."""
        for name in self._names:
            if name != "local":
                self._get(name).open()

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None:
        """Lead the collective group of the reply. Raises TransportError."""
        if "collective" not in self._names:
            raise TransportError("the collective transport is not allowed here")
        self._get("collective").send(reply, blobs, deadline_s=deadline_s)

    def group(self) -> CollectiveOutbox:
        """The leader of the groups of `direct`."""
        found: Any = self._get("direct")
        leader: CollectiveOutbox = found
        return leader

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
