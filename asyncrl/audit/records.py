"""State of each group, claim and commit during an audit."""

from __future__ import annotations

import msgspec

TOKEN_SHIFT = 24  # a token is a service epoch, shifted, and a count


class Group:
    """State of one group."""

    __slots__ = (
        "accepted",
        "bound",
        "dead",
        "digests",
        "dropped",
        "given_up",
        "holder",
        "issued",
        "lengths",
        "life",
        "oldest",
        "ready",
        "scored",
        "steps",
        "tokens",
        "uses",
        "versions",
    )

    def __init__(self, uses: int = 1, *, issued: int = 0) -> None:
        self.uses = uses  # steps that may train it
        self.issued = issued  # life of the service that issued it
        self.bound = -1  # staleness bound of its lease
        self.tokens: set[int] = set()
        self.holder = 0  # token of the lease that holds it
        self.life = 0  # life of the service that granted this lease
        self.oldest: dict[int, int] = {}  # sample -> its oldest version
        self.versions: dict[int, frozenset[int]] = {}  # sample -> versions of its spans
        self.digests: dict[int, dict[int, str]] = {}  # sample -> version -> digest
        self.lengths: dict[int, int] = {}
        self.accepted: dict[int, int] = {}  # sample -> life of the service that accepted it
        self.scored: set[int] = set()
        self.ready = 0  # life of the service in which its samples were complete and scored; 0: not yet
        self.dropped = ""
        self.dead = ""
        self.given_up = False  # its samples are discarded with the steps that trained it
        self.steps: set[int] = set()  # steps of the surviving history that trained it

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
