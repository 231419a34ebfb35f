"""Questions about the state of the weight-sync service. Nothing here changes it.

Guarantees:
1. every answer is a function of the state and the time;
2. `state_for` never returns SERVING for a member that got an instruction since its last poll.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from asyncrl.wire import MemberPoll, RoundReply
from weightsync.coordinator.records import HOLDING, Member, State, SyncState
from weightsync.coordinator.routing import Router, Scene
from weightsync.encoding import DELTA

FORM_S = 5.0  # after a publish: a member that is in no collective group by then goes alone (`auto`)
#: Transports in which the publisher leads a group.
GROUPS = ("collective", "direct")
#: The group transport by `weightsync.transport`, where members form groups only at a publish.
GROUPED = {"auto": "collective", "direct": "direct"}
#: `RoundReply.rendezvous` for a publisher that must open its collective transport and publish again with the address.
WANTED = "wanted"
#: For a publisher of `direct`: members are busy, and the group waits for them.
FORMING = "forming"
#: Reports of members that take no version now: they have one that is not committed, or keep theirs.
BUSY = ("prepared", HOLDING)


class Queries:
    def __init__(self, state: SyncState, router: Router) -> None:
        self.state = state
        self.router = router

    def is_late(self, message: MemberPoll) -> bool:
        """Whether a poll is a copy of an older one, or from a process that was replaced.

        Orders of one host can be compared. After `member_timeout_s` every poll counts again: the orders of a host that
        was restarted begin again.
        """
        member = self.state.members.get(message.member)
        if member is None or member.dead or member.host != message.host:
            return False
        return bool(message.order) and message.order < member.order

    def mismatch(self, member: Member) -> str:
        """Why the member's model is not the learner's; empty if it is."""
        target = self.state.target
        known = self.state.publishers.get(target.publisher) if target is not None else None
        if known is None or not known.fingerprint or member.fingerprint in ("", known.fingerprint):
            return ""
        return f"{member.name} on {member.host} has fingerprint {member.fingerprint}, the learner {known.fingerprint}"

    def state_for(self, member: Member) -> State:
        if member.dead:
            return State.DEAD
        if member.part is not None:
            return State.SYNCING
        if member.holds(self.state.target):
            return State.SERVING
        return State.STALE if member.version >= 0 or self.state.target is not None else State.JOINING

    def scene(self, now: float) -> Scene:
        """What routes depend on."""
        state = self.state
        free = [state.members[name] for name in state.grouping if state.members[name].reported not in BUSY]
        lack = {member.name for member in free if member.part is None and not member.holds(state.target)}
        parts = [member.part for member in state.members.values() if member.part is not None]
        loads = Counter(part.route.source for part in parts if part.route.transport == "stream" and not part.whole)
        silent = now - state.publisher_seen > state.config.member_timeout_s
        base = None  # alone and from the publisher: only the target is relayed
        if state.base is not None:
            base = Scene(state.config, state.base, state.base_offers, (), {}, (), loads, silent, now)
        return Scene(
            state.config, state.target, state.offers, state.hops, state.members, lack, loads, silent, now, base
        )

    def needs_target(self, member: Member, now: float) -> bool:
        """Whether to bring the target to this member now."""
        if member.dead or member.part is not None or self.state.target is None or member.holds(self.state.target):
            return False
        return member.reported not in BUSY and now >= member.retry_at and not self.mismatch(member)

    def is_in_current(self, member: Member) -> bool:
        """Whether the member has, or had, a part in the current round."""
        return self.state.current is not None and member.name in self.state.current.parts

    def group_candidates(self, now: float) -> dict[str, float]:
        """The members that may form a group of `auto`, with the time until which they wait for it."""
        state, scene = self.state, self.scene(now)
        return {
            member.name: now + FORM_S
            for member in state.members.values()
            if state.config.transport in GROUPED
            and GROUPED[state.config.transport] in member.transports
            and not member.dead
            and member.reported != HOLDING
            and not member.holds(state.target)
            and not self.router.is_near(member, scene)
            and not self.mismatch(member)
            and not self.router.lacks_base(member, state.target)
        }

    def awaits_group(self) -> bool:
        """With `direct`: whether a member that may join the group is busy with another version."""
        if self.state.config.transport != "direct":
            return False
        members = [self.state.members[name] for name in self.state.grouping]
        return any(not one.dead and (one.reported == "prepared" or one.part is not None) for one in members)

    def hops_wanted(self, now: float) -> bool:
        """Whether a living member takes hops and is not reached by `local`."""
        scene = self.scene(now)
        return any(
            DELTA in member.encodings
            and not member.dead
            and not self.router.is_near(member, scene)
            and not self.mismatch(member)
            for member in self.state.members.values()
        )

    def reply(self, now: float, *, rendezvous: str) -> RoundReply:
        """The answer to the publisher."""
        current, formation, members = self.state.current, self.state.formation, self.state.members
        assert current is not None
        round_ = formation.round if formation is not None else current
        found = [(member.name, member.error or member.complaint) for member in members.values()]
        errors = [f"{name}: {error}" for name, error in found if error]
        return RoundReply(
            round_.number,
            round_.state,
            formation.generation if formation else 0,
            {name: str(self.state_for(member)) for name, member in members.items()},
            dict(formation.ranks) if formation else {},
            rendezvous,
            "; ".join(filter(None, [round_.detail, *errors])),
            formation.hops if formation else (),
            self.hops_wanted(now),
            formation.round.target.manifest.digest if formation else "",
        )


def reply_digest(reply: RoundReply) -> str:
    """`RoundRequest.seen` of a publisher that has this reply."""
    return hashlib.blake2b(msgspec.msgpack.encode(reply), digest_size=8).hexdigest()
