"""The versions that a publisher offers, shared by its threads: staged, ready, announced, and the base of adapters.

Guarantees:
1. every method that waits ends when `end` is called;
2. the newest ready version is announced next; older ones are skipped;
3. the base of adapters stays in its slot while adapters of it are offered.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from asyncrl.errors import AsyncRLError
from asyncrl.wire import RoundReply
from weightsync.publisher.delta_chain import Staged
from weightsync.staging import Slot, Staging


class Offers:
    """`reply` is the service's last answer; `life` grows when the service has forgotten the publisher: older rounds are
    not valid then."""

    def __init__(self, staging: Staging) -> None:
        self.versions: list[Staged] = []  # at most one per slot, oldest first
        self.base: Staged | None = None  # the weights that the adapters are added to; its slot is pinned
        self.announced: Staged | None = None
        self.reply = RoundReply(0, "unknown")
        self.life = 0
        self.error: AsyncRLError | None = None
        self.ended = False
        self.changed = threading.Condition()
        self._staging = staging

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def fail(self, error: AsyncRLError) -> None:
        """Remember the error for the training thread."""
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    # ------------------------------------------------------------ versions

    def add(self, version: Staged) -> None:
        with self.changed:
            self.versions = [*(one for one in self.versions if one.slot is not version.slot), version]
            self.changed.notify_all()

    def fill(self, version: Staged, slot: Slot, order: int) -> None:
        """A version that was sent `direct` is in a slot now, for members that missed it: offer it again."""
        with self.changed:
            self.versions = [one for one in self.versions if one.slot is not slot]
            version.slot, version.order = slot, order
            self.announced = None
            self.changed.notify_all()

    def set_ready(self, version: Staged) -> None:
        with self.changed:
            version.ready = True
            self.changed.notify_all()

    def next_unready(self) -> Staged | None:
        """Wait until the newest version needs its hops; older ones are skipped. None at the end."""
        with self.changed:
            # bounded: work of this process alone; end() wakes it
            self.changed.wait_for(lambda: self.ended or (self.versions and not self.versions[-1].ready))
            return None if self.ended else self.versions[-1]

    def next_ready(self) -> Staged | None:
        """Wait for the newest ready version that is not announced. None at the end."""
        with self.changed:
            # bounded: work of this process alone; end() wakes it
            self.changed.wait_for(lambda: self.ended or self._newest_ready() is not self.announced)
            return None if self.ended else self._newest_ready()

    def _newest_ready(self) -> Staged | None:
        """Never one before the announced version, which may have lost its slot."""
        last = next((version for version in reversed(self.versions) if version.ready), None)
        if last is None:
            return self.announced
        # Only versions in slots have an order; one that was sent `direct` alone is the newest.
        older = self.announced is not None and last.slot is not None and last.order < self.announced.order
        return self.announced if older else last

    def find(self, round_: int, digest: str) -> Staged | None:
        """The version of a round: the base, or the newest that was announced no later."""
        with self.changed:
            if self.base is not None and self.base.manifest.digest == digest:
                return self.base
            known = [version for version in self.versions if 0 < version.round <= round_]
            return max(known, key=lambda version: version.round, default=None)

    # ------------------------------------------------------------ base of adapters

    def keep_base(self, digest: str) -> None:
        """Pin the weights with this digest before their slot can be overwritten; release others."""
        if self.base is not None and self.base.manifest.digest == digest:
            return
        known = [version for version in self.versions if digest and version.manifest.digest == digest]
        self.pin_base(known[-1] if known else None)

    def pin_base(self, base: Staged | None) -> None:
        old = self.base
        if base is not None and (base.slot is None or not self._staging.pin(base.slot, base.order)):
            base = None
        with self.changed:
            # without its hops: a member that lacks the base needs the full base
            self.base = replace(base, hops=(), encoded=()) if base is not None else None
        if old is not None and old.slot is not None and (base is None or old.slot is not base.slot):
            self._staging.unpin(old.slot)

    # ------------------------------------------------------------ the service

    def set_round(self, version: Staged, round_: int) -> None:
        """The service took the version in this round (0: it did not)."""
        with self.changed:
            version.round = round_
            if round_:
                self.announced = version
            self.changed.notify_all()

    def forget_rounds(self) -> None:
        """The service has forgotten everything."""
        with self.changed:
            self.life += 1
            for version in self.versions:
                version.round = 0
            self.reply = RoundReply(0, "unknown")

    def announce_again(self) -> None:
        with self.changed:
            self.announced = None
            self.changed.notify_all()

    def wait_announced(self) -> Staged | None:
        """Wait for an announced version. None at the end."""
        with self.changed:
            # bounded: work of this process alone; end() wakes it
            self.changed.wait_for(lambda: self.ended or self.announced is not None)
            return None if self.ended else self.announced

    def take_reply(self, reply: RoundReply) -> None:
        with self.changed:
            self.reply = reply
            self.changed.notify_all()

    def count_serving(self, version: int) -> int:
        """Members that serve the newest announced version, if that is at least `version`; else 0."""
        newest = self.announced
        if newest is None or newest.manifest.version < version or not 0 < newest.round <= self.reply.round:
            return 0
        return sum(state == "serving" for state in self.reply.members.values())

    def wait_serving(self, version: int, members: int, timeout_s: float) -> tuple[RoundReply, int]:
        """Wait until this many members serve the version, an error, or `timeout_s`; the last reply and the number."""
        with self.changed:
            self.changed.wait_for(lambda: self.error or self.count_serving(version) >= members, timeout_s)
            return self.reply, self.count_serving(version)
