"""State of each group, claim and commit during an audit."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

TOKEN_SHIFT = 24  # a token is a service epoch, shifted, and a count


@dataclass(slots=True)
class Group:
    """State of one group."""

    uses: int = 1  # steps that may train it
    issued: int = 0  # life of the service that issued it
    bound: int = -1  # staleness bound of its lease
    tokens: set[int] = field(default_factory=set)
    holder: int = 0  # token of the lease that holds it
    life: int = 0  # life of the service that granted this lease
    oldest: dict[int, int] = field(default_factory=dict)  # sample -> its oldest version
    versions: dict[int, frozenset[int]] = field(default_factory=dict)  # sample -> versions of its spans
    digests: dict[int, dict[int, str]] = field(default_factory=dict)  # sample -> version -> digest
    lengths: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)  # sample -> life of the service that accepted it
    scored: set[int] = field(default_factory=set)
    ready: int = 0  # life of the service in which its samples were complete and scored; 0: not yet
    dropped: str = ""
    dead: str = ""
    given_up: bool = False  # its samples are discarded with the steps that trained it
    steps: set[int] = field(default_factory=set)  # steps of the surviving history that trained it

    @property
    def removed(self) -> bool:
        """Whether a batch may have lost it: it was quarantined, or its further uses were dropped."""
        return bool(self.dead or (self.uses > 1 and self.dropped))

    def take_back(self, step: int) -> None:
        """Remove a step from the surviving history."""
        self.steps.discard(step)
        if self.given_up and not self.steps:
            self.forget()

    def forget(self) -> None:
        """Discard its samples."""
        self.given_up = False
        self.oldest, self.versions, self.digests, self.lengths = {}, {}, {}, {}
        self.accepted, self.scored, self.ready, self.holder = {}, set(), 0, 0


class Claim(msgspec.Struct, frozen=True):
    """The batch of a step, as handed out last."""

    version: int
    epoch: int
    groups: tuple[int, ...]


class Commit(msgspec.Struct, frozen=True):
    """A trained step. `tuning`: number of earlier changes of settings."""

    version: int
    epoch: int
    digest: str
    groups: tuple[int, ...]
    tuning: int = 0
