"""The state machine of the weight-sync service: one target, members, rounds. No sockets, no clock, no files.

`Rounds` has a `SyncState` and four parts: `Router` chooses routes, `Queries` answers questions, `Transfers` runs
rounds, `Membership` takes reports.

A member:
```
            first poll        target known            instructed            ack with the manifest's digest
   (none) -----------> JOINING ----------> STALE ------------------> SYNCING ---------------------------> SERVING
                          ^                  ^   left out: error,       |                                    |
        any silent member |                  +--- deadline, restart ----+                 new target         |
        -> DEAD, polls ---+                  +---------------------------------------------------------------+
```
A round: preparing -> transferring -> committed | failed (no member got it) | superseded (a newer version came).

Guarantees (searched in tests/model/test_sync_search.py):
1. SERVING means: the member's last report is the target's version with the manifest's digest, and it got no instruction
   since; a late report (an older poll, a process that was replaced) does not count;
2. only a member that reported this round prepared with the manifest's digest gets the instruction to commit;
3. a member that misses `timeout_s` in a round is left out of it with the reason; the others are not held up; a round
   takes no more members after `timeout_s`, so it is decided within twice that;
4. a member that is silent for `member_timeout_s` is DEAD; it comes back by polling; after an hour it is forgotten;
5. a member that joins late, or failed, gets the target in a new round without a new publish (after a growing pause),
   and from another source;
6. a member that already received an older version of the same epoch whole may commit it (progress), then goes on;
7. an older learner epoch is `fenced`; another model is `handshake.mismatch`;
8. collective: the publisher's request forms the group, from the members that are free at that moment; generation
   numbers never repeat; with `auto` no member waits for a group longer than `FORM_S`;
9. a relay serves the target itself, and only readers that it did not fail;
10. a member that lacks the base of an adapter gets that in a separate round, then the adapter;
11. a member that reports that it keeps its version for an evaluation ("holding") gets nothing until it reports
    otherwise, then the target; it is not a failure, and the others are not held up;
12. an error that a member reports outside of its part changes only what is displayed (`complaint`, `complaints`).

Example (timeout_s 30, member_timeout_s 20, local): t=0 publish v1 while a and b poll: round 1, both receive. t=1 a is
prepared: commit; its ack makes it SERVING. b is stopped: t=30 round 1 is committed with a, b is left out ("no answer
within 30 s") and, silent for longer than 20 s, DEAD. t=60 b polls again: round 2 carries v1 to b alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import Fenced, HandshakeError, WorkError
from asyncrl.wire import Instruction, MemberPoll, Publish, Published, RoundReply, RoundRequest, Tensor
from weightsync.coordinator.membership import Membership
from weightsync.coordinator.queries import FORMING, GROUPS, WANTED, Queries, reply_digest
from weightsync.coordinator.records import Formation, Publisher, SyncState, Target
from weightsync.coordinator.routing import Router, check_hops, common_hops
from weightsync.coordinator.transfers import Transfers
from weightsync.plan.buckets import check_layout


@dataclass(frozen=True)
class Parts:
    """The classes that `Rounds` is made of. Tests replace one to see that they notice a wrong rule."""

    router: type[Router] = Router
    queries: type[Queries] = Queries
    transfers: type[Transfers] = Transfers
    membership: type[Membership] = Membership


class Rounds:
    """One service. `state` is given to continue from a copy."""

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        generation: int,
        parts: Parts | None = None,
        state: SyncState | None = None,
    ) -> None:
        self.parts = parts or Parts()
        self.state = state or SyncState(config, generation)
        self.router = self.parts.router()
        self.queries = self.parts.queries(self.state, self.router)
        self.transfers = self.parts.transfers(self.state)
        self.membership = self.parts.membership(self.state, self.transfers)

    # ------------------------------------------------------------ publisher

    def hello(self, name: str, publisher: Publisher) -> None:
        """A learner introduces itself; needed before it publishes."""
        self.state.publishers[name] = publisher

    def publish(self, message: Publish, *, now: float) -> Published:
        """Take a new target, or new offers for the current one. Raises Fenced on an older epoch."""
        state = self.state
        self._fence(message.epoch)
        state.publisher_seen = now
        manifest = message.manifest
        tensors = message.tensors or (state.layout[1] if state.layout[0] == manifest.plan else ())
        publisher = state.publishers.get(message.publisher)
        base_tensors = self._base_tensors(message)
        if publisher is None or not tensors or (message.base is not None and not base_tensors):
            return Published(0, needs_tensors=True)
        check_layout(manifest, tensors)
        check_hops(manifest, message.hops)
        state.layout = (manifest.plan, tensors)
        base = self._base_target(message, base_tensors, publisher.host)
        old = state.target
        if old is not None and state.current is not None and (old.epoch, old.manifest) == (message.epoch, manifest):
            self._take_offers(message, base)
            return Published(state.current.number)
        if old is not None and old.epoch == message.epoch and manifest.version < old.manifest.version:
            raise WorkError("sync.failed", f"version {manifest.version} published after {old.manifest.version}")
        if message.epoch > state.epoch:
            state.committed = -1  # a learner that went back may publish lower versions
        state.epoch = message.epoch
        self._take_offers(message, base)
        self._set_target(Target(message.epoch, manifest, tensors, message.publisher, publisher.host), now)
        assert state.current is not None
        return Published(state.current.number)

    def _set_target(self, target: Target, now: float) -> None:
        state = self.state
        state.target = target
        self.transfers.supersede(now)
        current = self.transfers.open_round(now)
        for member in state.members.values():
            member.failed_sources.clear()
            member.full_only = False
            self.membership.count_holder(member)
        state.grouping = self.queries.group_candidates(now) if state.offers.keys() & set(GROUPS) else {}
        self.transfers.settle(current, now)

    def _base_tensors(self, message: Publish) -> tuple[Tensor, ...]:
        """The layout of the base, from this message or an earlier one; empty if unknown."""
        if message.base is None:
            return ()
        base = self.state.base
        known = base is not None and base.manifest.plan == message.base.manifest.plan
        return message.base.tensors or (base.tensors if known and base is not None else ())

    @staticmethod
    def _base_target(message: Publish, tensors: tuple[Tensor, ...], host: str) -> Target | None:
        """The weights under an adapter as a target. Raises `sync.plan` or `sync.failed` if they are not its base."""
        if message.base is None:
            return None
        manifest = message.base.manifest
        if (manifest.encoding, manifest.digest) != ("full", message.manifest.base):
            raise WorkError("sync.failed", f"version {manifest.version} is not the base of {message.manifest.version}")
        check_layout(manifest, tensors)
        return Target(message.epoch, manifest, tensors, message.publisher, host)

    def _take_offers(self, message: Publish, base: Target | None) -> None:
        state = self.state
        state.offers, state.hops = message.offers, message.hops
        state.base, state.base_offers = base, message.base.offers if message.base is not None else {}

    def ask(self, message: RoundRequest, *, now: float) -> RoundReply | None:
        """The answer to the publisher; None if it has it already (hold the request).

        The request lets a collective group form. State "unknown" asks the publisher to publish again.
        """
        state = self.state
        self._fence(message.epoch)
        if state.target is None or state.current is None or message.epoch > state.epoch:
            return RoundReply(0, "unknown")
        state.publisher_seen = now
        formation = state.formation
        if formation is not None and message.transport_done and message.round == formation.round.number:
            if message.transport_done != "sent":
                formation.round.detail = message.transport_done
            state.formation = None  # the members' reports decide; others may form the next group
        reply = self.queries.reply(now, rendezvous=self._form(now))
        return None if reply_digest(reply) == message.seen else reply

    def _fence(self, epoch: int) -> None:
        if epoch < self.state.epoch:
            what = f"learner epoch {epoch}; epoch {self.state.epoch} has published"
            raise Fenced("fenced", what, where="weightsync")

    def _form(self, now: float) -> str:
        """Form a collective group if members wait for one; the rendezvous for the publisher."""
        state = self.state
        address = next((state.offers[name] for name in GROUPS if name in state.offers), "")
        if state.formation is not None:
            return address
        if self.queries.awaits_group():
            return FORMING
        scene = self.queries.scene(now)
        lack = [member for member in state.members.values() if self.queries.needs_target(member, now)]
        routes = [(member, self.router.choose(member, scene)) for member in lack]
        waiting = [(member, route) for member, route in routes if route.transport in GROUPS and route.address]
        if not waiting:
            return WANTED if any(route.transport and not route.address for _, route in routes) else ""
        state.generation += 1
        bases = [(member, route) for member, route in waiting if route.base]  # one group, one version: the base first
        waiting = bases or waiting
        current = self.transfers.open_base_round(now) if bases else self.transfers.open_round(now, fresh=True)
        ranks = {member.name: rank for rank, (member, _) in enumerate(waiting, start=1)}
        hops = common_hops([route.hops for _, route in waiting])
        state.formation = Formation(current, state.generation, ranks, hops)
        for member, route in waiting:
            part = self.transfers.begin(member, current, replace(route, address=address, hops=hops), now)
            part.rank, part.world_size, part.generation = ranks[member.name], len(ranks) + 1, state.generation
        return address

    # ------------------------------------------------------------ members

    def poll(self, message: MemberPoll, *, now: float) -> Instruction | None:
        """Take a member's report; its next instruction, None while there is none (hold the poll)."""
        if self.queries.is_late(message):
            return None
        member = self.membership.register(message, now)
        if not message.order or message.order != member.order:  # else it asks again: the answer was lost
            self.membership.report(member, message, now)
        if mismatch := self.queries.mismatch(member):
            raise HandshakeError("handshake.mismatch", mismatch, where="weightsync")
        return self.instruct(member.name, now=now)

    def instruct(self, name: str, *, now: float) -> Instruction | None:
        """The member's next instruction; None while there is none. Called again while its poll is held."""
        member = self.state.members[name]
        if member.reported == "prepared":
            return self.transfers.confirm(member, now)
        if self.queries.needs_target(member, now):
            route = self.router.choose(member, self.queries.scene(now))
            if not route.address or route.transport in GROUPS:
                return None
            if route.base:
                round_ = self.transfers.open_base_round(now)
            else:
                round_ = self.transfers.open_round(now, fresh=self.queries.is_in_current(member))
            self.transfers.begin(member, round_, route, now)
        return self.transfers.receive(member, now)

    def tick(self, *, now: float) -> None:
        self.state.grouping = {name: until for name, until in self.state.grouping.items() if now < until}
        self.transfers.expire(now)
        self.membership.expire(now)
