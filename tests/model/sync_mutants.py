"""Wrong rules of weight sync, each a small change of the real code: the search must find every one of them.

A mutant names the case in which the search finds it, and words
of what it sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

from sync_world import Case

import weightsync.coordinator.routing
from asyncrl.wire import Hop, Instruction, MemberPoll
from weightsync.coordinator.records import Member, Part, State
from weightsync.coordinator.rounds import Rounds
from weightsync.coordinator.routing import Scene, Source


class VersionIsEnough(Rounds):
    """SERVING without a look at the digest."""

    def state_of(self, member: Member) -> State:
        state, target = super().state_of(member), self.target
        same = target is not None and member.version == target.manifest.version
        return State.SERVING if state is State.STALE and same else state


class AnyDigestIsCommitted(Rounds):
    """What arrived is committed whatever its digest."""

    def _after_receipt(self, member: Member, now: float) -> Instruction:
        if member.part is not None:
            member.received_digest = member.part.round.target.manifest.digest
        return super()._after_receipt(member, now)


class LateIsCommitted(Rounds):
    """Who was left out of a round may commit what it received in it."""

    def _after_receipt(self, member: Member, now: float) -> Instruction:
        if member.part is None and self.target is not None:
            return Instruction("commit", member.round_reported, version=self.target.manifest.version)
        return super()._after_receipt(member, now)


class OlderLearnersVersionIsCommitted(Rounds):
    """A learner that went back does not stop what the one before had begun."""

    def _after_receipt(self, member: Member, now: float) -> Instruction:
        epoch, part = self.epoch, member.part
        if part is not None:
            self.epoch = part.round.target.epoch
        answer = super()._after_receipt(member, now)
        self.epoch = epoch
        return answer


class NoDeadline(Rounds):
    """A round waits for everybody."""

    def _begin(self, *args: Any) -> Part:
        part = super()._begin(*args)
        part.deadline = self.config.timeout_s * 1000 + part.deadline
        return part

    def tick(self, *, now: float) -> None:
        for member in self.members.values():
            member.dead |= now - member.last_seen > self.config.member_timeout_s


class SureAfterReceive(Rounds):
    """What a member held before it was told to receive is believed until it says something else."""

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        answer = super().instruct(name, now=now)
        if answer is not None and answer.action == "receive":
            self.members[name].unsure = False
        return answer


class SureAfterCommit(Rounds):
    """What a member held before it was told to commit is believed until it says something else."""

    def _after_receipt(self, member: Member, now: float) -> Instruction:
        answer = super()._after_receipt(member, now)
        member.unsure = False
        return answer


class EveryWordCounts(Rounds):
    """A copy of an older question counts as the member's last word."""

    def is_late(self, message: MemberPoll) -> bool:
        return False


class OverwrittenIsHeld(Rounds):
    """An engine that overwrites in place still counts as holding what it held, once it is prepared."""

    def _take_word(self, member: Member, message: MemberPoll, now: float) -> None:
        version, digest = member.version, member.digest
        super()._take_word(member, message, now)
        if message.state == "prepared":
            member.version, member.digest = version, digest


class FailedOnceFailedForEver(Rounds):
    """A member that failed is not tried again."""

    def _needs(self, member: Member, now: float) -> bool:
        return super()._needs(member, now) and not member.failures


class PreparedForNothing(Rounds):
    """A member that is prepared for a round that is over is told nothing."""

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        member = self.members[name]
        if member.reported == "prepared" and member.part is None:
            return None
        return super().instruct(name, now=now)


class RelayChosenAgain(Rounds):
    """A relay that failed a reader is its source again."""

    def _fail(self, member: Member, why: str, now: float) -> None:
        super()._fail(member, why, now)
        member.shunned.clear()


class RelayWithoutLimit(Rounds):
    """Pulls are not counted."""

    def scene(self, now: float) -> Scene:
        scene = super().scene(now)
        return Scene(
            scene.config,
            scene.target,
            scene.offers,
            scene.hops,
            scene.members,
            scene.together,
            {},
            scene.publisher_silent,
            now,
        )


class PublisherGivenUp(Rounds):
    """The publisher, too, is not asked again by who failed with it."""

    def _needs(self, member: Member, now: float) -> bool:
        return super()._needs(member, now) and "learner" not in member.shunned


def _any_member_relays(member: Member, scene: Scene) -> list[Source]:
    return [
        Source(other.name, other.relay, (), scene.loads.get(other.name, 0), False, publisher=False)
        for other in scene.members.values()
        if other.relay and other is not member and other.name not in member.shunned
    ]


class AnyMemberRelays(Rounds):
    """Who serves an older version relays the target."""

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        with patch.object(weightsync.coordinator.routing, "_relays", _any_member_relays):
            return super().instruct(name, now=now)


def _hops_by_version(member: Member, scene: Scene) -> tuple[Hop, ...]:
    for number, hop in enumerate(scene.hops):
        if hop.base == member.version and "delta" in member.encodings:
            return scene.hops[number:]
    return ()


class HopsByVersion(Rounds):
    """Hops go to who holds the version of their base, whatever its digest."""

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        with patch.object(weightsync.coordinator.routing, "hops_for", _hops_by_version):
            return super().instruct(name, now=now)


class AdapterWithoutBase(Rounds):
    """Nobody is asked for the base."""

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        with patch.object(weightsync.coordinator.routing, "lacks_base", lambda member, target: False):
            return super().instruct(name, now=now)


class BaseOfTheProcessBefore(Rounds):
    """Who held the base once is believed to hold it, also after a restart."""

    def _seen(self, message: MemberPoll, now: float) -> Member:
        before = self.members.get(message.member)
        member = super()._seen(message, now)
        member.base = member.base or (before.base if before is not None else "")
        return member


class Mutant(NamedTuple):
    """A wrong rule, a case in which it shows, words of the violation."""

    kind: type[Rounds]
    case: Case
    words: str


ONE = Case(members=1, versions=1)
TWO = Case(members=1)
PAIR = Case(versions=1)
MUTANTS = (
    Mutant(VersionIsEnough, ONE._replace(kinds=("spoil",)), "SERVING"),
    Mutant(AnyDigestIsCommitted, ONE._replace(kinds=("digest",)), "commit"),
    Mutant(LateIsCommitted, ONE._replace(faults=0), "no part"),
    Mutant(OlderLearnersVersionIsCommitted, TWO._replace(kinds=("learner",)), "older learner"),
    Mutant(NoDeadline, ONE._replace(faults=0), "open"),
    Mutant(SureAfterReceive, TWO._replace(kinds=("learner",), in_place=True), "SERVING"),
    Mutant(SureAfterCommit, TWO._replace(kinds=("learner",)), "SERVING"),
    Mutant(EveryWordCounts, ONE._replace(kinds=("double",)), "last word"),
    Mutant(OverwrittenIsHeld, TWO._replace(kinds=("learner",), in_place=True), "SERVING"),
    Mutant(FailedOnceFailedForEver, ONE._replace(kinds=("transfer",)), "not healed"),
    Mutant(PreparedForNothing, ONE._replace(faults=0), "not healed"),
    Mutant(RelayChosenAgain, PAIR._replace(kinds=("transfer",)), "again"),
    Mutant(RelayWithoutLimit, PAIR._replace(faults=0), "at once"),
    Mutant(PublisherGivenUp, ONE._replace(kinds=("transfer",)), "not healed"),
    Mutant(AnyMemberRelays, Case(faults=0), "relays, but is"),
    Mutant(AdapterWithoutBase, ONE._replace(faults=0, adapter=True), "gets an adapter"),
    Mutant(BaseOfTheProcessBefore, ONE._replace(kinds=("crash",), adapter=True), "gets an adapter"),
    Mutant(HopsByVersion, TWO._replace(delta=True, kinds=("spoil",)), "hops"),
)
