"""Members of the weight-sync service: registration, reports, silence."""

from __future__ import annotations

from asyncrl.wire import MemberPoll
from weightsync.coordinator.records import HOLDING, Member, SyncState, is_part_error
from weightsync.coordinator.transfers import Transfers

COMPLAINT_S = 1.0  # between two lines of one member in the log
ERROR_CHARS = 1000  # of a member's error: lines of the log repeat it
MOST_WAYS = 32  # transports and encodings of a member
FORGET_S = 3600.0  # preempted generators come back under new names: a dead member is forgotten then


class Membership:
    def __init__(self, state: SyncState, transfers: Transfers) -> None:
        self.state = state
        self.transfers = transfers

    def register(self, message: MemberPoll, now: float) -> Member:
        """The member that polls; a new record for a new process."""
        state = self.state
        member = state.members.get(message.member)
        if member is None or (member.pid, member.host) != (message.pid, message.host):
            if member is not None:
                self.transfers.fail(member, "restarted", now)
            state.grouping.pop(message.member, None)
            member = Member(message.member, message.pid, message.host, message.fingerprint)
            state.members[message.member] = member
        member.last_seen = now
        member.dead = False
        member.transports, member.encodings = message.transports[:MOST_WAYS], message.encodings[:MOST_WAYS]
        member.has_plan, member.relay, member.base = message.has_plan, message.relay, message.base
        return member

    def report(self, member: Member, message: MemberPoll, now: float) -> None:
        """Take the member's report of what it holds."""
        member.order, member.unsure, part, error = message.order, False, member.part, message.error[:ERROR_CHARS]
        if error and is_part_error(message, part):
            self.transfers.fail(member, error, now)
        if message.state == "prepared":
            member.received_digest = message.digest
            if message.version != member.version:  # overwritten in place: it holds nothing until the commit
                member.version, member.digest = message.version, ""
        elif (message.version, message.digest) != (member.version, member.digest) or message.state in (
            "serving",
            HOLDING,
        ):
            self._acknowledge(member, message.version, message.digest, now)
        if message.state == HOLDING:
            self.transfers.release(member, now)
        member.reported, member.round_reported = message.state, message.round
        is_result = part is not None and part.result == error
        if error and not is_result and error != member.complaint and now - member.complained > COMPLAINT_S:
            member.complaint, member.complained = error, now
            self.state.complaints.append((member.name, error))

    def _acknowledge(self, member: Member, version: int, digest: str, now: float) -> None:
        """Record what the member holds; close its part if that is the part's version."""
        state = self.state
        member.version, member.digest = version, digest
        part = member.part
        if part is not None and part.round.target.manifest.version == version:
            if digest == part.round.target.manifest.digest:
                part.committed, part.result = True, digest
                member.error, member.complaint, member.failures = "", "", 0
                member.part, member.last = None, part
                if part.round.target.epoch == state.epoch and not part.route.base:
                    state.committed = max(state.committed, version)
                self.transfers.settle(part.round, now)
            elif part.committing:
                wanted = part.round.target.manifest.digest
                self.transfers.fail(member, f"holds digest {digest[:12]}, not {wanted[:12]}", now)
        self.count_holder(member)
        if state.current is not None and not state.current.parts:
            self.transfers.settle(state.current, now)

    def count_holder(self, member: Member) -> None:
        """Count the target as committed if the member holds it."""
        target = self.state.target
        if target is not None and member.holds(target):
            self.state.committed = max(self.state.committed, target.manifest.version)

    def expire(self, now: float) -> None:
        """Mark silent members as dead; forget those that have been dead for long."""
        state = self.state
        for member in state.members.values():
            silent = now - member.last_seen > state.config.member_timeout_s
            if member.part is None and not member.dead and silent:
                member.dead = True
                state.grouping.pop(member.name, None)
        for member in [one for one in state.members.values() if one.dead and now - one.last_seen > FORGET_S]:
            del state.members[member.name]
