"""Wrong rules of weight sync: each replaces one part of `Rounds` by a slightly wrong one. The search must find all.

A mutant names the case in which the search finds it, and words of the violation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from sync_world import Case

from asyncrl.wire import Hop, Instruction, MemberPoll
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.queries import Queries
from weightsync.coordinator.records import Member, Part, State, Target
from weightsync.coordinator.rounds import Parts
from weightsync.coordinator.routing import Router, Scene, Source
from weightsync.coordinator.transfers import Transfers


class VersionIsEnough(Queries):
    """SERVING without a look at the digest."""

    def state_for(self, member: Member) -> State:
        state, target = super().state_for(member), self.state.target
        same = target is not None and member.version == target.manifest.version
        return State.SERVING if state is State.STALE and same else state


class AnyDigestIsCommitted(Transfers):
    """What arrived is committed whatever its digest."""

    def confirm(self, member: Member, now: float) -> Instruction | None:
        if member.part is not None:
            member.received_digest = member.part.round.target.manifest.digest
        return super().confirm(member, now)


class LateIsCommitted(Transfers):
    """A member that was left out of a round may commit what it received in it."""

    def confirm(self, member: Member, now: float) -> Instruction | None:
        target = self.state.target
        if member.part is None and target is not None:
            return Instruction("commit", member.round_reported, version=target.manifest.version)
        return super().confirm(member, now)


class OlderLearnersVersionIsCommitted(Transfers):
    """A learner that went back does not stop what the one before had begun."""

    def confirm(self, member: Member, now: float) -> Instruction | None:
        epoch, part = self.state.epoch, member.part
        if part is not None:
            self.state.epoch = part.round.target.epoch
        answer = super().confirm(member, now)
        self.state.epoch = epoch
        return answer


class NoDeadline(Transfers):
    """A round waits for everybody."""

    def begin(self, *args: Any) -> Part:
        part = super().begin(*args)
        part.deadline = self.state.config.timeout_s * 1000 + part.deadline
        return part

    def expire(self, now: float) -> None: ...


class SureAfterReceive(Transfers):
    """What a member held before the instruction to receive is believed until its next report."""

    def receive(self, member: Member, now: float) -> Instruction | None:
        answer = super().receive(member, now)
        if answer is not None:
            member.unsure = False
        return answer


class SureAfterCommit(Transfers):
    """What a member held before the instruction to commit is believed until its next report."""

    def confirm(self, member: Member, now: float) -> Instruction | None:
        answer = super().confirm(member, now)
        member.unsure = False
        return answer


class EveryWordCounts(Queries):
    """A copy of an older poll counts as the member's last report."""

    def is_late(self, message: MemberPoll) -> bool:
        return False


class OverwrittenIsHeld(Membership):
    """An engine that overwrites in place still counts as holding what it held, once it is prepared."""

    def report(self, member: Member, message: MemberPoll, now: float) -> None:
        version, digest = member.version, member.digest
        super().report(member, message, now)
        if message.state == "prepared":
            member.version, member.digest = version, digest


class FailedOnceFailedForEver(Queries):
    """A member that failed is not tried again."""

    def needs_target(self, member: Member, now: float) -> bool:
        return super().needs_target(member, now) and not member.failures


class PreparedForNothing(Transfers):
    """A member that is prepared for a round that is over gets no instruction."""

    def confirm(self, member: Member, now: float) -> Instruction | None:
        return None if member.part is None else super().confirm(member, now)


class RelayChosenAgain(Transfers):
    """A relay that failed a reader is its source again."""

    def fail(self, member: Member, why: str, now: float) -> None:
        super().fail(member, why, now)
        member.failed_sources.clear()


class RelayWithoutLimit(Queries):
    """Pulls are not counted."""

    def scene(self, now: float) -> Scene:
        return replace(super().scene(now), loads={}, base=None)


class PublisherGivenUp(Queries):
    """A member does not ask the publisher again after a failure."""

    def needs_target(self, member: Member, now: float) -> bool:
        return super().needs_target(member, now) and "learner" not in member.failed_sources


class AnyMemberRelays(Router):
    """A member that serves an older version relays the target."""

    def relays(self, member: Member, scene: Scene) -> list[Source]:
        return [
            Source(other.name, other.relay, (), scene.loads.get(other.name, 0), False, publisher=False)
            for other in scene.members.values()
            if other.relay and other is not member and other.name not in member.failed_sources
        ]


class HopsByVersion(Router):
    """Hops go to a member that holds the version of their base, whatever its digest."""

    def hops_for(self, member: Member, scene: Scene) -> tuple[Hop, ...]:
        for number, hop in enumerate(scene.hops):
            if hop.base == member.version and "delta" in member.encodings:
                return scene.hops[number:]
        return ()


class AdapterWithoutBase(Router):
    """The base is never sent."""

    def lacks_base(self, member: Member, target: Target | None) -> bool:
        return False


class BaseOfTheProcessBefore(Membership):
    """A member that held the base once is believed to hold it, also after a restart."""

    def register(self, message: MemberPoll, now: float) -> Member:
        before = self.state.members.get(message.member)
        member = super().register(message, now)
        member.base = member.base or (before.base if before is not None else "")
        return member


class KeptVersionIsReplaced(Queries):
    """A member that keeps its version for an evaluation gets the target all the same."""

    def needs_target(self, member: Member, now: float) -> bool:
        reported = member.reported
        member.reported = "serving" if reported == "holding" else reported
        wanted = super().needs_target(member, now)
        member.reported = reported
        return wanted


class KeptVersionGoesOn(Transfers):
    """Its part in a round stays open."""

    def release(self, member: Member, now: float) -> None: ...


class Mutant(NamedTuple):
    """A wrong rule, a case in which it shows, words of the violation."""

    kind: type[Any]
    case: Case
    words: str

    @property
    def parts(self) -> Parts:
        return parts_with(self.kind)


def parts_with(kind: type[Any]) -> Parts:
    """The real parts, with this one in the place of its base class."""
    names = {Router: "router", Queries: "queries", Transfers: "transfers", Membership: "membership"}
    return replace(Parts(), **{names[kind.__bases__[0]]: kind})


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
    Mutant(KeptVersionIsReplaced, TWO._replace(kinds=("hold",)), "keeps its version"),
    Mutant(KeptVersionGoesOn, TWO._replace(kinds=("hold",)), "keeps its version"),
    Mutant(HopsByVersion, TWO._replace(delta=True, kinds=("spoil",)), "hops"),
)
