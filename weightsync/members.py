"""What the weight-sync service knows of a generator, of a version and of a round: plain records, no decisions.

Called by `rounds`, which alone changes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from asyncrl.wire import Manifest, Tensor


class State(enum.StrEnum):
    """Where a generator stands. Drawn in `weightsync.rounds`."""

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
    has_plan: str = ""
    version: int = -1
    digest: str = ""
    reported: str = "joining"  # its own words in the last poll, for `round_reported`
    round_reported: int = 0
    received_digest: str = ""
    last_seen: float = 0.0
    dead: bool = False
    unusable: set[tuple[str, str]] = field(default_factory=set)  # (transport, address) that it cannot reach
    part: Part | None = None  # its open part in a round
    error: str = ""  # the last failure, empty after a success
    failures: int = 0  # since the last success
    retry_at: float = 0.0


@dataclass
class Part:
    """A member's part in one round. Open until `result` is set: the digest it acknowledged, or why it was left out."""

    member: str
    round: Round
    transport: str
    address: str
    deadline: float
    rank: int = 0
    world_size: int = 0
    generation: int = 0
    committing: bool = False
    committed: bool = False
    result: str = ""


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


@dataclass(frozen=True)
class Publisher:
    """Who said hello as the learner."""

    host: str
    fingerprint: str
