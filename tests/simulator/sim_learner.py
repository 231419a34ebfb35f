"""The learner, as the simulator plays it: the calls and the order of `learners.loop` and `learners.rank_zero`.

Its "weights" are its lineage: for every step the groups that were folded in, with a digest over
all that came before, so that two learners with the same weights have the same digest. Its account of the ledger is the
real one (`learners.ledger_account`).
"""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
from sim_actors import HEARTBEAT_S
from sim_net import Ask, Process, Task

from asyncrl import wire
from asyncrl.errors import Fenced, StateLost, Unavailable
from learners.ledger_account import Account

if TYPE_CHECKING:
    from sim_world import World


class Trained(msgspec.Struct, frozen=True):
    """One step in the weights: its groups, and the digest of the weights after it."""

    step: int
    groups: tuple[int, ...]
    digest: str


class Checkpoint(msgspec.Struct, frozen=True):
    """What is durable of a learner."""

    step: int
    lineage: tuple[Trained, ...]
    ledger: str
    digests: dict[int, str]


class Learner:
    """One learner process, as `learners.loop` and `learners.rank_zero` behave."""

    def __init__(self, world: World, process: Process, *, takeover: bool) -> None:
        self.world = world
        self.process = process
        self.takeover = takeover
        self.rng = random.Random(world.rng.getrandbits(32))
        self.epoch = 0
        self.lineage: list[Trained] = []
        self.account = Account("")  # the real one: what the weights hold, without the buffer's help
        self.saved = 0
        self.ahead = -1  # the version of the generators that recorded batches lead back to
        self.digests: dict[int, str] = {}
        self.stop = False  # SIGTERM
        self.by_place = False

    @property
    def step(self) -> int:
        """Steps in the weights."""
        return len(self.lineage)

    def life(self) -> Task:
        """Restore, register, train to the end."""
        world, process = self.world, self.process
        found = world.newest_checkpoint()
        self.lineage, self.account = list(found.lineage), Account(found.ledger)
        self.saved, self.digests = found.step, dict(found.digests)
        yield Ask(wire.Hello("learner", process.name, process.pid, "h"))
        yield from self.register(self.takeover)
        yield self.beat()
        while True:
            try:
                if self.step >= world.steps or self.stop:
                    break
                batch = yield from self.claim()
                if batch is None:
                    continue
                yield from self.train(batch)
                if self.step % world.checkpoint_every == 0 and self.step < world.steps:
                    yield from self.checkpoint()
            except StateLost:
                yield from self.start_again()
        done = self.step >= world.steps
        while True:
            try:
                if self.step > self.saved:
                    yield from self.checkpoint()
                yield Ask(wire.Goodbye(self.epoch, done, "", self.step))
                break
            except StateLost:
                yield from self.start_again()
        if done:
            world.finish(self)
        self.process.exit("stopped" if not done else "")

    def register(self, takeover: bool) -> Task:
        """Register and take the epoch; publish where the generators are behind."""
        process = self.process
        name, pid = process.name, process.pid
        ledger = self.account.text(step=self.step, epoch=self.world.mark)
        once = self.rng.getrandbits(63)
        message = wire.Register(name, pid, "h", self.step, ledger, takeover, "", dict(self.digests), once)
        packet = yield Ask(message, wait_s=15.0)
        answer: wire.Registered = packet.message
        self.epoch, self.by_place = answer.epoch, bool(answer.nonce)
        self.check_mark()
        if self.world.marked_by == (self.epoch, self.process) or self.world.mark < self.epoch:
            self.world.mark, self.world.marked_by = self.epoch, (self.epoch, process)
        else:
            raise StateLost("buffer.lost_state", f"learner epoch {self.epoch} was another's before")
        held = self.world.weights.committed
        self.ahead = held if self.step < held <= answer.replay_to else -1
        if self.ahead < 0:
            yield from self.publish(self.step)

    def check_mark(self) -> None:
        """The mark in the run folder: a learner that was taken over from finds out without the buffer."""
        if self.world.mark > self.epoch:
            raise Fenced("fenced", f"learner epoch {self.epoch} is over, {self.world.mark} is registered")

    def beat(self) -> Task:
        """Heartbeats, from a thread of their own: they are no sign of what the loop does."""
        while True:
            yield HEARTBEAT_S
            try:
                yield Ask(wire.Heartbeat("learner", self.process.name, self.process.pid, "h", ""))
            except Unavailable:
                continue

    def publish(self, version: int) -> Task:
        """Weights to the generators."""
        yield 0.01
        digest = self.lineage[-1].digest if self.lineage else "0"
        self.digests[version] = digest
        self.world.weights.publish(self.epoch, version, digest, self)

    def claim(self) -> Any:
        """The batch of the next step, or None to look again."""
        step = self.step + 1
        packet = yield Ask(wire.Claim(self.epoch, step, step - 1, 2.0, self.by_place), wait_s=2.0)
        batch = packet.message
        if isinstance(batch, wire.NotYet):
            self.world.diagnosis = batch.diagnosis
            self.check_mark()  # a buffer that went back may take this learner for the registered one again
            return None
        payloads = packet.payloads
        if batch.places:
            found = self.world.read_places(batch)
            if found is None:
                self.by_place = False
                return None
            batch, payloads = found
        return self.world.check.batch(self, batch, payloads)

    def train(self, batch: Any) -> Task:
        """Fold the batch into the weights, publish, commit."""
        bad = tuple(head.group for head in batch.groups if self.world.odd("quarantine"))
        for group in bad:
            self.world.hits["quarantine"] += 1
            yield Ask(wire.Quarantine(self.epoch, batch.step, (group,), "simulated"))
            self.account.quarantine(batch.step, group, "simulated")
        yield 0.02 + self.rng.random() * 0.1
        groups = tuple(head.group for head in batch.groups if head.group not in bad)
        before = self.lineage[-1].digest if self.lineage else "0"
        text = f"{before}/{batch.step}/{groups}/{self.world.content_of(batch, bad)}"
        self.lineage.append(Trained(batch.step, groups, f"{zlib.crc32(text.encode()):08x}"))
        self.account.train(batch.step, groups)
        self.world.check.trained(self)
        if not (batch.replayed and batch.step < self.ahead):
            yield from self.publish(batch.step)
        yield Ask(wire.Commit(self.epoch, batch.step, batch.step, self.lineage[-1].digest, groups))

    def checkpoint(self) -> Task:
        """Ledger, durable write, word to the buffer; a crash can come between any two of them."""
        packet = yield Ask(wire.LedgerRequest(self.epoch, self.step))
        yield from self.save(packet.message.ledger)
        yield Ask(wire.Checkpointed(self.epoch, self.step))

    def save(self, ledger: str) -> Task:
        """Make weights and ledger durable, together; the fence comes right before the rename."""
        kept = Checkpoint(self.step, tuple(self.lineage), ledger, dict(self.digests))
        yield 0.05 + self.rng.random() * 0.1
        self.check_mark()
        self.world.checkpoints[kept.step] = kept
        self.world.saved_to = max(self.world.saved_to, kept.step)
        self.saved = kept.step
        self.account.renew(kept.step, ledger)
        yield 0.01

    def start_again(self) -> Task:
        """The buffer lost its state: what the weights hold becomes durable, then it registers with that."""
        self.world.hits["registered_again"] += 1
        if self.step > self.saved:
            yield from self.save(self.account.text(step=self.step, epoch=self.epoch))
        yield from self.register(False)
