"""The interface of transports: an outbox at the publisher, an inbox at each generator.

Guarantees of every transport:
1. no call waits longer than its deadline;
2. the result of `read` may be wrong (torn, corrupt): the receiver compares digests, a transport need not;
3. a failure raises `sync.failed` (`TransportUnusable` if a retry cannot help); the next round starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from asyncrl.errors import WorkError
from asyncrl.wire import Hop, Instruction, Manifest, RoundReply, Tensor

#: Prefix of a member's error if a retry of the same address cannot help.
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
    """Sizes of the carried blobs: the buckets, or with hops the encoded buckets of each hop in turn (blob
    `h * buckets + k` is bucket k of hop h)."""
    return tuple(size for hop in hops for size in hop.nbytes) if hops else manifest.bucket_bytes


class Version(Protocol):
    """A version of the publisher, or of a member that relays, for an outbox."""

    manifest: Manifest
    tensors: tuple[Tensor, ...]
    hops: tuple[Hop, ...]  # oldest first

    def blobs(self, hops: Sequence[Hop]) -> AbstractContextManager[list[memoryview] | None]:
        """The blobs of `blob_sizes(manifest, hops)`, unchanged while the context lasts; None if the version is gone, or
        these hops are not (a suffix of) its own."""

    def is_gone(self) -> bool:
        """Whether the bytes from `blobs` may have changed: nothing more may be sent."""


class Outbox(Protocol):
    """The sending end of one transport. Used by the sync threads, never by the training thread."""

    def open(self) -> str:
        """Make it reachable and return its address. Idempotent."""

    def offer(self, version: Version) -> str:
        """Serve this version from now on (the one before may end); its address for the members, which can depend on the
        version. Transports that only `send` do nothing."""

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None:
        """Carry the blobs to the members in `reply.ranks`; blocks at most `deadline_s`. Transports that members pull
        from do nothing."""

    def close(self) -> None: ...


class Inbox(Protocol):
    """A generator's end in one round. Blocking; used by one thread at a time; bounded by `Instruction.deadline_s`."""

    def open(self) -> None: ...

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        """The bytes of blob `number` of `blob_sizes`; called once for every blob, in order. Valid until the second next
        read, or `close`: the receiver reads one blob ahead. `into` has the blob's size: a transport may put the bytes
        there, which saves a copy, and return it."""

    def close(self) -> None:
        """Free everything; at any time, also after a failure."""


InboxMaker = Callable[[Instruction], Inbox]
