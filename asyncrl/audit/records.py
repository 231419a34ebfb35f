"""State of each group, claim and commit during an audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from asyncrl.versions import Runs

TOKEN_SHIFT = 24  # a token is a service epoch, shifted, and a count
BEYOND = 1 << 53  # no version, step or length is that large: means of such numbers overflow


def to_count(value: Any) -> int:
    """A version, step or length. Raises ValueError if it is none: its line is damaged."""
    number = int(value)
    if abs(number) >= BEYOND:
        raise ValueError("a number is too large")
    return number


class Origin(NamedTuple):
    """What made a sample, and its reward: compared with the archived batch."""

    token: int
    producer: str
    length: int
    runs: Runs
    digests: dict[int, str]
    reward: float | None = None
    teaching: str = ""  # checksum of what a teacher said about it


@dataclass(slots=True)
class Group:
    """State of one group. A life is that of a service: the number of services that had started."""

    uses: int = 1  # steps that may train it
    issued: int = 0  # life of the service that issued it
    bound: int = -1  # staleness bound of its lease
    tokens: dict[int, str] = field(default_factory=dict)  # of its leases -> their producers
    holder: int = 0  # token of the lease that holds it
    life: int = 0  # life of the service that granted this lease or took it away
    oldest: dict[int, int] = field(default_factory=dict)  # sample -> its oldest version
    versions: dict[int, frozenset[int]] = field(default_factory=dict)  # sample -> versions of its spans
    digests: dict[int, dict[int, str]] = field(default_factory=dict)  # sample -> version -> digest
    lengths: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)  # sample -> life of the service that accepted it
    scored: dict[int, int] = field(default_factory=dict)  # sample -> life of the service that took its score
    origins: dict[int, Origin] = field(default_factory=dict)  # sample -> origin, if there is an archive
    unscored: int = 0  # life of the service in which all samples had come; 0: not yet
    ready: int = 0  # life of the service in which its samples were complete and scored; 0: not yet
    dropped: str = ""
    dead: str = ""
    ended: int = 0  # life of the service that dropped or quarantined it
    forgot: int = 0  # life of the service that discarded its samples last
    given_up: bool = False  # its samples are discarded with the steps that trained it
    steps: set[int] = field(default_factory=set)  # steps of the surviving history that trained it

    @property
    def removed(self) -> bool:
        """Whether a batch may have lost it: it was quarantined, or its further uses were dropped."""
        return bool(self.dead or (self.uses > 1 and self.dropped))

    def take_back(self, step: int, life: int) -> None:
        """Remove a step from the surviving history."""
        self.steps.discard(step)
        if self.given_up and not self.steps:
            self.forget(life)

    def forget(self, life: int) -> None:
        """Discard its samples."""
        self.given_up, self.forgot = False, life
        self.oldest, self.versions, self.digests, self.lengths = {}, {}, {}, {}
        self.accepted, self.scored, self.origins, self.unscored, self.ready, self.holder = {}, {}, {}, 0, 0, 0


class Life(msgspec.Struct, frozen=True):
    """Settings that a service started with; 0 and "": an older log does not name them."""

    batch_groups: int = 0
    on_late: str = ""


class Claim(msgspec.Struct, frozen=True):
    """The batch of a step, as handed out last. `gone`: groups that it lost between two times; `life`: that of the
    service that recorded it.
    """

    version: int
    epoch: int
    groups: tuple[int, ...]
    gone: frozenset[int] = frozenset()
    life: int = 0


class Commit(msgspec.Struct, frozen=True):
    """A trained step. `tuning`: number of earlier changes of settings."""

    version: int
    epoch: int
    digest: str
    groups: tuple[int, ...]
    tuning: int = 0
