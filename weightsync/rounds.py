"""The decisions of the weight-sync service: a pure state machine over members, a target and rounds.

Called by `weightsync.service` with decoded messages and the time; no sockets, no clock, no files.

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

Guarantees:
1. SERVING means: the member's last word is the target's version with the manifest's digest; nothing else is SERVING;
2. a member that misses `timeout_s` in a round is left out of it with the reason; the others are not held up;
3. silent for `member_timeout_s` is DEAD; it comes back by polling;
4. a member that joins late, or failed, gets the target in a new round without a new publish (after a growing pause);
5. a member that already received an older version of the same epoch whole may commit it (progress), then goes on;
6. an older learner epoch is `fenced`; another model is `handshake.mismatch`;
7. collective: the publisher's question forms the group, from the members that are free at that moment; generation
   numbers never repeat.

Example (timeout_s 30, member_timeout_s 20, local): t=0 publish v1 while a and b poll: round 1, both receive. t=1 a is
prepared: commit; its ack makes it SERVING. b is stopped: t=30 round 1 is committed with a, b is left out ("no answer
within 30 s") and, silent for longer than 20 s, DEAD. t=60 b polls again: round 2 carries v1 to b alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import Fenced, HandshakeError, WorkError
from asyncrl.wire import Instruction, Manifest, MemberPoll, Publish, Published, RoundReply, RoundRequest, Tensor
from weightsync.members import Formation, Member, Part, Publisher, Round, State, Target
from weightsync.plan import check_layout
from weightsync.transports.base import UNUSABLE

FIRST_PAUSE_S = 0.2  # before a member that failed tries again; doubles
LONGEST_PAUSE_S = 5.0
#: `RoundReply.rendezvous` of a publisher that must open its collective transport and publish again with the address.
WANTED = "wanted"


class Rounds:
    """State of one service. `generation` is where collective groups start to count (unique over restarts)."""

    def __init__(self, config: WeightSyncConfig, *, generation: int) -> None:
        self.config = config
        self.members: dict[str, Member] = {}
        self.target: Target | None = None
        self.epoch = 0
        self.committed = -1  # newest version that a member acknowledged with its digest
        self.finished: list[tuple[Round, float]] = []  # decided rounds and their end; the caller logs and empties it
        self.rounds: dict[int, Round] = {}  # the current one and older ones with open parts
        self.current: Round | None = None
        self._offers: dict[str, str] = {}
        self._publishers: dict[str, Publisher] = {}
        self._layout: tuple[str, tuple[Tensor, ...]] = ("", ())
        self._generation = generation
        self._formation: Formation | None = None
        self._numbers = 0

    # ------------------------------------------------------------ publisher

    def hello(self, name: str, publisher: Publisher) -> None:
        """A learner introduces itself; needed before it publishes."""
        self._publishers[name] = publisher

    def publish(self, message: Publish, *, now: float) -> Published:
        """Take a new target, or new offers for the one it is. Raises Fenced on an older epoch."""
        self._fence(message.epoch)
        manifest = message.manifest
        tensors = message.tensors or (self._layout[1] if self._layout[0] == manifest.plan else ())
        publisher = self._publishers.get(message.publisher)
        if publisher is None or not tensors:
            return Published(0, needs_tensors=True)
        check_layout(manifest, tensors)
        self._layout = (manifest.plan, tensors)
        old = self.target
        if old is not None and self.current is not None and (old.epoch, old.manifest) == (message.epoch, manifest):
            self._offers = message.offers
            return Published(self.current.number)
        if old is not None and old.epoch == message.epoch and manifest.version < old.manifest.version:
            raise WorkError("sync.failed", f"version {manifest.version} published after {old.manifest.version}")
        if message.epoch > self.epoch:
            self.committed = -1  # a learner that went back may publish lower versions
        self.epoch = message.epoch
        self._offers = message.offers
        self.target = Target(message.epoch, manifest, tensors, message.publisher, publisher.host)
        self._supersede(now)
        current = self._open_round(now)
        for member in self.members.values():
            self._count_holder(member)
        self._settle(current, now)
        return Published(current.number)

    def ask(self, message: RoundRequest, *, now: float) -> RoundReply | None:
        """The answer to the publisher; None where it knows it already (hold the question).

        Its presence lets a collective group form. State "unknown" tells it to publish again.
        """
        self._fence(message.epoch)
        if self.target is None or self.current is None or message.epoch > self.epoch:
            return RoundReply(0, "unknown")
        if self._formation is not None and message.transport_done and message.round == self._formation.round.number:
            if message.transport_done != "sent":
                self._formation.round.detail = message.transport_done
            self._formation = None  # what its members say decides; others may form the next group
        reply = self._reply(rendezvous=self._form(now))
        return None if mark(reply) == message.seen else reply

    def _fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Fenced("fenced", f"learner epoch {epoch}; epoch {self.epoch} has published", where="weightsync")

    def _form(self, now: float) -> str:
        """Form a collective group if members wait for one; the rendezvous that the publisher is told."""
        assert self.target is not None
        if self._formation is not None:
            return self._offers["collective"]
        waiting = [member for member in self.members.values() if self._wants(member, now) == "collective"]
        if not waiting:
            return ""
        address = self._offers["collective"]
        if not address:
            return WANTED
        self._generation += 1
        current = self._open_round(now, fresh=True)
        ranks = {member.name: rank for rank, member in enumerate(waiting, start=1)}
        self._formation = Formation(current, self._generation, ranks)
        for member in waiting:
            part = self._begin(member, current, "collective", address, now)
            part.rank, part.world_size, part.generation = ranks[member.name], len(ranks) + 1, self._generation
        return address

    def _reply(self, *, rendezvous: str) -> RoundReply:
        current, formation = self.current, self._formation
        assert current is not None
        shown = formation.round if formation is not None else current
        errors = [f"{member.name}: {member.error}" for member in self.members.values() if member.error]
        return RoundReply(
            shown.number, shown.state, formation.generation if formation else 0,
            {name: str(self.state_of(member)) for name, member in self.members.items()},
            dict(formation.ranks) if formation else {}, rendezvous,
            "; ".join(filter(None, [shown.detail, *errors])),
        )  # fmt: skip

    # ------------------------------------------------------------ members

    def poll(self, message: MemberPoll, *, now: float) -> Instruction | None:
        """Take a member's report; what it does next, None while there is nothing (hold the poll)."""
        member = self._seen(message, now)
        part = member.part
        if part is not None and message.error and message.round == part.round.number:
            self._fail(member, message.error, now)
        if message.state == "prepared":
            member.received_digest = message.digest
        elif (message.version, message.digest) != (member.version, member.digest) or message.state == "serving":
            self._acknowledge(member, message.version, message.digest, now)
        member.reported, member.round_reported = message.state, message.round
        self._check_fingerprint(member)
        return self.instruct(member.name, now=now)

    def _seen(self, message: MemberPoll, now: float) -> Member:
        member = self.members.get(message.member)
        if member is None or (member.pid, member.host) != (message.pid, message.host):
            if member is not None:
                self._fail(member, "restarted", now)
            member = Member(message.member, message.pid, message.host, message.fingerprint)
            self.members[message.member] = member
        member.last_seen = now
        member.dead = False
        member.transports = message.transports
        member.has_plan = message.has_plan
        return member

    def _check_fingerprint(self, member: Member) -> None:
        if mismatch := self._mismatch(member):
            raise HandshakeError("handshake.mismatch", mismatch, where="weightsync")

    def _mismatch(self, member: Member) -> str:
        known = self._publishers.get(self.target.publisher) if self.target is not None else None
        if known is None or not known.fingerprint or member.fingerprint in ("", known.fingerprint):
            return ""
        return f"{member.name} on {member.host} has fingerprint {member.fingerprint}, the learner {known.fingerprint}"

    def _acknowledge(self, member: Member, version: int, digest: str, now: float) -> None:
        """The member says what it holds; close its part where that is the part's version."""
        member.version, member.digest = version, digest
        part = member.part
        if part is not None and part.round.target.manifest.version == version:
            if digest == part.round.target.manifest.digest:
                part.committed, part.result = True, digest
                member.error, member.failures, member.part = "", 0, None
                if part.round.target.epoch == self.epoch:
                    self.committed = max(self.committed, version)
                self._settle(part.round, now)
            elif part.committing:
                self._fail(member, f"holds digest {digest[:12]}, not {part.round.target.manifest.digest[:12]}", now)
        self._count_holder(member)
        if self.current is not None and not self.current.parts:
            self._settle(self.current, now)

    def _count_holder(self, member: Member) -> None:
        if self._holds_target(member) and self.target is not None:
            self.committed = max(self.committed, self.target.manifest.version)

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        """What the member does next; None while there is nothing. Asked again while its poll is held."""
        member = self.members[name]
        part = member.part
        if member.reported == "prepared":
            return self._after_receipt(member, now)
        if part is None and self._wants(member, now) == "local":
            round_ = self._open_round(now, fresh=self._took_part(member))
            part = self._begin(member, round_, "local", self._offers["local"], now)
        if part is None or part.committing:
            return None
        manifest = part.round.target.manifest
        tensors = () if member.has_plan == manifest.plan else part.round.target.tensors
        return Instruction(
            "receive", part.round.number, manifest, tensors,
            part.transport, part.address, part.rank, part.world_size, part.generation, max(0.1, part.deadline - now),
            self.committed,
        )  # fmt: skip

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
        part.committing = True
        return Instruction("commit", part.round.number, version=manifest.version)

    def wait(self, name: str) -> Instruction:
        """The answer to a poll that was held for its whole time."""
        member = self.members.get(name)
        return Instruction("wait", version=self.committed, detail=self.why(member) if member is not None else "")

    def _wants(self, member: Member, now: float) -> str:
        """The transport that would bring the target to this member now; empty where it needs none or must wait."""
        if self.target is None or member.dead or member.part is not None or self._holds_target(member):
            return ""
        if member.reported == "prepared" or now < member.retry_at or self._mismatch(member):
            return ""
        return self.choose(member)[0]

    def choose(self, member: Member) -> tuple[str, str]:
        """Transport for a member, and why that one; an empty name where none fits."""
        if self.target is None:
            return "", "nothing published"
        mode, host = self.config.transport, self.target.host
        same = member.host == host
        path = self._offers.get("local", "")
        visible = "local" in member.transports and ("local", path) not in member.unusable
        if mode in ("auto", "local") and same and path and visible:
            return "local", f"same host as the publisher ({host})"
        why = f"on {member.host}, publisher on {host}" if not same else "shared memory is not visible to it"
        if mode in ("auto", "collective") and "collective" in member.transports and "collective" in self._offers:
            return "collective", "set by weightsync.transport" if mode == "collective" else why
        return "", f"weightsync.transport = {mode!r} does not reach it: {why}"

    # ------------------------------------------------------------ rounds

    def _took_part(self, member: Member) -> bool:
        return self.current is not None and member.name in self.current.parts

    def _open_round(self, now: float, *, fresh: bool = False) -> Round:
        """The current round; a new one with the same target where that is decided, or has members (with `fresh`)."""
        assert self.target is not None
        if self.current is None or self.current.closed or (fresh and self.current.parts):
            self._numbers += 1
            self.current = self.rounds[self._numbers] = Round(self._numbers, self.target, now)
        return self.current

    def _supersede(self, now: float) -> None:
        self._formation = None
        self.current = None
        for round_ in list(self.rounds.values()):
            round_.state = "superseded"
            self._settle(round_, now)

    def _begin(self, member: Member, round_: Round, transport: str, address: str, now: float) -> Part:
        part = Part(member.name, round_, transport, address, now + self.config.timeout_s)
        member.part = round_.parts[member.name] = part
        round_.state = "transferring"
        return part

    def _fail(self, member: Member, why: str, now: float) -> None:
        """Close the member's part without success."""
        member.error = why
        part, member.part = member.part, None
        if part is not None:
            member.failures += 1
            member.retry_at = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (member.failures - 1))
            part.result = why
            if why.startswith(UNUSABLE):
                member.unusable.add((part.transport, part.address))
            self._settle(part.round, now)

    def _settle(self, round_: Round, now: float) -> None:
        """Decide a round whose parts are all closed, and hand it to the log."""
        if any(not part.result for part in round_.parts.values()) or round_.number not in self.rounds:
            return
        if not round_.closed:
            holders = [member for member in self.members.values() if self._holds_target(member)]
            if not round_.parts and not holders:
                return  # nobody is there yet: it stays open for the first
            done = any(part.committed for part in round_.parts.values()) or not round_.parts
            round_.state = "committed" if done else "failed"
        del self.rounds[round_.number]
        self.finished.append((round_, now))

    def tick(self, *, now: float) -> None:
        """Let deadlines pass."""
        for member in self.members.values():
            if member.part is not None:
                if now >= member.part.deadline:
                    self._fail(member, f"no answer within {self.config.timeout_s:g} s", now)
            elif not member.dead and now - member.last_seen > self.config.member_timeout_s:
                member.dead = True

    # ------------------------------------------------------------ views

    def _holds_target(self, member: Member) -> bool:
        if self.target is None:
            return False
        return (member.version, member.digest) == (self.target.manifest.version, self.target.manifest.digest)

    def state_of(self, member: Member) -> State:
        """Where the member stands."""
        if member.dead:
            return State.DEAD
        if member.part is not None:
            return State.SYNCING
        if self._holds_target(member):
            return State.SERVING
        return State.STALE if member.version >= 0 or self.target is not None else State.JOINING

    def why(self, member: Member) -> str:
        """Why the member is not SERVING; empty where it is."""
        state = self.state_of(member)
        if state is State.SERVING:
            return ""
        if state is State.DEAD:
            return f"silent for more than {self.config.member_timeout_s:g} s; {member.error}".rstrip("; ")
        if reason := self._mismatch(member) or member.error:
            return reason
        return str(state) if state is State.SYNCING else self.choose(member)[1]

    def status(self, *, now: float) -> dict[str, Any]:
        """Everything, as builtin values (`asyncrl status`)."""
        manifest: Manifest | None = self.target.manifest if self.target is not None else None
        return {
            "epoch": self.epoch,
            "version": manifest.version if manifest is not None else -1,
            "digest": manifest.digest if manifest is not None else "",
            "bytes": sum(manifest.bucket_bytes) if manifest is not None else 0,
            "committed": self.committed,
            "round": self.current.number if self.current is not None else 0,
            "round_state": self.current.state if self.current is not None else "",
            "members": {name: self._member_status(member, now) for name, member in self.members.items()},
        }

    def _member_status(self, member: Member, now: float) -> dict[str, Any]:
        transport, reason = self.choose(member)
        return {
            "state": str(self.state_of(member)), "version": member.version, "digest": member.digest,
            "pid": member.pid, "host": member.host, "silent_s": round(now - member.last_seen, 3),
            "why": self.why(member), "transport": transport, "transport_why": reason,
        }  # fmt: skip


def mark(reply: RoundReply) -> str:
    """What `RoundRequest.seen` says of a reply that the publisher has."""
    return hashlib.blake2b(msgspec.msgpack.encode(reply), digest_size=8).hexdigest()
