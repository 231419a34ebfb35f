"""The decisions of the weight-sync service: a pure state machine over members, a target and rounds.

No sockets, no clock, no files. How a version comes
to a member is chosen in `weightsync.coordinator.routing`; what is known, without a decision, stands in
`weightsync.coordinator.queries`; where all
stand is told in `weightsync.coordinator.status`.

A member:
```
            first poll        target known            instructed            ack with the manifest's digest
   (none) -----------> JOINING ----------> STALE ------------------> SYNCING ---------------------------> SERVING
                          ^                  ^   left out: error,       |                                    |
        any silent member |                  +--- deadline, restart ----+                 new target         |
        -> DEAD, polls ---+                  +---------------------------------------------------------------+
```
A round: preparing -> transferring -> committed | failed (nobody got it) | superseded (a newer version was published).
In it each member goes: receive -> (prepared, digest of what arrived is right) commit -> ack(version, digest).

Guarantees (searched in tests/model/test_sync_search.py):
1. SERVING means: the member's last word is the target's version with the manifest's digest, and nothing was asked of it
   since; a word that comes late (an older question, a process that was replaced) is not its last;
2. commit is told only to a member that reported this round prepared with the manifest's digest;
3. a member that misses `timeout_s` in a round is left out of it with the reason; the others are not held up; a round
   takes no more members after `timeout_s`, so it is decided within twice that;
4. silent for `member_timeout_s` is DEAD; it comes back by polling; after an hour it is forgotten;
5. a member that joins late, or failed, gets the target in a new round without a new publish (after a growing pause),
   and from another source;
6. a member that already received an older version of the same epoch whole may commit it (progress), then goes on;
7. an older learner epoch is `fenced`; another model is `handshake.mismatch`;
8. collective: the publisher's question forms the group, from the members that are free at that moment; generation
   numbers never repeat; with `auto` nobody waits for a group longer than `FORM_S`;
9. a relay serves the target itself, and only readers that it did not fail;
10. who lacks the base of an adapter gets that in a round of its own, then the adapter;
11. an error that a member reports outside of its part changes nothing but what is shown of it (`said`, `complaints`).

Example (timeout_s 30, member_timeout_s 20, local): t=0 publish v1 while a and b poll: round 1, both receive. t=1 a is
prepared: commit; its ack makes it SERVING. b is stopped: t=30 round 1 is committed with a, b is left out ("no answer
within 30 s") and, silent for longer than 20 s, DEAD. t=60 b polls again: round 2 carries v1 to b alone.
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.errors import Fenced, HandshakeError, WorkError
from asyncrl.wire import Instruction, MemberPoll, Publish, Published, RoundReply, RoundRequest, Tensor
from weightsync.coordinator.queries import WANTED, Facts, mark
from weightsync.coordinator.records import Choice, Formation, Member, Part, Publisher, Round, Target, fails
from weightsync.coordinator.routing import UNUSABLE_S, check_hops, choose, common_hops, holds
from weightsync.plan.buckets import check_layout
from weightsync.transports.base import UNUSABLE

FIRST_PAUSE_S = 0.2  # before a member that failed tries again; doubles
LONGEST_PAUSE_S = 5.0
FORGET_S = 3600.0  # preempted generators come back under new names: a dead one is forgotten then


class Rounds(Facts):
    """State of one service, and all that changes it."""

    # ------------------------------------------------------------ publisher

    def hello(self, name: str, publisher: Publisher) -> None:
        """A learner introduces itself; needed before it publishes."""
        self._publishers[name] = publisher

    def publish(self, message: Publish, *, now: float) -> Published:
        """Take a new target, or new offers for the one it is. Raises Fenced on an older epoch."""
        self._fence(message.epoch)
        self._heard = now
        manifest = message.manifest
        tensors = message.tensors or (self._layout[1] if self._layout[0] == manifest.plan else ())
        publisher = self._publishers.get(message.publisher)
        base_tensors = self._base_tensors(message)
        if publisher is None or not tensors or (message.base is not None and not base_tensors):
            return Published(0, needs_tensors=True)
        check_layout(manifest, tensors)
        check_hops(manifest, message.hops)
        self._layout = (manifest.plan, tensors)
        base = self._base_target(message, base_tensors, publisher.host)
        old = self.target
        if old is not None and self.current is not None and (old.epoch, old.manifest) == (message.epoch, manifest):
            self._take_offers(message, base)
            return Published(self.current.number)
        if old is not None and old.epoch == message.epoch and manifest.version < old.manifest.version:
            raise WorkError("sync.failed", f"version {manifest.version} published after {old.manifest.version}")
        if message.epoch > self.epoch:
            self.committed = -1  # a learner that went back may publish lower versions
        self.epoch = message.epoch
        self._take_offers(message, base)
        self.target = Target(message.epoch, manifest, tensors, message.publisher, publisher.host)
        self._supersede(now)
        current = self._open_round(now)
        for member in self.members.values():
            member.shunned.clear()
            member.whole_only = False
            self._count_holder(member)
        self._together = self._lacking(now) if "collective" in message.offers else {}
        self._settle(current, now)
        return Published(current.number)

    def _base_tensors(self, message: Publish) -> tuple[Tensor, ...]:
        """The layout of the base: told now or before; empty where it is neither."""
        if message.base is None:
            return ()
        known = self._base is not None and self._base.manifest.plan == message.base.manifest.plan
        return message.base.tensors or (self._base.tensors if known and self._base is not None else ())

    @staticmethod
    def _base_target(message: Publish, tensors: tuple[Tensor, ...], host: str) -> Target | None:
        """The weights under an adapter as a target. Raises `sync.plan` and `sync.failed` where they are not that."""
        if message.base is None:
            return None
        manifest = message.base.manifest
        if (manifest.encoding, manifest.digest) != ("full", message.manifest.base):
            raise WorkError("sync.failed", f"version {manifest.version} is not the base of {message.manifest.version}")
        check_layout(manifest, tensors)
        return Target(message.epoch, manifest, tensors, message.publisher, host)

    def _take_offers(self, message: Publish, base: Target | None) -> None:
        self._offers, self._hops = message.offers, message.hops
        self._base, self._base_offers = base, message.base.offers if message.base is not None else {}

    def ask(self, message: RoundRequest, *, now: float) -> RoundReply | None:
        """The answer to the publisher; None where it knows it already (hold the question).

        Its presence lets a collective group form. State "unknown" tells it to publish again.
        """
        self._fence(message.epoch)
        if self.target is None or self.current is None or message.epoch > self.epoch:
            return RoundReply(0, "unknown")
        self._heard = now
        if self._formation is not None and message.transport_done and message.round == self._formation.round.number:
            if message.transport_done != "sent":
                self._formation.round.detail = message.transport_done
            self._formation = None  # what its members say decides; others may form the next group
        reply = self._reply(now, rendezvous=self._form(now))
        return None if mark(reply) == message.seen else reply

    def _fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Fenced("fenced", f"learner epoch {epoch}; epoch {self.epoch} has published", where="weightsync")

    def _form(self, now: float) -> str:
        """Form a collective group if members wait for one; the rendezvous that the publisher is told."""
        if self._formation is not None:
            return self._offers["collective"]
        lack = [member for member in self.members.values() if self._needs(member, now)]
        ways = [(member, choose(member, scene)) for scene in [self.scene(now)] for member in lack]
        waiting = [(member, way) for member, way in ways if way.transport == "collective" and way.address]
        if not waiting:
            return WANTED if any(way.transport and not way.address for _, way in ways) else ""
        address = self._offers["collective"]
        self._generation += 1
        bases = [(member, way) for member, way in waiting if way.base]  # one group carries one version: the base first
        waiting = bases or waiting
        current = self._base_round(now) if bases else self._open_round(now, fresh=True)
        ranks = {member.name: rank for rank, (member, _) in enumerate(waiting, start=1)}
        hops = common_hops([way.hops for _, way in waiting])
        self._formation = Formation(current, self._generation, ranks, hops)
        for member, way in waiting:
            part = self._begin(member, current, replace(way, address=address, hops=hops), now)
            part.rank, part.world_size, part.generation = ranks[member.name], len(ranks) + 1, self._generation
        return address

    # ------------------------------------------------------------ members

    def poll(self, message: MemberPoll, *, now: float) -> Instruction | None:
        """Take a member's report; what it does next, None while there is nothing (hold the poll)."""
        if self.is_late(message):
            return None
        member = self._seen(message, now)
        if not message.order or message.order != member.order:  # else it asks again: the answer was lost
            self._take_word(member, message, now)
        self._check_fingerprint(member)
        return self.instruct(member.name, now=now)

    def _take_word(self, member: Member, message: MemberPoll, now: float) -> None:
        member.order, member.unsure, part = message.order, False, member.part
        if message.error and fails(message, part):
            self._fail(member, message.error, now)
        if message.state == "prepared":
            member.received_digest = message.digest
            if message.version != member.version:  # overwritten in place: it holds nothing until the commit
                member.version, member.digest = message.version, ""
        elif (message.version, message.digest) != (member.version, member.digest) or message.state == "serving":
            self._acknowledge(member, message.version, message.digest, now)
        member.reported, member.round_reported = message.state, message.round
        if message.error and not (part is not None and part.result == message.error) and message.error != member.said:
            member.said = message.error
            self.complaints.append((member.name, message.error))

    def _seen(self, message: MemberPoll, now: float) -> Member:
        member = self.members.get(message.member)
        if member is None or (member.pid, member.host) != (message.pid, message.host):
            if member is not None:
                self._fail(member, "restarted", now)
            self._together.pop(message.member, None)
            member = Member(message.member, message.pid, message.host, message.fingerprint)
            self.members[message.member] = member
        member.last_seen = now
        member.dead = False
        member.transports, member.encodings = message.transports, message.encodings
        member.has_plan, member.relay, member.base = message.has_plan, message.relay, message.base
        return member

    def _check_fingerprint(self, member: Member) -> None:
        if mismatch := self.mismatch(member):
            raise HandshakeError("handshake.mismatch", mismatch, where="weightsync")

    def _acknowledge(self, member: Member, version: int, digest: str, now: float) -> None:
        """The member says what it holds; close its part where that is the part's version."""
        member.version, member.digest = version, digest
        part = member.part
        if part is not None and part.round.target.manifest.version == version:
            if digest == part.round.target.manifest.digest:
                part.committed, part.result = True, digest
                member.error, member.said, member.failures, member.part, member.last = "", "", 0, None, part
                if part.round.target.epoch == self.epoch and not part.way.base:
                    self.committed = max(self.committed, version)
                self._settle(part.round, now)
            elif part.committing:
                self._fail(member, f"holds digest {digest[:12]}, not {part.round.target.manifest.digest[:12]}", now)
        self._count_holder(member)
        if self.current is not None and not self.current.parts:
            self._settle(self.current, now)

    def _count_holder(self, member: Member) -> None:
        if self.target is not None and holds(member, self.target):
            self.committed = max(self.committed, self.target.manifest.version)

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        """What the member does next; None while there is nothing. Asked again while its poll is held."""
        member = self.members[name]
        if member.reported == "prepared":
            return self._after_receipt(member, now)
        if self._needs(member, now):
            way = choose(member, self.scene(now))
            if not way.address or way.transport == "collective":
                return None
            round_ = self._base_round(now) if way.base else self._open_round(now, fresh=self._took_part(member))
            self._begin(member, round_, way, now)
        part = member.part
        if part is None or part.committing or member.round_reported == part.round.number:  # it is at it
            return None
        member.unsure = True
        manifest, way = part.round.target.manifest, part.way
        tensors = () if member.has_plan == manifest.plan else part.round.target.tensors
        return Instruction(
            "receive",
            part.round.number,
            manifest,
            tensors,
            way.transport,
            way.address,
            part.rank,
            part.world_size,
            part.generation,
            max(0.1, part.deadline - now),
            self.committed,
            hops=way.hops,
            source=way.source,
        )

    def _after_receipt(self, member: Member, now: float) -> Instruction:
        """A member holds a whole version back until it is told: commit, or abort where its part is over."""
        part = member.part
        if part is None or member.round_reported != part.round.number:
            return Instruction("abort", member.round_reported, version=self.committed, detail="the round is over")
        manifest = part.round.target.manifest
        if member.received_digest != manifest.digest or part.round.target.epoch != self.epoch:
            why = "the learner went back" if part.round.target.epoch != self.epoch else "received another digest"
            self._fail(member, why, now)
            return Instruction("abort", part.round.number, version=self.committed, detail=why)
        part.whole = part.committing = member.unsure = True
        return Instruction("commit", part.round.number, version=manifest.version)

    # ------------------------------------------------------------ rounds

    def _open_round(self, now: float, *, fresh: bool = False) -> Round:
        """The current round; a new one with the same target where that is decided or takes no more members, or has
        members (with `fresh`)."""
        assert self.target is not None
        current = self.current
        if current is None or current.closed or now >= current.until or (fresh and current.parts):
            self._numbers += 1
            self.current = self.rounds[self._numbers] = Round(self._numbers, self.target, now)
            return self.current
        return current

    def _base_round(self, now: float) -> Round:
        """A round of its own for the weights under the target."""
        assert self._base is not None
        self._numbers += 1
        self.rounds[self._numbers] = Round(self._numbers, self._base, now)
        return self.rounds[self._numbers]

    def _supersede(self, now: float) -> None:
        self._formation = None
        self.current = None
        for round_ in [one for one in self.rounds.values() if one.target != self._base]:  # that is needed as before
            round_.state = "superseded"
            self._settle(round_, now)

    def _begin(self, member: Member, round_: Round, way: Choice, now: float) -> Part:
        part = Part(member.name, round_, way, now + self.config.timeout_s)
        member.part = round_.parts[member.name] = part
        round_.state = "transferring"
        round_.until = min(round_.until, part.deadline)
        self._together.pop(member.name, None)
        return part

    def _fail(self, member: Member, why: str, now: float) -> None:
        """Close the member's part without success; what failed it is not chosen for it again."""
        member.error = why
        part, member.part = member.part, None
        if part is None:
            return
        part.result = why
        if why.startswith(UNUSABLE):
            member.unusable[part.way.transport, part.way.address] = now + UNUSABLE_S
        if part.round.state != "superseded":
            member.failures += 1
            member.retry_at = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (member.failures - 1))
        if self.target is not None and part.round.target.manifest == self.target.manifest:
            member.whole_only |= bool(part.way.hops)
            if part.way.transport == "stream":
                member.shunned.add(part.way.source)
        self._settle(part.round, now)

    def _settle(self, round_: Round, now: float) -> None:
        """Decide a round whose parts are all closed, and hand it to the log."""
        if any(not part.result for part in round_.parts.values()) or round_.number not in self.rounds:
            return
        if not round_.closed:
            holders = [member for member in self.members.values() if holds(member, self.target)]
            if not round_.parts and not holders:
                return  # nobody is there yet: it stays open for the first
            done = any(part.committed for part in round_.parts.values()) or not round_.parts
            round_.state = "committed" if done else "failed"
        if self._formation is not None and self._formation.round is round_:
            self._formation = None  # whatever its publisher still sends, nobody takes it
        del self.rounds[round_.number]
        self.finished.append((round_, now))

    def tick(self, *, now: float) -> None:
        self._together = {name: until for name, until in self._together.items() if now < until}
        for member in self.members.values():
            if member.part is not None and now >= member.part.deadline:
                self._fail(member, f"no answer within {self.config.timeout_s:g} s", now)
            if member.part is None and not member.dead and now - member.last_seen > self.config.member_timeout_s:
                member.dead = True
                self._together.pop(member.name, None)
        for member in [one for one in self.members.values() if one.dead and now - one.last_seen > FORGET_S]:
            del self.members[member.name]
