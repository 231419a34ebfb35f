"""The interface of transports: an outbox at the publisher, an inbox at each generator.

Called by the publisher and the receiver; implemented by the files beside this one. Guarantees of every transport:
1. no call waits longer than the deadline it was given;
2. what `read` returns may be wrong (torn, corrupt): the receiver compares digests, a transport need not;
3. a failure raises `sync.failed` (`TransportUnusable` where trying again cannot help); the next round starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncrl.errors import WorkError
from asyncrl.wire import Instruction, RoundReply

#: Begins the error that a member reports where trying the same address again cannot help.
UNUSABLE = "unusable: "


class TransportError(WorkError):
    """This transfer failed; a new round may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__("sync.failed", message)


class TransportUnusable(TransportError):
    """This address cannot be reached from this process; the service chooses another transport for the member."""

    def __init__(self, message: str) -> None:
        super().__init__(UNUSABLE + message)


class Outbox(Protocol):
    """The publisher's end of one transport."""

    def open(self) -> str:
        """Make it reachable (again: no effect); its address."""

    def send(self, reply: RoundReply, buckets: Sequence[memoryview], *, deadline_s: float) -> None:
        """Carry the buckets to the members that `reply.ranks` names; blocks at most `deadline_s`."""

    def close(self) -> None:
        """Give everything back."""


class Inbox(Protocol):
    """A generator's end in one round. Blocking; used by one thread at a time; bounded by `Instruction.deadline_s`."""

    def open(self) -> None:
        """Reach the publisher."""

    def read(self, number: int) -> memoryview:
        """The bytes of bucket `number`; called once for every bucket, in order. Valid until `close`."""

    def close(self) -> None:
        """Give everything back; any time, also after a failure."""


InboxMaker = Callable[[Instruction], Inbox]
