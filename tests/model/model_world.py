"""One step of every party, from any state of the real state machine: what the exhaustive search explores.

A state is the rows that the store holds, and what the parties outside know: the version of each engine, the version
that each lease was begun with, the newest durable checkpoint. A transition loads the rows into a new
`buffers.groups.machine.GroupMachine` (so the buffer service is restarted between any two of them), makes one call, and
applies the changes. Guarantees:
1. decisions are those of the real `GroupMachine`, with the parts that are passed in: nothing of it is repeated here;
2. `moves` yields every call that a party can make, except those that provably change nothing;
3. two states with the same `key` have the same future: the key leaves out time, the values of tokens and request
   numbers, what became of groups that are done, and which of two producers that know the same is which;
4. without `total` the run has no end and versions are taken relative to the committed one: the search then covers
   runs of any length.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import msgspec
from model_checks import (
    Violation,
    check_batch,
    check_grant,
    check_loss,
    check_state,
    check_tokens,
    outstanding_of,
)

from asyncrl.wire import LeaseReturn, Piece, Pieces, RewardFailure, SampleHead, Samples, Score, Scores
from buffers.groups.judgements import JudgeRule, judgement
from buffers.groups.machine import DEFAULT_PARTS, GroupMachine, Parts
from buffers.groups.records import Group, Ledger, Record, Settings, State

#: Without an end: far from version 0, so that older versions than any in use exist.
START = 100
LATE = 1000.0
ENDLESS = 1 << 30
#: The first one fails for good at its first failure, the second one is asked once more.
JUDGES = (JudgeRule("", 0), JudgeRule("deep", 1))
REWARDS = {"": 1.0, "deep": 2.0}
_encode = msgspec.msgpack.Encoder().encode


class Case(NamedTuple):
    """One configuration of the search."""

    batch: int = 1
    size: int = 1
    eta: int = 1
    depth: int = 1
    producers: int = 2
    total: int = 0  # groups of the run; 0: it has no end
    on_late: str = "wait"
    late: bool = False  # the learner's patience with late groups may end, at any moment
    losses: bool = True  # producers fall silent and come back
    returns: bool = False  # producers give single leases back, with and without blame
    restarts: bool = False  # learners are killed and come back from the newest checkpoint
    unsaved: int = 0  # steps that may be committed without a checkpoint; 0: saved with the commit
    older: int = 0  # a sample may have tokens that are so much older than its lease
    inflight: bool = True  # engines take new weights while they generate
    tunes: tuple[tuple[int, int], ...] = ()  # (max_staleness, pipeline_depth) that may be put in force at any moment
    scored: bool = False  # rewards arrive by themselves
    filtered: bool = False  # any group may be filtered
    reuse: int = 1
    reissue: int = 1
    checkpoints: bool = False  # samples under way may be sent in pieces, and are continued or begun anew
    judges: int = 1  # with two both are asked about every sample, and either may fail
    shared: bool = False  # producers have asked before: each has its share
    deaf: int = 0  # so many of them never ask again, and are heard from for ever
    counted: int = 0  # up to so many ended groups are told apart: the assumption that they do not matter, tested

    def settings(self) -> Settings:
        """What decisions read."""
        return Settings(
            group_size=self.size,
            batch_groups=self.batch,
            max_staleness=self.eta,
            depth=self.depth,
            total_groups=self.total or ENDLESS,
            on_late=self.on_late,
            max_reissue=self.reissue,
            max_reuse=self.reuse,
            late_timeout_s=10.0,
            max_failed_groups=ENDLESS,
            max_poison_rate=1.0,
            max_filtered_rate=1.1,
            judges=() if self.judges == 1 else JUDGES,
        )

    def __str__(self) -> str:
        numbers = f"B={self.batch} G={self.size} eta={self.eta} depth={self.depth} producers={self.producers}"
        words = [f"total={self.total or 'endless'}", f"on_late={self.on_late}"]
        defaults = Case._field_defaults
        for name in Case._fields[7:]:
            if getattr(self, name) != defaults[name]:
                words.append(f"{name}={getattr(self, name)}".replace(" ", ""))
        return f"{numbers} {' '.join(words)}"


class Node(NamedTuple):
    """A state: rows of the store and what the parties know."""

    rows: dict[str, bytes]
    engines: tuple[int, ...]  # version that each engine holds
    begun: dict[int, int]  # leased group -> version of the engine when it was leased
    bounds: dict[int, int]  # group -> bound in force when it was leased first
    saved: tuple[int, Ledger]  # newest durable checkpoint
    epoch: int  # of the service


class Move(NamedTuple):
    """A transition. `good`: one that healthy parties make, nothing is lost by it; `lag`: of the batch it claimed."""

    label: str
    node: Node
    key: bytes
    good: bool
    goal: bool
    lag: int


def _record(_piece: Piece) -> Record:
    return Record(1, 0, 1, 1, 9)


def _never(_piece: Piece) -> Record:
    raise Violation("the bytes of a piece that changes nothing were kept")


def drop_seven(*, rewards: list[float], **_: Any) -> str:
    """The filter of the search: a reward of 7 is filtered."""
    return "seven" if 7.0 in rewards else ""


class World:
    """The transitions of one case."""

    def __init__(self, case: Case, parts: Parts = DEFAULT_PARTS, *, only: bool = False) -> None:
        self.case = case
        self.only = only  # check what the theorem says, not the conditions that it is proved from
        self.parts = parts
        self.settings = case.settings()
        self.seen: Container[bytes] = ()  # keys of states that were checked already
        self.names = [f"p{index}" for index in range(case.producers)]
        self.deaf = case.producers - case.deaf  # place of the first one that does not ask
        self.deepest = max([case.depth, *(depth for _, depth in case.tunes)])
        self.filters = (("seven", drop_seven),) if case.filtered else ()
        reverts = case.restarts and case.inflight  # engines go back to an older version while they generate
        self.exact = case.older == 0 and case.on_late != "train" and not reverts  # (F) holds in every state

    # ------------------------------------------------------------ states

    def start(self) -> tuple[Node, bytes]:
        """A registered learner, nothing issued."""
        book = GroupMachine(self.settings, epoch=1, filters=self.filters, parts=self.parts)
        step = 0 if self.case.total else START
        book.register(name="l", pid=1, host="h", step=step, ledger=Ledger(step=step), takeover=True, now=0.0)
        node = Node({}, (step,) * self.case.producers, {}, {}, (step, Ledger(step=step)), 1)
        return self._child(node, book)

    def load(self, node: Node) -> GroupMachine:
        """The service starts with these rows."""
        book = GroupMachine(self.settings, epoch=node.epoch + 1, filters=self.filters, parts=self.parts)
        book.load(node.rows.items())
        for name in self.names if self.case.shared else ():
            book.workers.see("producer", name, 0.0).capacity = 2
        return book

    def _child(self, node: Node, book: GroupMachine, **changes: Any) -> tuple[Node, bytes]:
        """The state after a call on `book`, which was loaded from `node`; checked."""
        rows = dict(node.rows)
        for change in book.take().rows:
            if change.value is None:
                rows.pop(change.key, None)
            else:
                rows[change.key] = change.value
        begun, bounds = changes.get("begun", node.begun), changes.get("bounds", node.bounds)
        if len(begun) > 0:
            begun = {
                number: w
                for number, w in begun.items()
                if number in book.table.groups and book.table.groups[number].token
            }
        if len(bounds) > len(book.table.groups):
            bounds = {number: bound for number, bound in bounds.items() if number in book.table.groups}
        changes |= {"rows": rows, "begun": begun, "bounds": bounds, "epoch": node.epoch + 1}
        child = node._replace(**changes)
        key = self.key(child, book)
        if key not in self.seen:
            check_state(self, child, book)
        return child, key

    def key(self, node: Node, book: GroupMachine) -> bytes:
        """The same for states with the same future."""
        case = self.case
        base = 0 if case.total else book.table.meta.version
        places = {entry[2]: place for place, entry in enumerate(book.table.indexes.ready)}
        places |= {entry[2]: place for place, entry in enumerate(book.table.indexes.used)}
        numbers = [number for number, group in sorted(book.table.groups.items()) if self._matters(group)]
        rank = {number: place for place, number in enumerate(numbers)}
        floor = book.table.frontier - self.deepest - 2 - case.unsaved
        held = [sorted(rank[number] for number in book.table.indexes.held.get(name, ())) for name in self.names]
        parties = sorted(
            (place >= self.deaf, w - base if mine else max(w, floor) - base, mine, place)
            for place, (w, mine) in enumerate(zip(node.engines, held, strict=True))
        )
        seats = {self.names[place]: seat for seat, (*_, place) in enumerate(parties)}
        groups = []
        for number in numbers:
            group = book.table.groups[number]
            deadline = None if group.deadline is None else group.deadline - base
            uses = [step - base for step in group.uses]
            if group.state >= State.CLAIMED:
                groups.append((group.state, deadline, places.get(number), uses, group.max_uses))
                continue
            samples = sorted(
                (
                    s.oldest - base,
                    s.reward is None,
                    *((judge, one.reward is None, one.failures) for judge, one in sorted(s.judged.items())),
                )
                for s in group.samples.values()
            )
            begun = node.begun[number] - base if number in node.begun else None
            kept = sorted((index, one.oldest - base, one.token == group.token) for index, one in group.partial.items())
            groups.append(
                (
                    group.state,
                    min(group.attempt, case.reissue),
                    group.bound,
                    deadline,
                    seats.get(group.holder),
                    begun,
                    places.get(number),
                    samples,
                    group.max_uses,
                    kept,
                )
            )
        batches = [(step - base, len(batch.groups)) for step, batch in sorted(book.table.batches.items())]
        settings = (book.settings.max_staleness, book.settings.depth) if case.tunes else ()
        ended = min(sum(book.table.ended_counts.values()), case.counted)
        return _encode(
            (
                book.table.meta.version - base,
                [party[:3] for party in parties],
                groups,
                batches,
                node.saved[0] - base,
                settings,
                ended,
            )
        )

    def _matters(self, group: Group) -> bool:
        """It is not done: a decision may still look at more of it than that it is in its batch."""
        if group.state < State.CLAIMED or len(group.uses) < group.max_uses:
            return True
        return self.case.reuse > 1 and self.case.restarts

    def complete(self, book: GroupMachine) -> bool:
        """Every place of the run's total is in a committed step."""
        return 0 < self.case.total <= book.table.meta.version * self.case.batch

    # ------------------------------------------------------------ transitions

    def moves(self, node: Node) -> Iterator[Move]:
        """Every transition out of a state."""
        book = self.load(node)
        idle: set[int] = set()
        for place, name in enumerate(self.names[: self.deaf]):
            version, holds = node.engines[place], sorted(book.table.indexes.held.get(name, ()))
            if not holds and version in idle:
                continue  # another producer is in the same position
            if not holds:
                idle.add(version)
            yield from self._producer(node, book, place, holds)
        if self.case.scored:
            yield from self._rewards(node, book)
        yield from self._learner(node, book)
        for eta, depth in self.case.tunes:
            if (book.settings.max_staleness, book.settings.depth) != (eta, depth):
                other = self.load(node)
                other.tune({"max_staleness": eta, "pipeline_depth": depth}, author="t", now=0.0)
                yield self._move(f"tune max_staleness={eta} pipeline_depth={depth}", node, other, good=False)

    def _move(self, label: str, node: Node, book: GroupMachine, *, good: bool = True, **changes: Any) -> Move:
        goal, lag = changes.pop("goal", False), changes.pop("lag", -1)
        try:
            child, key = self._child(node, book, **changes)
        except Violation as error:
            raise Violation(f"{label}: {error}") from None
        return Move(label, child, key, good, goal, lag)

    def _producer(self, node: Node, book: GroupMachine, place: int, holds: list[int]) -> Iterator[Move]:
        name, version, newest = self.names[place], node.engines[place], book.table.meta.version
        if version != newest and (self.case.inflight or not holds):
            engines = (*node.engines[:place], newest, *node.engines[place + 1 :])
            yield self._move(f"{name} takes version {newest}", node, self.load(node), engines=engines)
        yield from self._lease(node, place)
        for number in holds:
            yield from self._samples(node, book, place, number)
            if self.case.checkpoints:
                yield from self._pieces(node, book, place, number)
        if not holds:
            return
        if self.case.losses:
            other = self.load(node)
            other.workers.see("producer", name, -LATE)
            for awake in self.names:
                if awake != name:
                    other.workers.see("producer", awake, 0.0)
            other.tick(0.0)
            check_loss(book, other, holds)
            yield self._move(f"{name} is silent", node, other, good=False)
        if self.case.returns:
            for number in holds:
                for reason in ("stop", "crash"):
                    other = self.load(node)
                    other.give_back(LeaseReturn(name, ((number, book.table.groups[number].token),), reason), now=0.0)
                    yield self._move(f"{name} returns {number} ({reason})", node, other, good=False)

    def _lease(self, node: Node, place: int) -> Iterator[Move]:
        name, version = self.names[place], node.engines[place]
        other = self.load(node)
        before = set(other.table.groups)
        outstanding, active = outstanding_of(other), outstanding_of(other, waiting=False)
        request = node.epoch
        may = other.schedule.next_group(version) is not None
        leases = other.lease(name, engine_version=version, max_groups=1, request=request, now=0.0)
        if not leases:
            if not other.lease_blocked(version, name) and not self.only:
                raise Violation(f"{name} at version {version} gets nothing and no reason is given")
            if may and not other.table.indexes.held.get(name) and not self.only:
                raise Violation(f"{name} at version {version} holds nothing and gets nothing of what is ready")
            return
        lease = leases[0]
        fresh = lease.group not in before
        check_grant(
            self, node, other, lease, version=version, outstanding=outstanding if fresh else active, fresh=fresh
        )
        if other.lease(name, engine_version=version, max_groups=1, request=request, now=0.0) != leases:
            raise Violation(f"the request of {name} sent again gets other leases")
        bounds = {**node.bounds, lease.group: other.settings.max_staleness} if fresh else node.bounds
        begun = {**node.begun, lease.group: version}
        label = f"{name} at version {version} leases {lease.group} (deadline {lease.deadline_version})"
        yield self._move(label, node, other, begun=begun, bounds=bounds)

    def _samples(self, node: Node, book: GroupMachine, place: int, number: int) -> Iterator[Move]:
        """The next sample of a held group, by each version that can have made it."""
        name, group = self.names[place], book.table.groups[number]
        index = next(index for index in range(self.case.size) if index not in group.samples)
        begun = node.begun[number]
        versions = {node.engines[place]: True, begun: True}
        if index in group.partial:  # continued, or its own
            versions[group.partial[index].oldest] = True
        versions |= {begun - less: False for less in range(1, self.case.older + 1) if begun >= less}
        last = len(group.samples) + 1 == self.case.size
        for version, good in versions.items():
            for reward in (1.0, 7.0) if self.case.filtered and last else (1.0,):
                other = self.load(node)
                rewards = {} if self.case.scored else {index: reward}
                heads = (SampleHead(index, 1, "stop", ((version, 1),)),)
                message = Samples(name, number, group.token, heads, {}, (), "{}", 1, rewards=rewards)
                keep = lambda: Record(1, 0, 1, 1, 9)  # noqa: E731
                check_tokens(other, message, number)
                reply = other.samples(message, checksum=9, invalid=str, keep=keep, now=0.0)
                if reply.accepted != (index,):
                    raise Violation(f"sample {index} of group {number} was refused: {reply.refused}")
                again = other.samples(message, checksum=9, invalid=str, keep=keep, now=0.0)
                if again.accepted:
                    raise Violation(f"sample {index} of group {number} was taken twice")
                word = ", filtered" if reward == 7.0 else ""
                label = f"{name} sends sample {index} of group {number}, made by version {version}{word}"
                yield self._move(label, node, other, good=good and not word)

    def _pieces(self, node: Node, book: GroupMachine, place: int, number: int) -> Iterator[Move]:
        """A checkpoint of the next sample: its first tokens, or one more behind those that another producer made."""
        name, group = self.names[place], book.table.groups[number]
        index = next(index for index in range(self.case.size) if index not in group.samples)
        found = group.partial.get(index)
        if found is not None and found.token == group.token:
            return  # more tokens of the same producer are no older
        for version in {node.engines[place], node.begun[number]}:
            for start in {0, 0 if found is None else found.length}:
                other = self.load(node)
                piece = Piece(index, start, 1, ((version, 1),))
                message = Pieces(name, number, group.token, (piece,), {}, ())
                if other.pieces(message, invalid=str, keep=_record, now=0.0).kept != {index: start + 1}:
                    raise Violation(f"the piece of sample {index} of group {number} was not kept")
                rows = other.table.groups[number].partial[index]
                again = other.pieces(message, invalid=str, keep=_never, now=0.0)
                stale = msgspec.structs.replace(message, token=group.token - 1)
                late = other.pieces(stale, invalid=str, keep=_never, now=0.0)
                if again.kept != {index: start + 1} or late.kept or other.table.groups[number].partial[index] != rows:
                    raise Violation(f"the piece of sample {index} of group {number} was taken twice")
                label = f"{name} sends token {start} of sample {index} of group {number}, made by version {version}"
                yield self._move(label, node, other)

    def _rewards(self, node: Node, book: GroupMachine) -> Iterator[Move]:
        for number, index, judge in sorted(book.scoring.queue.keys()):
            group = book.table.groups[number]
            last = sum(sample.reward is None for sample in group.samples.values()) == 1
            for reward in (REWARDS[judge], 7.0) if self.case.filtered and last else (REWARDS[judge],):
                other = self.load(node)
                token, later = self._two_leases(other, number, index, judge)
                message = Scores("r", (Score(number, index, token, reward, {}),), judge=judge)
                twice = Scores("s", (Score(number, index, later, reward, {}),), judge=judge)
                if other.scores(message, now=0.0).accepted != 1 or other.scores(twice, now=0.0).accepted:
                    raise Violation(f"the score of sample {index} of group {number} was not taken once")
                label = f"group {number} sample {index} scored {reward} by {judge or 'the first judge'}"
                yield self._move(label, node, other, good=reward != 7.0)
            if self.case.judges > 1:
                yield self._fails(node, number, index, judge)

    def _two_leases(self, book: GroupMachine, number: int, index: int, judge: str) -> tuple[int, int]:
        """The token of a reward lease that expires, and of the one that follows."""
        tokens = []
        for name in ("r", "s"):
            book.workers.see("reward", name, 0.0)
            leases = book.reward_lease(name, max_samples=99, request=1, now=0.0, judge=judge)
            tokens += [item.token for item in leases if (item.group, item.index) == (number, index)]
            if name == "r":
                book.hello("reward", name, pid=2, host="h", now=0.0)  # it holds nothing any more
        if len(tokens) != 2 or tokens[0] >= tokens[1]:
            raise Violation(f"sample {index} of group {number} was leased with the tokens {tokens}")
        return tokens[0], tokens[1]

    def _fails(self, node: Node, number: int, index: int, judge: str) -> Move:
        other = self.load(node)
        token, later = self._two_leases(other, number, index, judge)
        before = judgement(other.table.groups[number].samples[index], judge).failures
        for name, number_of, taken in (("r", token, 0), ("s", later, 1), ("s", later, 0)):
            failure = RewardFailure(number, index, number_of, "raised", "")
            if other.scores(Scores(name, (), (failure,), judge=judge), now=0.0).accepted != taken:
                raise Violation(f"the failure of sample {index} of group {number} was not counted once")
        dead = number not in other.table.groups
        if dead != (before >= next(rule.retries for rule in JUDGES if rule.name == judge)):
            raise Violation(f"group {number} {'died' if dead else 'lives'} at failure {before + 1} of {judge!r}")
        return self._move(f"group {number} sample {index} fails with {judge!r}", node, other, good=False)

    # ------------------------------------------------------------ the learner

    def _learner(self, node: Node, book: GroupMachine) -> Iterator[Move]:
        version = book.table.meta.version
        step = version + 1
        if step in book.table.batches:
            if not self.case.unsaved or version - node.saved[0] < self.case.unsaved:
                yield self._commit(node, step)
        elif book.schedule.batch_size(step) > 0:
            yield from self._claim(node, step)
        told = min(book.table.batches, default=step) > node.saved[0]
        if self.case.unsaved and node.saved[0] < version and told:
            other = self.load(node)
            ledger = other.batches.ledger(epoch=other.table.meta.epoch, step=version)
            yield self._move(f"checkpoint of step {version}", node, other, saved=(version, ledger))
        if self.case.unsaved and not told:
            other = self.load(node)
            other.batches.checkpointed(epoch=other.table.meta.epoch, step=node.saved[0])
            yield self._move(f"the buffer hears of the checkpoint of step {node.saved[0]}", node, other)
        if self.case.restarts:
            yield self._restart(node)

    def _claim(self, node: Node, step: int) -> Iterator[Move]:
        other = self.load(node)
        epoch = other.table.meta.epoch
        claimed = other.claim(epoch=epoch, step=step, version=step - 1, now=0.0)
        if claimed is None and not other.diagnosis(0.0):
            raise Violation(f"step {step} waits and nobody is named")
        yield self._claimed(node, other, step, "", claimed)
        if claimed is None and self.case.late and other.batches.late_since is not None:
            other = self.load(node)
            other.claim(epoch=epoch, step=step, version=step - 1, now=0.0)
            claimed = other.claim(epoch=epoch, step=step, version=step - 1, now=LATE)
            yield self._claimed(node, other, step, ", its patience is over", claimed)

    def _claimed(self, node: Node, other: GroupMachine, step: int, word: str, claimed: Any) -> Move:
        if claimed is None:
            return self._move(f"step {step} is claimed{word}: not yet", node, other, good=not word)
        lag = check_batch(self, node, other, claimed.batch)
        again = other.claim(epoch=other.table.meta.epoch, step=step, version=step - 1, now=0.0)
        if again is None or again.batch.groups != claimed.batch.groups:
            raise Violation(f"step {step} claimed again gets other groups")
        label = f"step {step} is claimed{word}: groups {claimed.batch.groups}, lag {lag}"
        return self._move(label, node, other, good=not word, lag=lag)

    def _commit(self, node: Node, step: int) -> Move:
        other = self.load(node)
        epoch, recorded = other.table.meta.epoch, list(other.table.batches[step].groups)
        again = other.claim(epoch=epoch, step=step, version=step - 1, now=0.0)
        if again is None or again.batch.groups != recorded:
            raise Violation(f"the recorded batch of step {step} comes back as {again}")
        other.commit(epoch=epoch, step=step, version=step, digest="", now=0.0, groups=recorded)
        saved = node.saved
        if not self.case.unsaved:
            saved = (step, Ledger(step=step))
            other.batches.checkpointed(epoch=epoch, step=step)
        goal = self.complete(other) if self.case.total else True
        return self._move(f"step {step} is committed", node, other, saved=saved, goal=goal)

    def _restart(self, node: Node) -> Move:
        other = self.load(node)
        step, ledger = node.saved
        old = other.table.meta.epoch
        recorded = {number: list(batch.groups) for number, batch in other.table.batches.items() if number > step}
        if not self.case.unsaved:
            ledger = other.batches.ledger(epoch=old, step=step)
        other.register(name="l", pid=node.epoch + 9, host="h", step=step, ledger=ledger, takeover=True, now=0.0)
        if other.table.meta.epoch <= old:
            raise Violation("a new learner did not get a new epoch")
        if {number: list(batch.groups) for number, batch in other.table.batches.items()} != recorded:
            raise Violation(f"recorded were {recorded}, after the restart these are {other.table.batches}")
        return self._move(f"the learner comes back from step {step}", node, other, good=False)
