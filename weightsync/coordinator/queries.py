"""What the weight-sync service knows, and the questions that can be answered from it; nothing here changes anything.

The base of `weightsync.coordinator.rounds.Rounds`, which decides. Guarantees:
1. every answer is a function of what was reported and of the time;
2. `state_of` never says SERVING of a member of which something was asked since its last word.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from asyncrl.config import WeightSyncConfig
from asyncrl.wire import Hop, MemberPoll, RoundReply, Tensor
from weightsync.coordinator.records import Formation, Member, Publisher, Round, State, Target
from weightsync.coordinator.routing import DELTA, Scene, holds, lacks_base, near

FORM_S = 5.0  # after a publish: who is in no collective group by then goes alone (`auto`)
#: `RoundReply.rendezvous` of a publisher that must open its collective transport and publish again with the address.
WANTED = "wanted"


class Facts:
    """State of one service. `generation` is where collective groups start to count (unique over restarts)."""

    def __init__(self, config: WeightSyncConfig, *, generation: int) -> None:
        self.config = config
        self.members: dict[str, Member] = {}
        self.target: Target | None = None
        self.epoch = 0
        self.committed = -1  # newest version that a member acknowledged with its digest
        self.finished: list[tuple[Round, float]] = []  # decided rounds and their end; the caller logs and empties it
        self.complaints: list[tuple[str, str]] = []  # member, and its error that is no round's; as `finished`
        self.rounds: dict[int, Round] = {}  # the current one and older ones with open parts
        self.current: Round | None = None
        self._offers: dict[str, str] = {}
        self._hops: tuple[Hop, ...] = ()
        self._base: Target | None = None  # the weights under the target, where that is an adapter
        self._base_offers: dict[str, str] = {}
        self._publishers: dict[str, Publisher] = {}
        self._layout: tuple[str, tuple[Tensor, ...]] = ("", ())
        self._generation = generation
        self._formation: Formation | None = None
        self._together: dict[str, float] = {}  # members that may form a group, and until when
        self._heard = 0.0  # when the publisher last spoke
        self._numbers = 0

    # ------------------------------------------------------------ publisher

    def _reply(self, now: float, *, rendezvous: str) -> RoundReply:
        current, formation = self.current, self._formation
        assert current is not None
        shown = formation.round if formation is not None else current
        found = [(member.name, member.error or member.said) for member in self.members.values()]
        errors = [f"{name}: {error}" for name, error in found if error]
        return RoundReply(
            shown.number,
            shown.state,
            formation.generation if formation else 0,
            {name: str(self.state_of(member)) for name, member in self.members.items()},
            dict(formation.ranks) if formation else {},
            rendezvous,
            "; ".join(filter(None, [shown.detail, *errors])),
            formation.hops if formation else (),
            self._hops_wanted(now),
            formation.round.target.manifest.digest if formation else "",
        )

    def _hops_wanted(self, now: float) -> bool:
        """Whether hops are of use to anybody: to a living member that takes them and is not reached by `local`."""
        scene = self.scene(now)
        return any(
            DELTA in member.encodings and not member.dead and not near(member, scene) and not self.mismatch(member)
            for member in self.members.values()
        )

    def _lacking(self, now: float) -> dict[str, float]:
        """The members that a group of `auto` may be formed of, with the time until which they wait for it."""
        scene = self.scene(now)
        return {
            member.name: now + FORM_S
            for member in self.members.values()
            if self.config.transport == "auto"
            and "collective" in member.transports
            and not member.dead
            and not holds(member, self.target)
            and not near(member, scene)
            and not self.mismatch(member)
            and not lacks_base(member, self.target)
        }

    # ------------------------------------------------------------ members

    def is_late(self, message: MemberPoll) -> bool:
        """A copy of an older question, or of a process that was replaced: nobody waits for its answer.

        Orders of one host can be compared. The doubt ends with `member_timeout_s`: a host that was started again, whose
        orders begin anew, is heard then.
        """
        member = self.members.get(message.member)
        if member is None or member.dead or member.host != message.host:
            return False
        return bool(message.order) and message.order < member.order

    def mismatch(self, member: Member) -> str:
        """Why the member's model is another than the learner's; empty where it is the same."""
        known = self._publishers.get(self.target.publisher) if self.target is not None else None
        if known is None or not known.fingerprint or member.fingerprint in ("", known.fingerprint):
            return ""
        return f"{member.name} on {member.host} has fingerprint {member.fingerprint}, the learner {known.fingerprint}"

    def state_of(self, member: Member) -> State:
        """Where the member stands."""
        if member.dead:
            return State.DEAD
        if member.part is not None:
            return State.SYNCING
        if holds(member, self.target):
            return State.SERVING
        return State.STALE if member.version >= 0 or self.target is not None else State.JOINING

    # ------------------------------------------------------------ choices

    def scene(self, now: float) -> Scene:
        """What choices depend on."""
        free = [self.members[name] for name in self._together if self.members[name].reported != "prepared"]
        lack = {member.name for member in free if member.part is None and not holds(member, self.target)}
        parts = [member.part for member in self.members.values() if member.part is not None]
        loads = Counter(part.way.source for part in parts if part.way.transport == "stream" and not part.whole)
        silent = now - self._heard > self.config.member_timeout_s
        base = None  # alone and from the publisher: nobody relays what is no target
        if self._base is not None:
            base = Scene(self.config, self._base, self._base_offers, (), {}, (), loads, silent, now)
        return Scene(self.config, self.target, self._offers, self._hops, self.members, lack, loads, silent, now, base)

    def _needs(self, member: Member, now: float) -> bool:
        """Whether the target is to be brought to this member now."""
        if member.dead or member.part is not None or self.target is None or holds(member, self.target):
            return False
        return member.reported != "prepared" and now >= member.retry_at and not self.mismatch(member)

    def _took_part(self, member: Member) -> bool:
        return self.current is not None and member.name in self.current.parts


def mark(reply: RoundReply) -> str:
    """What `RoundRequest.seen` says of a reply that the publisher has."""
    return hashlib.blake2b(msgspec.msgpack.encode(reply), digest_size=8).hexdigest()
