"""The interface of transports: an outbox at the publisher, an inbox at each generator.

Implemented by the files beside this one. Guarantees of every transport:
1. no call waits longer than the deadline it was given;
2. what `read` returns may be wrong (torn, corrupt): the receiver compares digests, a transport need not;
3. a failure raises `sync.failed` (`TransportUnusable` where trying again cannot help); the next round starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from asyncrl.errors import WorkError
from asyncrl.wire import Hop, Instruction, Manifest, RoundReply, Tensor

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


def blob_sizes(manifest: Manifest, hops: Sequence[Hop]) -> tuple[int, ...]:
    """Sizes of the blobs that a transport carries: the buckets, or with hops the encoded buckets of each hop in turn
    (blob `h * buckets + k` is bucket k of hop h)."""
    return tuple(size for hop in hops for size in hop.nbytes) if hops else manifest.bucket_bytes


class Version(Protocol):
    """A version as its holder (the publisher, or a member that relays) hands it to an outbox."""

    manifest: Manifest
    tensors: tuple[Tensor, ...]
    hops: tuple[Hop, ...]  # oldest first

    def blobs(self, hops: Sequence[Hop]) -> AbstractContextManager[list[memoryview] | None]:
        """The blobs of `blob_sizes(manifest, hops)`, kept as they are while the context lasts; None where the version
        is gone, or these hops are not (a suffix of) its own."""

    def is_gone(self) -> bool:
        """Whether what `blobs` handed out may be something else by now: nothing more is to be sent of it."""


class Outbox(Protocol):
    """The end of one transport at who holds a version. Used by the sync threads, never by the training thread."""

    def open(self) -> str:
        """Make it reachable (again: no effect); its address."""

    def offer(self, version: Version) -> str:
        """From now on serve this version (the one before may end); its address for the members, which may differ from
        version to version. Transports that only `send` have nothing to do."""

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None:
        """Carry the blobs to the members that `reply.ranks` names; blocks at most `deadline_s`. Transports that
        members pull from have nothing to do."""

    def close(self) -> None: ...


class Inbox(Protocol):
    """A generator's end in one round. Blocking; used by one thread at a time; bounded by `Instruction.deadline_s`."""

    def open(self) -> None: ...

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        """The bytes of blob `number` of `blob_sizes`; called once for every blob, in order. Valid until the next but
        one is read, or `close`: the receiver reads one ahead while it works on the one before. `into` has the blob's
        size: the bytes may be put there, which saves a copy; then it is what is returned."""

    def close(self) -> None:
        """Give everything back; any time, also after a failure."""


InboxMaker = Callable[[Instruction], Inbox]
