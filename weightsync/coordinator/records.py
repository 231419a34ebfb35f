"""State of the weight-sync service: generators, versions and rounds as plain records.

The other modules of this folder read and change it; it makes no decisions.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from asyncrl.config import WeightSyncConfig
from asyncrl.wire import Hop, Manifest, MemberPoll, Tensor
from weightsync.transports.base import blob_sizes

#: What a member reports that serves a version and wants no newer one now: an evaluation needs it.
HOLDING = "holding"


class State(enum.StrEnum):
    """State of a generator; `weightsync.coordinator.rounds` draws the transitions."""

    JOINING = "joining"
    STALE = "stale"
    SYNCING = "syncing"
    SERVING = "serving"
    DEAD = "dead"


@dataclass
class Member:
    """A generator process. `version` and `digest` are what it reports that its model holds (-1 and empty: nothing)."""

    name: str
    pid: int
    host: str
    fingerprint: str
    transports: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ("full",)
    relay: str = ""  # address at which it serves its version to others; empty: none
    has_plan: str = ""
    version: int = -1
    digest: str = ""
    base: str = ""  # digest of the whole weights that it holds, under an adapter if there is one
    order: int = 0  # of its newest poll
    unsure: bool = False  # it got an instruction and has not polled since: what it holds now is not known
    reported: str = "joining"  # its state in the last poll, for `round_reported`
    round_reported: int = 0
    received_digest: str = ""
    last_seen: float = 0.0
    dead: bool = False
    unusable: dict[tuple[str, str], float] = field(default_factory=dict)  # (transport, address): not before then
    failed_sources: set[str] = field(default_factory=set)  # for the target
    full_only: bool = False  # hops failed for the target
    part: Part | None = None  # its open part in a round
    last: Part | None = None  # the part that it committed last
    error: str = ""  # the last failure, empty after a success
    complaint: str = ""  # an error that it reported outside of its part in a round, empty after a success
    complained: float = -math.inf  # time of its last line in the log
    failures: int = 0  # since the last success
    retry_at: float = 0.0

    def holds(self, target: Target | None) -> bool:
        """Whether its last poll reports the target, and it got no instruction since."""
        if target is None or self.unsure:
            return False
        return (self.version, self.digest) == (target.manifest.version, target.manifest.digest)


@dataclass(frozen=True)
class Route:
    """How the target reaches a member now. An empty transport: not at all, or not yet; `why` gives the reason."""

    transport: str
    why: str
    address: str = ""
    source: str = ""
    hops: tuple[Hop, ...] = ()
    base: bool = False  # carries the weights under the target, which is an adapter


@dataclass
class Part:
    """A member's part in one round. Open until `result` is set: the acknowledged digest, or the reason of a failure."""

    member: str
    round: Round
    route: Route
    deadline: float
    rank: int = 0
    world_size: int = 0
    generation: int = 0
    whole: bool = False  # the member has received everything: the source is free
    committing: bool = False
    committed: bool = False
    result: str = ""

    @property
    def encoding(self) -> str:
        """What is carried: the encoding of the version, or `delta` if there are hops."""
        return "delta" if self.route.hops else self.round.target.manifest.encoding

    @property
    def nbytes(self) -> int:
        """Bytes that the transport carries for it."""
        return sum(blob_sizes(self.round.target.manifest, self.route.hops))


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
    """A collective group for the publisher to lead: ranks by member; the publisher is rank 0."""

    round: Round
    generation: int
    ranks: dict[str, int]
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True)
class Publisher:
    """A learner that said hello."""

    host: str
    fingerprint: str


@dataclass
class SyncState:
    """What one service knows. `generation` is where collective groups start to count, unique over restarts."""

    config: WeightSyncConfig
    generation: int
    members: dict[str, Member] = field(default_factory=dict)
    publishers: dict[str, Publisher] = field(default_factory=dict)
    epoch: int = 0
    target: Target | None = None
    offers: dict[str, str] = field(default_factory=dict)
    hops: tuple[Hop, ...] = ()
    base: Target | None = None  # the weights under the target, if that is an adapter
    base_offers: dict[str, str] = field(default_factory=dict)
    layout: tuple[str, tuple[Tensor, ...]] = ("", ())
    committed: int = -1  # newest version that a member acknowledged with its digest
    rounds: dict[int, Round] = field(default_factory=dict)  # the current one and older ones with open parts
    current: Round | None = None
    last_round: int = 0
    formation: Formation | None = None
    grouping: dict[str, float] = field(default_factory=dict)  # members that may form a group, and until when
    publisher_seen: float = 0.0
    finished: list[tuple[Round, float]] = field(default_factory=list)  # decided rounds and their end, for the log
    complaints: list[tuple[str, str]] = field(default_factory=list)  # (member, complaint), for the log


def is_part_error(message: MemberPoll, part: Part | None) -> bool:
    """Whether a reported error belongs to the open part: not to an older round, and not next to a success."""
    if part is None or message.round != part.round.number:
        return False
    manifest = part.round.target.manifest
    return message.state == "prepared" or (message.version, message.digest) != (manifest.version, manifest.digest)
