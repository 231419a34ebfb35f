"""The checker: what a run did, seen from the weights and from the wire, without the state machine's own counters.

Guarantees (each has the name under which a violation is reported):
`bound`     no token of a handed-out batch is older than its group's own bound allows;
`content`   every sample of a batch is whole: the bytes that a producer made for it, scored by their own reward;
`short`     every group of a batch has all its samples, every batch the groups that are due to it;
`again`     from a store that lost state no prompt in a checkpoint is given out before a learner has registered;
`doubled`   no group is twice in the weights (more than `max_reuse` times with reuse);
`replay`    the recorded batch of a step is the same groups in the same order, however often it is asked for;
`obeyed`    a learner, a lease or a service that was superseded is refused;
`second`    a second learner is refused while the first is heard from; no two learners get the same epoch;
`versions`  what was published has growing (epoch, version);
`forgotten` a service that was killed knows everything that was answered before (where the store lost nothing);
`lost`      at the end every prompt ever issued is in the surviving weights, or dropped or dead with a reason;
`places`    at the end exactly steps * B places are filled, by the surviving weights and what was quarantined;
`choice`    a group keeps the row that the buffer chose, and the history determines every choice;
`progress`  the run ends.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from sim_actors import DEEP, responses_of, reward_of

from asyncrl import wire
from asyncrl.audit.reader import Reader
from asyncrl.versions import oldest_version
from buffers.groups.group_table import end_kind
from buffers.groups.records import State
from buffers.values.archive import RETIRED

if TYPE_CHECKING:
    from sim_learner import Learner
    from sim_net import Ask
    from sim_world import World

BURIED = re.compile(rb'"g":(\d+),"reason":"(?:payload_lost|poison:simulated)"')
LEARNER_MESSAGES = (wire.Claim, wire.Commit, wire.Checkpointed, wire.LedgerRequest, wire.Quarantine, wire.Goodbye)


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def ends_of(table: Any) -> dict[int, str]:
    """How every prompt ended that has: `retired`, or the state and the reason. Empty: an archive of numbers has it."""
    known = {number: "" for first, end in table.archive.adopted.ranges for number in range(first, end)}
    known |= {number: table.archive.kind(number) for number in table.archive.ids if number not in known}
    return (
        known | {number: end_kind(end) for number, end in table.ended.items()} | dict.fromkeys(table.retired, RETIRED)
    )


class Checker:
    """What is known to be true. Everything that a loss of the store makes unknowable is forgotten by `forget`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epoch = 0  # of the learner that was registered last
        self.learner: Any = None  # its process
        self.heard = -1e9  # when the service last handled something of it
        self.leases: dict[int, int] = {}  # group -> token of its newest lease
        self.rows: dict[int, int] = {}  # group -> row that the buffer chose
        self.recorded: dict[int, dict[int, tuple[bytes, ...]]] = {}  # step -> groups, as handed out
        self.committed = 0
        self.dead: set[int] = set()
        self.epochs: dict[int, Any] = {}  # learner epoch -> process
        self.retired_to = 0
        self.uses: dict[int, int] = {}
        self.adopted = False  # a registration was stored since the store lost state; its answer may be lost

    def fail(self, kind: str, text: str) -> None:
        """Report."""
        raise Violation(kind, text)

    def forget(self) -> None:
        """The store went back or lost everything: a superseded token may be the newest one again."""
        self.epoch, self.learner, self.committed, self.adopted = 0, None, 0, False
        self.leases.clear()
        self.rows.clear()
        self.recorded.clear()
        self.epochs.clear()

    # ------------------------------------------------------------ the wire

    def answered(self, ask: Ask, message: wire.Message) -> None:
        """An answer leaves a service."""
        asked = ask.meaning
        kind = type(message)
        if kind is wire.Leases:
            self._given_out({lease.group for lease in message.leases})
            for lease in message.leases:
                if lease.token >= self.leases.get(lease.group, 0):
                    self.leases[lease.group] = lease.token
                if self.rows.setdefault(lease.group, lease.row) != lease.row or (lease.row >= 0) != self.world.chooses:
                    self.fail("choice", f"group {lease.group} has row {lease.row}, before {self.rows[lease.group]}")
        elif kind is wire.SamplesReply:
            if message.accepted and asked.token < self.leases.get(asked.group, 0):
                self.fail(
                    "obeyed",
                    f"samples of group {asked.group} under token {asked.token} were accepted, the "
                    f"lease is {self.leases[asked.group]}",
                )
        elif kind is wire.Registered:
            self._registered(ask, message)
        elif isinstance(asked, LEARNER_MESSAGES):
            self._learner(ask, asked, message)

    def _given_out(self, groups: set[int]) -> None:
        held = {group for step in self.world.newest_checkpoint().lineage for group in step.groups}
        if groups & held and not self.epoch and not self.adopted:
            self.fail("again", f"{sorted(groups & held)} are in a checkpoint and were given out once more")

    def _learner(self, ask: Ask, asked: Any, message: wire.Message) -> None:
        if isinstance(message, wire.Refused | wire.NotYet):
            return
        if asked.epoch < self.epoch:
            self.fail(
                "obeyed",
                f"{type(asked).__name__} of learner epoch {asked.epoch} was obeyed, the registered one is {self.epoch}",
            )
        if isinstance(message, wire.Batch):
            self._handed_out(message)
        elif isinstance(asked, wire.Commit):
            self.committed = max(self.committed, asked.step)
        elif isinstance(asked, wire.Checkpointed):
            self.retired_to = max(self.retired_to, asked.step)
        elif isinstance(asked, wire.Goodbye):
            self.learner = None
            self.world.over = self.world.over or asked.done
        elif isinstance(asked, wire.Quarantine):
            self.dead.update(asked.groups)

    def _handed_out(self, batch: wire.Batch) -> None:
        groups = {head.group: head.records for head in batch.groups}
        before = self.recorded.get(batch.step)
        if before is not None:
            # One with other samples was generated anew: the batch it left was given up, and this is another one.
            anew = {group for group in before if group in groups and groups[group] != before[group]}
            still = [group for group in before if group in groups and group not in anew]
            if still != [group for group in groups if group not in anew and (not anew or group in before)]:
                self.fail("replay", f"step {batch.step} was {[*before]}, now it is {[*groups]}")
            gone = set(before) - set(groups) - self.dead - self.world.ended_ids()
            if gone and self.world.max_reuse == 1:  # a used one may leave its last batch and stay trained
                self.fail(
                    "replay", f"step {batch.step} was {[*before]}, now it is {[*groups]}: {gone} left without a reason"
                )
        self.recorded[batch.step] = groups

    def _registered(self, ask: Ask, message: wire.Registered) -> None:
        process, asked = ask.process, ask.message
        first = self.learner
        now = self.world.clock.now
        if (
            first is not None
            and first is not process
            and first.alive
            and not asked.takeover
            and message.epoch > self.epoch
            and now - self.heard <= 5.0
        ):
            self.fail("second", f"{process.name} was registered {now - self.heard:.1f} s after a word of {first.name}")
        owner = self.epochs.setdefault(message.epoch, process)
        if owner is not process:
            self.fail("second", f"epoch {message.epoch} was given to {owner.name} and to {process.name}")
        if message.epoch > self.epoch:
            self.recorded = {step: groups for step, groups in self.recorded.items() if step > asked.step}
            if asked.step < max(
                self.retired_to, self.world.saved_to
            ):  # an older one: what is behind the gap is given up
                self.recorded, self.world.saved_to = {}, asked.step
            self.retired_to = asked.step  # a registration retires what its ledger holds
            self.committed = asked.step
            self.epoch, self.learner = message.epoch, process
            self.world.over = False
        self.heard = now

    def handled(self, process: Any, message: wire.Message) -> None:
        """The service has handled something of this process."""
        if process is self.learner and not isinstance(message, wire.Hello):
            self.heard = self.world.clock.now
            if isinstance(message, wire.Goodbye):
                self.learner = None

    def opened(self, rows: dict[str, bytes], meta: Any, batches: Any) -> None:
        """A service was opened on these rows."""
        if not meta.learner[0]:  # a goodbye was kept, its answer was not sent
            self.learner = None
        if meta.epoch > self.epoch:  # a registration was kept, its answer was not sent
            self.recorded, self.committed, self.learner, self.adopted = {}, 0, None, True
            return
        if meta.version < self.committed:
            self.fail("forgotten", f"step {self.committed} was committed, the service knows {meta.version}")
        if meta.epoch < self.epoch:
            self.fail("forgotten", f"learner epoch {self.epoch} was given, the service knows {meta.epoch}")
        for step in self.recorded:
            if step > self.world.saved_to and step not in batches:
                self.fail("forgotten", f"the batch of step {step} was handed out, the service knows nothing of it")

    # ------------------------------------------------------------ the learner

    def batch(self, learner: Learner, batch: wire.Batch, payloads: Any) -> wire.Batch:
        """A batch arrives at a learner."""
        at = 0
        for head in batch.groups:
            parts = payloads[at : at + len(head.records)]
            at += len(head.records)
            self._group(batch, head, parts)
        if at != len(payloads):
            self.fail("content", f"step {batch.step}: {len(payloads)} payloads for {at} records")
        self.world.keep_content(batch, payloads)
        return batch

    def _group(self, batch: wire.Batch, head: wire.GroupHead, payloads: Any) -> None:
        where = f"step {batch.step}, group {head.group}"
        seen: set[int] = set()
        for record, payload in zip(head.records, payloads, strict=True):
            message = wire.decode_samples(record)
            texts = responses_of(message, payload)
            for item in message.samples:
                if item.index in seen or item.index not in head.rewards:
                    continue
                seen.add(item.index)
                text = texts[item.index]
                if text[0] != head.group * 64 + item.index:
                    self.fail("content", f"{where}: sample {item.index} is {text}")
                both = 1 + DEEP * (self.world.two_judges and not self.world.own_rewards)
                if abs(head.rewards[item.index] - both * reward_of(text)) > 1e-6:
                    self.fail("content", f"{where}: sample {item.index} has not the reward of its text by its judges")
                lag = batch.version - (oldest_version(item.runs) or 0)
                if lag > head.bound and not self.world.may_exceed:
                    self.fail("bound", f"{where}: sample {item.index} has lag {lag}, the bound is {head.bound}")
        if head.bound not in self.world.bounds:
            self.fail("bound", f"{where}: bound {head.bound} was never set")
        if len(seen) != self.world.group_size:
            self.fail("short", f"{where}: {len(seen)} of {self.world.group_size} samples")

    def trained(self, learner: Learner) -> None:
        """A learner has folded a batch into its weights."""
        mine = learner.lineage[-1].groups
        count = dict.fromkeys(mine, 0)
        for trained in learner.lineage:
            for group in trained.groups:
                if group in count:
                    count[group] += 1
        over = {group: number for group, number in count.items() if number > self.world.max_reuse}
        if over:
            self.fail("doubled", f"step {learner.step}: {over} in weights of {learner.process.name}")

    def published(self, epoch: int, version: int, last: tuple[int, int]) -> None:
        """The weight service took a version."""
        if (epoch, version) <= last:
            self.fail("versions", f"(epoch, version) {(epoch, version)} was published after {last}")

    # ------------------------------------------------------------ the end

    def finish(self, lineage: Any, groups: Any) -> None:
        """The run is complete: the surviving weights against the buffer's account of every prompt."""
        groups.check()
        trained = {group for step in lineage for group in step.groups}
        flat = [group for step in lineage for group in step.groups]
        if self.world.max_reuse == 1 and len(flat) != len(trained):
            self.fail("doubled", f"{sorted(group for group in trained if flat.count(group) > 1)}")
        ends, adopted = ends_of(groups.table), groups.table.archive.adopted
        said = {number for number, kind in ends.items() if kind == RETIRED}
        said |= {g.id for g in groups.table.groups.values() if g.state == State.TRAINED}
        counted = {number for number, kind in ends.items() if not kind}
        if trained - said - counted or len(trained & counted) != adopted.counts.get(RETIRED, 0):
            self.fail(
                "lost", f"{sorted(trained - said)} are in the weights, the buffer calls them otherwise: {adopted}"
            )
        if said - trained:
            self.fail("lost", f"{sorted(said - trained)} are called trained, the weights do not hold them")
        for number, kind in ends.items():
            if kind.endswith(":"):
                self.fail("lost", f"group {number} ended without a reason")
        for number in range(groups.table.meta.cursor):
            if number not in said and number not in ends and number not in groups.table.groups:
                self.fail("lost", f"prompt {number} was issued and nobody knows it")
        last = max([-1, *self.world.issued, *trained])
        if last >= groups.table.meta.cursor:
            self.fail("lost", f"prompt {last} was issued, the cursor is {groups.table.meta.cursor}")
        if [step.step for step in lineage] != list(range(1, self.world.steps + 1)):
            self.fail("places", f"the weights hold the steps {[step.step for step in lineage]}")
        self._places(lineage, groups)
        self._choices()

    def _choices(self) -> None:
        reader = Reader()
        for line in b"".join(self.world.history).splitlines() if self.world.chooses else ():
            reader.take(json.loads(line))
        if wrong := [text for text in reader.found.violations if text.startswith("choice")]:
            self.fail("choice", wrong[0])

    def _places(self, lineage: Any, groups: Any) -> None:
        """Every step held B groups; a place may be empty only by a group that died in its batch."""
        world = self.world
        missing = world.steps * world.batch_groups - sum(len(step.groups) for step in lineage)
        told = [int(number) for number in BURIED.findall(b"".join(world.history))]  # the history outlives the store
        ends = ends_of(groups.table)
        known = {number for number, kind in ends.items() if kind.endswith((":payload_lost", ":poison:simulated"))}
        buried = len(told) + len(known.difference(told))  # one may die twice, in two pasts
        if world.strict_places and not 0 <= missing <= buried:
            self.fail(
                "places",
                f"{missing} of {world.steps} * {world.batch_groups} places are empty, {buried} groups died in a batch",
            )
