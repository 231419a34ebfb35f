"""The world around the weight-sync state machine: receivers, a learner and a network, as moves that a search can make.

The real `Rounds` decides; around it stands what `weightsync.main`,
`weightsync.receiver.receiver` and `weightsync.publisher.publisher` do, without bytes: a member holds a version and a
digest, or nothing.
Moves with a cost are failures (a message lost, doubled or delayed, a crash, wrong bytes, a failed transfer); the others
are what healthy parties do in any order. Time passes in seconds, at any moment; a copy of a
message is late by no more than `member_timeout_s`. Every promise is checked at every move,
against what the processes really hold, which the service never sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import AsyncRLError
from asyncrl.wire import BaseOffer, Hop, Instruction, Manifest, MemberPoll, Publish, RoundRequest
from weightsync.coordinator.queries import WANTED
from weightsync.coordinator.records import Formation, Member, Part, Publisher, Round, Route, State, SyncState
from weightsync.coordinator.rounds import Parts, Rounds
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import version_digest

PLAN = plan_buckets([TensorSpec("w", "F32", (100,))], bucket_bytes=400)
HOLD = ("local", "stream", "collective", "disk", "direct")
LED = ("collective", "auto", "direct")  # transports with groups
TIMEOUT_S, SILENT_S = 1.0, 1.0


class Violation(Exception):
    """A promise is broken."""


class Case(NamedTuple):
    """One small system. `faults`: how many failures in all, of the kinds `kinds` (all where empty)."""

    transport: Any = "stream"
    members: int = 2
    versions: int = 2
    faults: int = 1
    kinds: tuple[str, ...] = ()
    fanout: int = 1
    delta: bool = False
    in_place: bool = False
    says_dirty: bool = False  # in place: says so in a poll of its own before the first byte
    spread: bool = False  # members on hosts of their own
    adapter: bool = False  # versions are adapters of `BASE`, which the learner offers beside them

    def __str__(self) -> str:
        words = [f"{self.transport}", f"{self.members} members", f"{self.versions} versions", f"{self.faults} faults"]
        words += [word for word in ("delta", "in_place", "says_dirty", "spread", "adapter") if getattr(self, word)]
        return " ".join([*words, *([f"fanout {self.fanout}"] if self.transport == "stream" else []), *self.kinds])


class Process(NamedTuple):
    """A receiver and its engine. `version`, `digest`: what the model really holds."""

    pid: int = 1
    alive: bool = True
    version: int = -1
    digest: str = ""
    base: str = ""  # digest of the whole weights that it holds
    job: Instruction | None = None  # it receives
    pending: Manifest | None = None
    round: int = 0
    error: str = ""
    poll: MemberPoll | None = None  # asked, not answered
    held: bool = False  # the service has the question
    answer: Instruction | None = None  # on its way
    plan: str = ""
    keeps: bool = False  # an evaluation needs its version: its next poll says so, and it follows no instruction


class Learner(NamedTuple):
    """The publisher. `staged`: the two newest versions; `told`: the service took the newest; `offered`: members that
    missed its group can have it as well (`direct`)."""

    alive: bool = True
    epoch: int = 1
    staged: tuple[Manifest, ...] = ()
    told: bool = False
    round: int = 0
    leading: int = 0  # generation of the group that it sends to
    sent: int = 0
    offered: bool = False


class Node(NamedTuple):
    """One state of everything."""

    rounds: Rounds
    processes: dict[str, Process]
    learner: Learner
    copies: tuple[MemberPoll, ...]
    now: float
    faults: int
    failed: frozenset[tuple[str, str, str]] = frozenset()  # reader, source, digest: it failed once


class Move(NamedTuple):
    """A transition. `cost` 1: a failure; `good`: what healthy parties do."""

    label: str
    node: Node
    good: bool


def manifest_of(version: int, epoch: int, *, base: str = "") -> Manifest:
    digests = (f"v{version}e{epoch}",)
    whole = version_digest(digests, base=base)
    return Manifest(version, PLAN.digest, PLAN.bucket_bytes, digests, whole, "adapter" if base else "full", base)


BASE = manifest_of(0, 0)


def watched(parts: Parts) -> Parts:
    """The same parts; at the moment at which a relay is chosen it must serve the target."""

    class Watched(parts.transfers):  # type: ignore[misc, name-defined]
        def begin(self, member: Member, round_: Round, route: Route, now: float) -> Part:
            source = self.state.members.get(route.source)
            queries = parts.queries(self.state, parts.router())
            if source is not None and queries.state_for(source) is not State.SERVING:
                raise Violation(f"{source.name} relays, but is {queries.state_for(source)}")
            part: Part = super().begin(member, round_, route, now)
            return part

    return replace(parts, transfers=Watched)


class World:
    """The moves of one case with one kind of state machine."""

    def __init__(self, case: Case, parts: Parts | None = None) -> None:
        self.case = case
        self.parts = watched(parts or Parts())
        self.config = WeightSyncConfig(
            transport=case.transport, timeout_s=TIMEOUT_S, member_timeout_s=SILENT_S, relay_fanout=case.fanout
        )
        self.names = tuple("abcd"[: case.members])
        self.finished: list[tuple[int, str]] = []

    def start(self) -> Node:
        rounds = Rounds(self.config, generation=100, parts=self.parts)
        return Node(rounds, dict.fromkeys(self.names, Process()), Learner(), (), 100.0, self.case.faults)

    def host(self, name: str) -> str:
        return f"host-{name}" if self.case.spread else "host"

    # ------------------------------------------------------------ moves

    def moves(self, node: Node) -> Iterator[Move]:
        for name in self.names:
            yield from self._process_moves(node, name)
        yield from self._learner_moves(node)
        for number, copy in enumerate(node.copies):
            rest = node.copies[:number] + node.copies[number + 1 :]
            yield Move(f"late copy of {copy.member}'s poll {copy.order}", self._copy(node, copy, rest), True)
        yield Move("1 s passes", self.tick(node), True)
        if self._may("service", node):
            yield Move("service killed", self._kill_service(node), False)

    def _may(self, kind: str, node: Node) -> bool:
        return node.faults > 0 and (not self.case.kinds or kind in self.case.kinds)

    def _process_moves(self, node: Node, name: str) -> Iterator[Move]:
        process = node.processes[name]
        if "hold" in self.case.kinds and node.faults and process.version >= 0 and not (process.job or process.keeps):
            kept = process._replace(keeps=True, pending=None, answer=None, poll=None, held=False)
            yield Move(f"{name} keeps its version", self._set(node, name, kept, fault=True), False)
        if not process.alive:
            yield Move(f"{name} starts", self._set(node, name, Process(pid=process.pid + 1)), True)
            return
        if self._may("crash", node):
            dead = Process(pid=process.pid, alive=False)
            yield Move(f"{name} killed", self._set(node, name, dead, fault=True), False)
        if process.answer is not None:
            yield Move(f"{name} hears {process.answer.action}", self.hear(node, name), True)
            if self._may("loss", node):
                lost = process._replace(answer=None)
                yield Move(f"{name}'s answer is lost", self._set(node, name, lost, fault=True), False)
            if self._may("spoil", node) and process.answer.action == "commit":
                yield Move(f"{name} commits wrong bytes", self.hear(node, name, spoil=True), False)
        elif process.job is not None:
            yield from self._job_moves(node, name, process)
        elif not process.held or node.rounds.state.members[name].last_seen < node.now:
            yield from self._poll_moves(node, name, process)

    def _poll_moves(self, node: Node, name: str, process: Process) -> Iterator[Move]:
        yield Move(f"{name} polls", self.poll(node, name), True)
        if process.poll is not None and not process.held:
            yield Move(f"{name} asks again", self.poll(node, name, again=True), True)
        if self._may("double", node) and not node.copies:
            yield Move(f"{name} polls, doubled", self.poll(node, name, copy=True), False)
            yield Move(f"{name} polls, delayed", self.poll(node, name, copy=True, lost=True), False)

    def _job_moves(self, node: Node, name: str, process: Process) -> Iterator[Move]:
        possible = self.possible(node, name)
        if possible:
            yield Move(f"{name} has received", self.received(node, name), True)
        if not possible or self._may("transfer", node):
            yield Move(f"{name}'s transfer fails", self.fail(node, name, fault=possible), not possible)
        if possible and self._may("digest", node):
            yield Move(f"{name} has received wrong bytes", self.received(node, name, wrong=True), False)

    def _learner_moves(self, node: Node) -> Iterator[Move]:
        learner = node.learner
        if not learner.alive:
            yield Move("learner starts", self.start_learner(node), True)
            return
        first = int(self.case.adapter)  # the base is version 0
        newest = learner.staged[-1].version if learner.staged else first - 1
        if newest + 1 < self.case.versions + first:
            base = BASE.digest if self.case.adapter else ""
            more = (*learner.staged[-1:], manifest_of(newest + 1, learner.epoch, base=base))
            yield Move(f"publish {newest + 1}", self._learn(node, staged=more, told=False, offered=False), False)
        if learner.staged and not learner.told:
            yield Move("announce", self.announce(node), True)
        if self.case.transport in LED and learner.told:
            if learner.leading:
                yield Move("learner has sent", self.ask(node, done="sent"), True)
            else:
                yield Move("learner asks", self.ask(node), True)
            if learner.leading and self._may("transfer", node):
                yield Move("sending fails", self.ask(node, done="failed: x", fault=True), False)
        if self._may("learner", node):
            yield Move("learner killed", self._learn(node, alive=False, leading=0, sent=0, fault=True), False)

    # ------------------------------------------------------------ processes

    def _fork(self, node: Node) -> Node:
        return node._replace(rounds=clone(node.rounds), processes=dict(node.processes))

    def _set(self, node: Node, name: str, process: Process, *, fault: bool = False) -> Node:
        processes = dict(node.processes)
        processes[name] = process
        return node._replace(processes=processes, faults=node.faults - fault)

    def poll(self, node: Node, name: str, *, again: bool = False, copy: bool = False, lost: bool = False) -> Node:
        node = self._fork(node)
        process = node.processes[name]
        message = process.poll if again else None
        if message is None:
            message = self._message(node, name, process)
        node.processes[name] = process._replace(poll=message, held=False, keeps=False)
        if copy:
            node = node._replace(copies=(*node.copies, message), faults=node.faults - 1)
        return node if lost else self._deliver(node, message)

    def _message(self, node: Node, name: str, process: Process) -> MemberPoll:
        known = node.rounds.state.members.get(name)
        orders = [copy.order for copy in node.copies if copy.member == name]
        orders += [process.poll.order] if process.poll is not None else []
        orders += [known.order] if known is not None else []
        pending = process.pending
        state = "prepared" if pending is not None else "serving" if process.version >= 0 else "joining"
        state = "holding" if process.keeps else state
        return MemberPoll(
            name,
            process.pid,
            self.host(name),
            "f",
            state,
            process.version,
            pending.digest if pending is not None else process.digest,
            process.round,
            2.0,
            HOLD,
            process.plan,
            process.error,
            self._encodings(),
            f"at-{name}-{process.pid}" if process.version >= 0 else "",
            max(orders, default=0) + 1,
            process.base,
        )

    def _encodings(self) -> tuple[str, ...]:
        if self.case.adapter:
            return ("full", "adapter")
        return ("full", "delta") if self.case.delta and not self.case.in_place else ("full",)

    def _deliver(self, node: Node, message: MemberPoll) -> Node:
        """What `Service._hold_poll` does with a question."""
        name, rounds = message.member, node.rounds
        if rounds.queries.is_late(message):
            return self.advance(node)
        process = node.processes[name]
        asked = process.poll
        theirs = process.alive and asked is not None and (asked.order, asked.pid) == (message.order, message.pid)
        if process.held and not theirs:
            node.processes[name] = process._replace(held=False, answer=Instruction("wait"))
        known = rounds.state.members.get(name)
        newest = known.order if known is not None and not known.dead else 0
        answer = rounds.poll(message, now=node.now)
        if message.order < newest:
            raise Violation(f"poll {message.order} of {name} counts as its last word, {newest} was heard before")
        if answer is not None:
            self.check_instruction(node, name, answer, message)
        if theirs and process.answer is None:
            node.processes[name] = process._replace(held=answer is None, answer=answer)
        return self.advance(node)

    def _copy(self, node: Node, copy: MemberPoll, rest: tuple[MemberPoll, ...]) -> Node:
        return self._deliver(self._fork(node)._replace(copies=rest), copy)

    def advance(self, node: Node) -> Node:
        """What `Service._advance` does after every event."""
        rounds = node.rounds
        rounds.tick(now=node.now)
        for name in self.names:
            process = node.processes[name]
            if process.held:
                answer = rounds.instruct(name, now=node.now)
                if answer is not None:
                    assert process.poll is not None
                    self.check_instruction(node, name, answer, process.poll)
                    node.processes[name] = process._replace(held=False, answer=answer)
        for round_, _ in rounds.state.finished:
            self.check_finished(round_)
        rounds.state.finished.clear()
        rounds.state.complaints.clear()
        return node

    def hear(self, node: Node, name: str, *, spoil: bool = False) -> Node:
        """What `Receiver._execute` does."""
        process = node.processes[name]
        answer = process.answer
        assert answer is not None
        process = process._replace(answer=None, poll=None, held=False, error="")
        if answer.action == "receive" and self.case.says_dirty and process.version >= 0:
            process = process._replace(version=-1, digest="", base="")
        elif answer.action == "receive" and answer.manifest is not None:
            process = process._replace(job=answer, round=answer.round, plan=answer.manifest.plan)
            if self.case.in_place:
                process = process._replace(version=-1, digest="", base="")
        elif answer.action == "commit" and process.pending is not None:
            if answer.round != process.round or answer.version != process.pending.version:
                raise Violation(f"{name} is told to commit {answer.version} in round {answer.round}, it holds another")
            digest = "bad" if spoil else process.pending.digest
            base = process.pending.base or digest
            process = process._replace(version=process.pending.version, digest=digest, base=base, pending=None)
        elif answer.action == "abort":
            process = process._replace(pending=None)
        return self._set(node, name, process, fault=spoil)

    def possible(self, node: Node, name: str) -> bool:
        """Whether the source of a transfer can deliver."""
        job = node.processes[name].job
        assert job is not None and job.manifest is not None
        learner = node.learner
        if job.manifest.base and job.manifest.base != node.processes[name].base:
            return False  # its engine refuses
        if job.transport in ("collective", "direct"):
            return learner.alive and job.generation in (learner.leading, learner.sent)
        if job.source == "learner":
            return learner.alive and job.manifest in (*learner.staged, BASE)
        source = node.processes[job.source]
        here = job.address == f"at-{job.source}-{source.pid}"
        return source.alive and here and (source.version, source.digest) == (job.manifest.version, job.manifest.digest)

    def received(self, node: Node, name: str, *, wrong: bool = False) -> Node:
        process = node.processes[name]
        assert process.job is not None and process.job.manifest is not None
        manifest = process.job.manifest
        if wrong:
            manifest = Manifest(manifest.version, manifest.plan, manifest.bucket_bytes, ("bad",), "bad")
            node = self._note(node, name, process.job)
        return self._set(node, name, process._replace(job=None, pending=manifest), fault=wrong)

    def fail(self, node: Node, name: str, *, fault: bool) -> Node:
        process = node.processes[name]
        assert process.job is not None
        node = self._note(node, name, process.job)
        return self._set(node, name, process._replace(job=None, error="failed"), fault=fault)

    def _note(self, node: Node, name: str, job: Instruction) -> Node:
        """A relay that failed a reader must not be its source again, once the service has heard of it."""
        if job.transport != "stream" or job.source == "learner":
            return node
        assert job.manifest is not None
        return node._replace(
            failed=node.failed | {(f"{name}-{node.processes[name].pid}", job.source, job.manifest.digest)}
        )

    # ------------------------------------------------------------ learner, service, time

    def _learn(self, node: Node, *, fault: bool = False, **changes: Any) -> Node:
        return node._replace(learner=node.learner._replace(**changes), faults=node.faults - fault)

    def start_learner(self, node: Node) -> Node:
        """It goes back to its last checkpoint: the version before the newest, where there is one."""
        old = node.learner
        return node._replace(learner=Learner(epoch=old.epoch + 1, staged=old.staged[:1]))

    def announce(self, node: Node) -> Node:
        node = self._fork(node)
        learner, rounds = node.learner, node.rounds
        newest = learner.staged[-1]
        hops = ()
        if self.case.delta and len(learner.staged) == 2:
            base = learner.staged[0]
            hops = (Hop(base.version, base.digest, (8,)),)
        rounds.hello("learner", Publisher("host", "f"))
        if rounds.state.target is None or (rounds.state.target.epoch, rounds.state.target.manifest) != (
            learner.epoch,
            newest,
        ):
            node = node._replace(failed=frozenset())  # another version: another chance
        ways = dict.fromkeys(HOLD, f"learner-{learner.epoch}")
        if self.case.transport == "direct":
            ways = {name: way if name == "direct" or learner.offered else "" for name, way in ways.items()}
        base = BaseOffer(BASE, ways, PLAN.tensors) if self.case.adapter else None
        published = rounds.publish(
            Publish("learner", learner.epoch, newest, ways, PLAN.tensors, hops, base), now=node.now
        )
        node = self._learn(node, told=True, round=published.round)
        return self.advance(node)

    def ask(self, node: Node, *, done: str = "", fault: bool = False) -> Node:
        node = self._fork(node)
        learner = node.learner
        reply = node.rounds.ask(RoundRequest(learner.epoch, learner.round, 0.0, "", done), now=node.now)
        assert reply is not None
        if done:
            node = self._learn(node, leading=0, sent=learner.leading if done == "sent" else 0, fault=fault)
        if reply.state == "unknown":
            node = self._learn(node, told=False)
        elif reply.ranks:
            node = self._learn(node, leading=reply.generation, round=reply.round)
        elif reply.rendezvous == WANTED and not learner.offered:
            node = self._learn(node, told=False, offered=True)
        return self.advance(node)

    def _kill_service(self, node: Node) -> Node:
        """The next one knows nothing; what was on the way to or from the old one is gone with its connections."""
        generation = int(node.rounds.state.generation) + 100
        processes = {name: one._replace(held=False, answer=None) for name, one in node.processes.items()}
        rounds = Rounds(self.config, generation=generation, parts=self.parts)
        rounds.state.last_round = node.rounds.state.last_round
        return node._replace(rounds=rounds, processes=processes, copies=(), faults=node.faults - 1, failed=frozenset())

    def tick(self, node: Node) -> Node:
        node = self._fork(node)._replace(now=node.now + 1.0)
        late = {name for name, one in node.rounds.state.members.items() if node.now - one.last_seen > SILENT_S}
        node = node._replace(copies=tuple(copy for copy in node.copies if copy.member not in late))
        if node.learner.alive and node.learner.told and self.case.transport not in LED:
            return self.ask(node)  # it asks all the time
        return self.advance(node)

    # ------------------------------------------------------------ what must hold

    def check_instruction(self, node: Node, name: str, answer: Instruction, message: MemberPoll) -> None:
        rounds, process = node.rounds, node.processes[name]
        target = rounds.state.target
        if message.state == "holding" and answer.action in ("receive", "commit"):
            raise Violation(f"{name} keeps its version and is told to {answer.action}")
        if answer.action == "commit":
            part = rounds.state.members[name].part
            if part is None:
                raise Violation(f"{name} is told to commit, it has no part in a round")
            manifest = part.round.target.manifest
            right = (message.state, message.round, message.digest) == ("prepared", answer.round, manifest.digest)
            if not right or answer.version != manifest.version:
                raise Violation(f"{name} is told to commit what it has not reported prepared with the digest")
            if part.round.target.epoch != rounds.state.epoch:
                raise Violation(f"{name} is told to commit a version of an older learner")
        if answer.action != "receive":
            return
        assert answer.manifest is not None and target is not None
        if answer.hops and process.alive and process.pid == message.pid and process.job is None:
            holds = (process.version, process.digest)
            if (answer.hops[0].base, answer.hops[0].base_digest) != holds:
                raise Violation(f"{name} gets hops from {answer.hops[0]}, it holds {holds}")
        ready = process.alive and process.pid == message.pid and process.job is None
        if ready and answer.manifest.base not in ("", process.base):
            raise Violation(f"{name} gets an adapter of {answer.manifest.base}, it holds {process.base or 'none'}")
        if answer.manifest == BASE and answer.source != "learner":
            raise Violation(f"{name} gets the base from {answer.source}")
        if answer.transport == "stream":
            self._check_source(node, name, answer)

    def _check_source(self, node: Node, name: str, answer: Instruction) -> None:
        rounds = node.rounds
        pulls = [
            member.name
            for member in rounds.state.members.values()
            if member.part is not None
            and not member.part.whole
            and (member.part.route.transport, member.part.route.source) == ("stream", answer.source)
        ]
        if self.case.fanout and len(pulls) > self.case.fanout:
            raise Violation(f"{answer.source} serves {pulls} at once")
        if answer.source == "learner":
            return
        assert answer.manifest is not None
        key = (f"{name}-{node.processes[name].pid}", answer.source, answer.manifest.digest)
        member = rounds.state.members[name]
        fresh = member.part is not None and member.part.deadline == node.now + TIMEOUT_S
        if fresh and key in node.failed:
            raise Violation(f"{name} is sent to {answer.source} again, which failed it for this version")

    def check_state(self, node: Node) -> None:
        """Promises about every state."""
        rounds = node.rounds
        for name, member in rounds.state.members.items():
            self._check_member(node, name, member)
        for number, round_ in rounds.state.rounds.items():
            if number != round_.number or (round_.parts and all(part.result for part in round_.parts.values())):
                raise Violation(f"round {number} is over and not decided")
            if round_.parts and node.now >= round_.until + TIMEOUT_S:
                raise Violation(f"round {number} is open for twice its time")
        if rounds.state.target is not None and rounds.state.committed > rounds.state.target.manifest.version:
            raise Violation("committed above the target")

    def _check_member(self, node: Node, name: str, member: Member) -> None:
        rounds, process = node.rounds, node.processes[name]
        if member.part is not None and (member.part.result or node.now >= member.part.deadline):
            raise Violation(f"the part of {name} is open beyond its deadline")
        if rounds.queries.state_for(member) is not State.SERVING:
            return
        assert rounds.state.target is not None
        proved = (rounds.state.target.manifest.version, rounds.state.target.manifest.digest)
        if (member.version, member.digest) != proved:
            raise Violation(f"{name} is SERVING with {member.version} {member.digest}")
        if process.alive and member.pid == process.pid and (process.version, process.digest) != proved:
            raise Violation(f"{name} is SERVING {proved}, its model holds {process.version} {process.digest}")

    def check_finished(self, round_: Round) -> None:
        if not round_.closed or any(not part.result for part in round_.parts.values()):
            raise Violation(f"round {round_.number} is logged before its end")
        for name, part in round_.parts.items():
            if part.committed and part.result != round_.target.manifest.digest:
                raise Violation(f"round {round_.number} counts {name} as committed with {part.result}")

    def complete(self, node: Node, *, learner: bool = True) -> bool:
        """Everybody lives and serves the newest version."""
        rounds, target = node.rounds, node.rounds.state.target
        if target is None or (learner and not self._learner_done(node)):
            return False
        proved = (target.manifest.version, target.manifest.digest)
        return all(
            one.alive
            and (one.version, one.digest) == proved
            and one.job is None
            and name in rounds.state.members
            and rounds.queries.state_for(rounds.state.members[name]) is State.SERVING
            for name, one in node.processes.items()
        )

    def _learner_done(self, node: Node) -> bool:
        learner, target = node.learner, node.rounds.state.target
        return learner.alive and learner.told and target is not None and target.manifest == learner.staged[-1]

    def heal(self, node: Node, *, limit: int, learner: bool = True) -> tuple[int, Node]:
        """What healthy parties do, all at their pace, from here on; the seconds until everybody serves, -1: not within
        `limit`. Without `learner` it stays dead."""
        node = node._replace(faults=0)
        for second in range(limit):
            for _ in range(6):
                node = self._everyone(node, learner=learner)
            if self.complete(node, learner=learner):
                return second, node
            node = self.tick(node)
            self.check_state(node)
        return -1, node

    def _everyone(self, node: Node, *, learner: bool) -> Node:
        order = list(self._learner_moves(node)) if learner else []
        for move in order:
            if move.good:
                node = move.node
                break
        while node.copies:
            node = self._copy(node, node.copies[0], node.copies[1:])
        for name in self.names:
            good = [move for move in self._process_moves(node, name) if move.good]
            if good:
                node = good[-1].node if good[-1].label.endswith("asks again") else good[0].node
        self.check_state(node)
        return node


# ---------------------------------------------------------------- copies and keys


def clone(rounds: Rounds) -> Rounds:
    """A copy that shares nothing that changes."""
    old = rounds.state
    new = object.__new__(SyncState)
    new.__dict__.update(old.__dict__)
    copies: dict[int, Round] = {}
    for member in old.members.values():
        if member.part is not None:
            _round(copies, member.part.round)
    new.rounds = {number: _round(copies, round_) for number, round_ in old.rounds.items()}
    new.current = _round(copies, old.current) if old.current is not None else None
    new.members = {name: _member(copies, member) for name, member in old.members.items()}
    new.finished, new.complaints = list(old.finished), list(old.complaints)
    new.publishers = dict(old.publishers)
    new.grouping = dict(old.grouping)
    formation = old.formation
    if formation is not None:
        new.formation = Formation(
            _round(copies, formation.round), formation.generation, formation.ranks, formation.hops
        )
    return Rounds(old.config, generation=old.generation, parts=rounds.parts, state=new)


def _member(copies: dict[int, Round], member: Member) -> Member:
    new = object.__new__(Member)
    new.__dict__.update(member.__dict__)
    new.unusable, new.failed_sources, new.last = dict(member.unusable), set(member.failed_sources), None
    if member.part is not None:
        new.part = _round(copies, member.part.round).parts[member.name]
    return new


def _round(copies: dict[int, Round], round_: Round) -> Round:
    if round_.number not in copies:
        new = object.__new__(Round)
        new.__dict__.update(round_.__dict__)
        new.parts = {}
        for name, part in round_.parts.items():
            twin = object.__new__(Part)
            twin.__dict__.update(part.__dict__)
            twin.round = new
            new.parts[name] = twin
        copies[round_.number] = new
    return copies[round_.number]


def key(node: Node) -> tuple[Any, ...]:
    """What makes two states different: times relative to now, rounds and groups by their order."""
    rounds, now = node.rounds, node.now
    numbers = {
        0,
        *rounds.state.rounds,
        rounds.state.current.number if rounds.state.current is not None else 0,
        node.learner.round,
    }
    groups = {0, node.learner.leading, node.learner.sent}
    for process in node.processes.values():
        numbers.add(process.round)
        for one in (process.job, process.answer):
            if one is not None:
                numbers.add(one.round)
                groups.add(one.generation)
        if process.poll is not None:
            numbers.add(process.poll.round)
    for copy in node.copies:
        numbers.add(copy.round)
    for member in rounds.state.members.values():
        numbers.add(member.round_reported)
        if member.part is not None:
            groups.add(member.part.generation)
    formation = rounds.state.formation
    if formation is not None:
        groups.add(formation.generation)
        numbers.add(formation.round.number)
    rank = {number: at for at, number in enumerate(sorted(numbers))}
    group = {number: at for at, number in enumerate(sorted(groups))}
    orders: dict[str, list[int]] = {}
    return (
        tuple(_member_key(name, node, rank, group, orders) for name in node.processes),
        tuple(
            (
                rank[number],
                round_.state,
                round_.target.manifest.digest,
                max(0.0, round_.until - now),
                tuple(sorted((name, bool(part.result), part.committed) for name, part in round_.parts.items())),
            )
            for number, round_ in rounds.state.rounds.items()
        ),
        (rank[rounds.state.current.number], rounds.state.current.state, tuple(rounds.state.current.parts))
        if rounds.state.current
        else None,
        rounds.state.target.manifest.digest if rounds.state.target else None,
        rounds.state.epoch,
        rounds.state.committed,
        tuple(sorted((name, until - now) for name, until in rounds.state.grouping.items())),
        (rank[formation.round.number], group[formation.generation]) if formation is not None else None,
        min(now - rounds.state.publisher_seen, SILENT_S + 1),
        (
            node.learner.alive,
            node.learner.epoch,
            tuple(one.digest for one in node.learner.staged),
            node.learner.told,
            rank[node.learner.round],
            group[node.learner.leading],
            group[node.learner.sent],
        ),
        tuple((copy.member, orders[copy.member].index(copy.order), _poll_key(copy, rank)) for copy in node.copies),
        node.faults,
        node.failed,
    )


def _poll_key(poll: MemberPoll, rank: dict[int, int]) -> tuple[Any, ...]:
    return (poll.pid, poll.state, poll.version, poll.digest, poll.base, rank[poll.round], poll.error, poll.has_plan)


def _member_key(
    name: str, node: Node, rank: dict[int, int], group: dict[int, int], orders: dict[str, list[int]]
) -> tuple[Any, ...]:
    process, member = node.processes[name], node.rounds.state.members.get(name)
    seen = {copy.order for copy in node.copies if copy.member == name}
    if process.poll is not None:
        seen.add(process.poll.order)
    if member is not None:
        seen.add(member.order)
    order = orders[name] = sorted(seen)
    here = (
        process.pid, process.alive, process.version, process.digest, process.base,
        process.pending.digest if process.pending is not None else "", rank[process.round], process.error,
        (order.index(process.poll.order), _poll_key(process.poll, rank)) if process.poll is not None else None,
        process.held, process.plan, process.keeps,
        _told(process.job, rank, group), _told(process.answer, rank, group),
    )  # fmt: skip
    if member is None:
        return here
    part, now = member.part, node.now
    return (
        *here,
        member.pid,
        member.version,
        member.digest,
        member.base,
        order.index(member.order),
        member.unsure,
        member.reported,
        rank[member.round_reported],
        member.received_digest if member.reported == "prepared" else "",
        member.has_plan,
        min(now - member.last_seen, SILENT_S + 1),
        member.dead,
        tuple(sorted(member.failed_sources)),
        member.full_only,
        bool(member.error),
        max(0.0, member.retry_at - now),
        member.relay,
        (
            rank[part.round.number],
            part.route.transport,
            part.route.source,
            part.route.hops,
            part.deadline - now,
            part.whole,
            part.committing,
            group[part.generation],
            part.rank,
            part.world_size,
        )
        if part is not None
        else None,
    )


def _told(answer: Instruction | None, rank: dict[int, int], group: dict[int, int]) -> tuple[Any, ...] | None:
    if answer is None:
        return None
    digest = answer.manifest.digest if answer.manifest is not None else ""
    return (
        answer.action,
        rank[answer.round],
        digest,
        answer.version,
        answer.transport,
        answer.source,
        answer.address,
        bool(answer.hops),
        group[answer.generation],
    )


EXPECTED = (Violation, AsyncRLError, KeyError, AssertionError)
