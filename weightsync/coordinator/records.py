"""What the weight-sync service knows of a generator, of a version and of a round: plain records, no decisions.

`rounds` alone changes them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from asyncrl.wire import Hop, Manifest, MemberPoll, Tensor
from weightsync.transports.base import blob_sizes


class State(enum.StrEnum):
    """Where a generator stands. Drawn in `weightsync.coordinator.rounds`."""

    JOINING = "joining"
    STALE = "stale"
    SYNCING = "syncing"
    SERVING = "serving"
    DEAD = "dead"


@dataclass
class Member:
    """A generator process. `version` and `digest` are what it says its model holds (-1 and empty: nothing)."""

    name: str
    pid: int
    host: str
    fingerprint: str
    transports: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ("full",)
    relay: str = ""  # where it serves the version that it holds; empty: nowhere
    has_plan: str = ""
    version: int = -1
    digest: str = ""
    base: str = ""  # digest of the whole weights that it holds, under an adapter where there is one
    order: int = 0  # of its newest poll
    unsure: bool = False  # it was told to receive and has not spoken since: what it holds now is not known
    reported: str = "joining"  # its own words in the last poll, for `round_reported`
    round_reported: int = 0
    received_digest: str = ""
    last_seen: float = 0.0
    dead: bool = False
    unusable: dict[tuple[str, str], float] = field(default_factory=dict)  # (transport, address): not before then
    shunned: set[str] = field(default_factory=set)  # sources that failed it for the target
    whole_only: bool = False  # hops failed it for the target
    part: Part | None = None  # its open part in a round
    last: Part | None = None  # the part that it committed last
    error: str = ""  # the last failure, empty after a success
    said: str = ""  # what it reported outside of its part in a round, empty after a success
    failures: int = 0  # since the last success
    retry_at: float = 0.0


@dataclass(frozen=True)
class Choice:
    """How the target would come to a member now. An empty transport: not at all, or not yet; `why` says why."""

    transport: str
    why: str
    address: str = ""
    source: str = ""
    hops: tuple[Hop, ...] = ()
    base: bool = False  # of the weights under the target, which is an adapter


@dataclass
class Part:
    """A member's part in one round. Open until `result` is set: the digest it acknowledged, or why it was left out."""

    member: str
    round: Round
    way: Choice
    deadline: float
    rank: int = 0
    world_size: int = 0
    generation: int = 0
    whole: bool = False  # the member has all of it: the source is free
    committing: bool = False
    committed: bool = False
    result: str = ""

    @property
    def encoding(self) -> str:
        """What is carried: the encoding of the version, or `delta` where hops are."""
        return "delta" if self.way.hops else self.round.target.manifest.encoding

    @property
    def nbytes(self) -> int:
        """Bytes that the transport carries for it."""
        return sum(blob_sizes(self.round.target.manifest, self.way.hops))


@dataclass(frozen=True)
class Target:
    """The version that every member should hold."""

    epoch: int
    manifest: Manifest
    tensors: tuple[Tensor, ...]
    publisher: str
    host: str


@dataclass
class Round:
    """One attempt to bring a target to the members that lack it. `state` is one of RoundReply."""

    number: int
    target: Target
    started: float
    state: str = "preparing"
    parts: dict[str, Part] = field(default_factory=dict)
    detail: str = ""
    until: float = math.inf  # takes more members until then: `timeout_s` after its first

    @property
    def closed(self) -> bool:
        """True once it is decided; late parts of a superseded round may still be open."""
        return self.state in ("committed", "superseded", "failed")


@dataclass(frozen=True)
class Formation:
    """A collective group that the publisher is to lead: ranks by member; the publisher is rank 0."""

    round: Round
    generation: int
    ranks: dict[str, int]
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True)
class Publisher:
    """Who said hello as the learner."""

    host: str
    fingerprint: str


def fails(message: MemberPoll, part: Part | None) -> bool:
    """Whether an error is that of the part: not of an older round, and not beside the word that it succeeded."""
    if part is None or message.round != part.round.number:
        return False
    manifest = part.round.target.manifest
    return message.state == "prepared" or (message.version, message.digest) != (manifest.version, manifest.digest)
