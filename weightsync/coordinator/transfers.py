"""Rounds and the parts of members in them: open, instruct, fail, settle.

In a round each member goes: receive -> (prepared, with the manifest's digest) commit -> ack(version, digest).
"""

from __future__ import annotations

from asyncrl.wire import Instruction
from weightsync.coordinator.records import Member, Part, Round, Route, SyncState, Target
from weightsync.coordinator.routing import UNUSABLE_S
from weightsync.plan.limits import limit_for
from weightsync.transports.base import UNUSABLE

FIRST_PAUSE_S = 0.2  # before a member that failed tries again; doubles
LONGEST_PAUSE_S = 5.0


class Transfers:
    def __init__(self, state: SyncState) -> None:
        self.state = state

    # ------------------------------------------------------------ rounds

    def open_round(self, now: float, *, fresh: bool = False) -> Round:
        """The current round; a new one with the same target if that is decided, takes no more members, or (with
        `fresh`) has members."""
        state = self.state
        assert state.target is not None
        current = state.current
        if current is None or current.closed or now >= current.until or (fresh and current.parts):
            state.current = self._new_round(state.target, now)
            return state.current
        return current

    def open_base_round(self, now: float) -> Round:
        """A separate round for the weights under the target."""
        assert self.state.base is not None
        return self._new_round(self.state.base, now)

    def _new_round(self, target: Target, now: float) -> Round:
        self.state.last_round += 1
        round_ = self.state.rounds[self.state.last_round] = Round(self.state.last_round, target, now)
        return round_

    def supersede(self, now: float) -> None:
        """End the rounds of older targets; rounds of the base continue: it is still needed."""
        state = self.state
        state.formation = None
        state.current = None
        for round_ in [one for one in state.rounds.values() if one.target != state.base]:
            round_.state = "superseded"
            self.settle(round_, now)

    def settle(self, round_: Round, now: float) -> None:
        """Decide a round whose parts are all closed, and hand it to the log."""
        state = self.state
        if any(not part.result for part in round_.parts.values()) or round_.number not in state.rounds:
            return
        if not round_.closed:
            holders = [member for member in state.members.values() if member.holds(state.target)]
            if not round_.parts and not holders:
                return  # it stays open for the first member
            done = any(part.committed for part in round_.parts.values()) or not round_.parts
            round_.state = "committed" if done else "failed"
        if state.formation is not None and state.formation.round is round_:
            state.formation = None  # no member takes what the publisher still sends
        del state.rounds[round_.number]
        state.finished.append((round_, now))

    # ------------------------------------------------------------ parts

    def begin(self, member: Member, round_: Round, route: Route, now: float) -> Part:
        part = Part(member.name, round_, route, now + self._limit_s(round_))
        member.part = round_.parts[member.name] = part
        round_.state = "transferring"
        round_.until = min(round_.until, part.deadline)
        self.state.grouping.pop(member.name, None)
        return part

    def fail(self, member: Member, why: str, now: float) -> None:
        """Close the member's part without success; the same source is not chosen for it again."""
        member.error = why
        part, member.part = member.part, None
        if part is None:
            return
        part.result = why
        if why.startswith(UNUSABLE):
            member.unusable[part.route.transport, part.route.address] = now + UNUSABLE_S
        if part.round.state != "superseded":
            member.failures += 1
            member.retry_at = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (member.failures - 1))
        target = self.state.target
        if target is not None and part.round.target.manifest == target.manifest:
            member.full_only |= bool(part.route.hops)
            if part.route.transport == "stream":
                member.failed_sources.add(part.route.source)
        self.settle(part.round, now)

    def release(self, member: Member, now: float) -> None:
        """Close the part of a member that keeps its version for an evaluation: neither it nor a source has failed."""
        part, member.part = member.part, None
        if part is not None:
            part.result = f"keeps version {member.version} for an evaluation"
            self.settle(part.round, now)

    def expire(self, now: float) -> None:
        """Fail the parts that are past their deadline."""
        for member in self.state.members.values():
            if member.part is not None and now >= member.part.deadline:
                self.fail(member, f"no answer within {self._limit_s(member.part.round):g} s", now)

    def _limit_s(self, round_: Round) -> float:
        return limit_for(self.state.config.timeout_s, sum(round_.target.manifest.bucket_bytes))

    # ------------------------------------------------------------ instructions

    def receive(self, member: Member, now: float) -> Instruction | None:
        """The instruction of the member's open part; None if it has none or works on it."""
        part = member.part
        if part is None or part.committing or member.round_reported == part.round.number:
            return None
        member.unsure = True
        manifest, route = part.round.target.manifest, part.route
        tensors = () if member.has_plan == manifest.plan else part.round.target.tensors
        return Instruction(
            "receive",
            part.round.number,
            manifest,
            tensors,
            route.transport,
            route.address,
            part.rank,
            part.world_size,
            part.generation,
            max(0.1, part.deadline - now),
            self.state.committed,
            hops=route.hops,
            source=route.source,
        )

    def confirm(self, member: Member, now: float) -> Instruction | None:
        """For a member that holds back a whole version: commit, or abort if its part is over."""
        part, committed = member.part, self.state.committed
        if part is None or member.round_reported != part.round.number:
            return Instruction("abort", member.round_reported, version=committed, detail="the round is over")
        manifest = part.round.target.manifest
        older = part.round.target.epoch != self.state.epoch
        if member.received_digest != manifest.digest or older:
            why = "the learner went back" if older else "received another digest"
            self.fail(member, why, now)
            return Instruction("abort", part.round.number, version=committed, detail=why)
        part.whole = part.committing = member.unsure = True
        return Instruction("commit", part.round.number, version=manifest.version)
