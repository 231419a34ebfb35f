"""The state machine of the buffer: every decision about groups, without I/O.

             lease                all samples in            all scores in
   (prompt) -------> LEASED ------------------> UNSCORED ------------------> READY
      ^                |  lease lost: attempt+1,    |  reward failed: retry,     |
      |                |  finished samples kept     |  then DEAD                 | claim(step)
      +----------------+                            v                            v
                       |                         DEAD (quarantine)            CLAIMED
                       |                                                         | commit(step)
                       +--> DROPPED(reason)  <-- late / zero_variance / filtered v
                            rolled_back / surplus          CLAIMED <--- TRAINED --checkpoint(step)--> RETIRED
                                                           (claimed again, at most max_reuse times and until it is due)

`GroupMachine` wires eight parts over one table and one transaction: `Workers`, `Schedule` (what may be leased, what
forms a batch), `Leases`, `SampleIntake`, `PartialSamples`, `Scoring`, `Batches` (claim to checkpoint) and `Recovery`.
Guarantees:
1. time is passed in and there is no randomness: the same calls give the same decisions;
2. a call changes memory only. A part validates first and then edits: a call that raises an error of the catalogue has
   changed no row. `take()` gives the rows, events and freed payloads for the store to apply at once;
3. `issued = leased + unscored + ready + claimed + trained + retired + dropped + dead` (`check`, on every commit);
4. with `on_late` wait or drop no group is claimed above its bound (docs/staleness.md, section 4), whatever is tuned
   meanwhile; it is trained at most `max_reuse` times, as set when it was issued.

Example, B = 1, G = 2, eta = 2: the naive cap of (eta + 1) * B lets two quick groups overtake a slow one, and then two
groups are due at version 2. Here the claim at version 1 must hold r(2) = n(2) - (2 - 1) * 1 = 1 of the groups due at 2.

>>> from buffers.groups.group_table import ledger_counts
>>> from buffers.groups.records import Ledger, Settings
>>> machine = GroupMachine(Settings(group_size=2, batch_groups=1, max_staleness=2, depth=2, total_groups=9))
>>> epoch = machine.register(name="l", pid=1, host="h", step=0, ledger=Ledger(), takeover=False, now=0.0)
>>> leases = machine.lease("p", engine_version=0, max_groups=9, request=1, now=0.0)
>>> [(lease.group, lease.deadline_version) for lease in leases]
[(0, 2), (1, 2), (2, 2)]
>>> machine.lease_blocked(0)
'no room before deadline 2: the learner must take a batch'
>>> [finish_group(machine, number, now=1.0) for number in (1, 2)]  # 0 is the slow one
['READY', 'READY']
>>> machine.claim(epoch=epoch, step=1, version=0, now=2.0).batch.groups
[1]
>>> machine.commit(epoch=epoch, step=1, version=1, digest="", now=3.0)
>>> machine.claim(epoch=epoch, step=2, version=1, now=4.0).batch.groups  # r(2) = 2 - 1 = 1, and 2 is due at 2
[2]
>>> machine.commit(epoch=epoch, step=2, version=2, digest="", now=5.0)
>>> machine.claim(epoch=epoch, step=3, version=2, now=6.0)  # r(2) = 1: only group 0 will do, it is waited for
>>> machine.diagnosis(7.0)
'step 3 waits 1.0 s for 1 group: 1 leased to p (last seen 6.0 s ago); late: group 0'
>>> finish_group(machine, 0, now=8.0), machine.claim(epoch=epoch, step=3, version=2, now=8.0).batch.groups
('READY', [0])
>>> machine.tune({"max_staleness": 1, "pipeline_depth": 1}, author="me@here", now=9.0)[:2]  # 3 is leased with bound 1
(1, {'buffer.max_staleness': (2, 1), 'buffer.pipeline_depth': (2, 1)})
>>> leases = machine.lease("p", engine_version=2, max_groups=9, request=2, now=9.0)
>>> [(lease.group, lease.deadline_version) for lease in leases]
[(3, 3)]
>>> machine.check(); ledger_counts(machine.table)
{'issued': 4, 'leased': 1, 'unscored': 0, 'ready': 0, 'claimed': 1, 'trained': 2, 'retired': 0, 'dropped': 0, 'dead': 0}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.wire import (
    Lease,
    LeaseReturn,
    Piece,
    Pieces,
    PiecesReply,
    SampleHead,
    Samples,
    SamplesReply,
    Scores,
    ScoresReply,
)
from buffers.groups.batches import Batches, Claimed
from buffers.groups.diagnosis import Diagnosis
from buffers.groups.failure_budget import FailureBudget, Filter
from buffers.groups.fair_share import FairShare
from buffers.groups.group_table import GroupTable, check_table
from buffers.groups.judgements import Judges, ScoreQueue
from buffers.groups.leases import ENVIRONMENT, GRACEFUL, SWAPPED, GroupLeases, GroupOutcome, Leases
from buffers.groups.live_settings import Changed, LiveSettings
from buffers.groups.partial_samples import PartialSamples
from buffers.groups.prompt_table import PromptTable
from buffers.groups.records import Change, Ledger, Record, Settings, State
from buffers.groups.recovery import Recovery
from buffers.groups.sample_intake import GroupSamples, SampleIntake
from buffers.groups.schedule import Schedule
from buffers.groups.scoring import GroupScores, Scoring, ToScore
from buffers.groups.transaction import Changes, Transaction
from buffers.groups.workers import Worker, Workers


@dataclass(frozen=True)
class Parts:
    """The classes that a machine is made of; a test or a simulation replaces single ones."""

    transaction: type[Transaction] = Transaction
    table: type[GroupTable] = GroupTable
    workers: type[Workers] = Workers
    judges: type[Judges] = Judges
    live: type[LiveSettings] = LiveSettings
    schedule: type[Schedule] = Schedule
    shares: type[FairShare] = FairShare
    budget: type[FailureBudget] = FailureBudget
    partial: type[PartialSamples] = PartialSamples
    leases: type[Leases] = Leases
    group_leases: type[GroupLeases] = GroupLeases
    intake: type[SampleIntake] = SampleIntake
    samples: type[GroupSamples] = GroupSamples
    scoring: type[Scoring] = Scoring
    batches: type[Batches] = Batches
    recovery: type[Recovery] = Recovery


DEFAULT_PARTS = Parts()


class GroupMachine:
    """The decisions of the buffer about training groups. `filters`: by name, in the order in which they are asked."""

    def __init__(
        self,
        settings: Settings,
        *,
        epoch: int = 1,
        wall_offset: float = 0.0,
        filters: Sequence[tuple[str, Filter]] = (),
        parts: Parts = DEFAULT_PARTS,
    ) -> None:
        self.service_epoch = epoch
        self.tx = tx = parts.transaction(epoch=epoch, wall_offset=wall_offset)
        self.workers = parts.workers()
        self.workers.holds = self._holds
        self.judges = parts.judges(settings.judges, retries=settings.reward_retries)
        queue = ScoreQueue()
        self.table = parts.table(tx, self.workers, self.judges, queue)
        self.prompts = self.table.prompts = PromptTable(tx, seed=settings.seed, chooses=settings.chooses)
        self.live = parts.live(settings, tx, self.table)
        self.schedule = parts.schedule(self.table, self.live)
        self.shares = parts.shares(tx, self.schedule, self.workers)
        self.budget = parts.budget(tx, self.table, self.live, filters)
        self.partial = parts.partial(tx, self.table, self.schedule)
        outcome = GroupOutcome(self.table, self.budget)
        self.leases = parts.leases(tx, self.table, self.workers, self.live, outcome)
        self.group_leases = parts.group_leases(
            tx,
            self.table,
            live=self.live,
            schedule=self.schedule,
            shares=self.shares,
            leases=self.leases,
            partial=self.partial,
        )
        common: dict[str, Any] = {"workers": self.workers, "live": self.live, "budget": self.budget}
        samples = parts.samples(tx, self.table, self.live, self.budget)
        self.intake = parts.intake(tx, self.table, **common, leases=self.leases, target=samples)
        scores = GroupScores(tx, self.table, samples, self.budget, self.judges)
        self.scoring = parts.scoring(
            tx,
            self.workers,
            live=self.live,
            judges=self.judges,
            budget=self.budget,
            queue=queue,
            target=scores,
            counts=Counter(),
        )
        self.batches = parts.batches(tx, self.table, **common, schedule=self.schedule, leases=self.group_leases)
        self.recovery = parts.recovery(
            tx, self.table, **common, leases=self.group_leases, partial=self.partial, batches=self.batches
        )
        self._diagnosis = Diagnosis(self.batches, self.scoring)

    def begin(self, now: float) -> Transaction:
        """Set the time of the calls that follow."""
        self.tx.now = now
        return self.tx

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.live.current

    def _holds(self, role: str, name: str) -> bool:
        if role == "learner":
            return name == self.table.meta.learner[0]
        return bool(self.table.indexes.held.get(name) if role == "producer" else self.scoring.queue.held.get(name))

    # ------------------------------------------------------------ rows

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows."""
        rows = list(rows)
        self.table.load(rows)
        self.prompts.load(rows)
        self.live.load(rows)
        self.budget.load(rows)

    def rows(self) -> list[Change]:
        """All rows, for a store that lost its own."""
        return [*self.table.rows(), *self.prompts.rows(), *self.live.rows(), *self.budget.rows()]

    def take(self) -> Changes:
        """Rows, events and freed payloads since the last call."""
        return self.tx.take()

    def check(self) -> None:
        """Compare every index and the conservation law with the rows. Raises `internal` if they disagree."""
        check_table(self.table)

    # ------------------------------------------------------------ the service and its workers

    def note_start(self, now: float) -> None:
        """The service starts: a registered learner gets its full time to be heard from."""
        self.begin(now).event(
            "service",
            service_epoch=self.service_epoch,
            max_staleness=self.settings.max_staleness,
            batch_groups=self.settings.batch_groups,
            on_late=self.settings.on_late,
        )
        self.scoring.settle_judges()
        if self.table.meta.learner[0]:
            self.batches.see_learner()

    def tick(self, now: float) -> None:
        """Leases of silent workers are lost. Late groups are settled by the claim that waits."""
        self.begin(now)
        self.leases.expire()
        self.scoring.expire()
        self.workers.expire(now, self.settings.lease_timeout_s)

    def hello(self, role: str, name: str, *, pid: int, host: str, now: float) -> None:
        """A process introduces itself and holds nothing: leases of an earlier process of that name are lost."""
        self.begin(now)
        self.workers.add(role, Worker(name, pid, host, now))
        if role == "producer":
            self.leases.lose_all(name, "restarted")
            self.workers.cancelled.pop(name, None)
            self.workers.barred.pop(name, None)
        elif role == "reward":
            self.scoring.lose_all(name)

    def heartbeat(
        self,
        role: str,
        name: str,
        *,
        pid: int,
        host: str,
        now: float,
        waiting_for: str = "",
        stats: dict[str, float] | None = None,
        holds: tuple[tuple[int, int], ...] | None = None,
    ) -> None:
        """A process is alive and keeps its leases; with `holds` only those that it names."""
        self.begin(now)
        worker = self.workers.get(role, name)
        if worker is None or worker.pid not in (0, pid):
            worker = self.workers.add(role, Worker(name))
            self.workers.barred.pop(name, None)
        worker.pid, worker.host, worker.seen, worker.stats = pid, host, now, stats or {}
        worker.update_wait(waiting_for, now)
        if role == "producer":
            self.leases.renew(name, pid, None if holds is None else frozenset(holds))
        elif role == "reward" and holds is not None:
            self.scoring.renew(name, holds)

    # ------------------------------------------------------------ producers and reward workers

    def lease(
        self, producer: str, *, engine_version: int, max_groups: int, request: int, now: float
    ) -> tuple[Lease, ...]:
        """The groups that this producer generates next, maybe none. The same request again gets the same leases.

        A waiting request is looked at many times, so this is not a sign of life of the producer; `workers.see` is.
        """
        self.begin(now)
        return self.group_leases.lease(producer, engine_version=engine_version, max_groups=max_groups, request=request)

    def lease_blocked(self, engine_version: int, producer: str = "") -> str:
        """Why a producer at this version gets nothing now; empty if it would get something."""
        return self.group_leases.blocked_reason(engine_version, producer)

    def give_back(self, message: LeaseReturn, *, now: float, guest: bool = False) -> None:
        """A producer returns leases; with `dead` the prompt itself is at fault."""
        self.begin(now)
        worker = self.workers.see("producer", message.producer, now)
        if message.reason in GRACEFUL and message.reason != SWAPPED:
            worker.capacity = 0  # it ends, so nothing is reserved for it
        if message.reason.startswith(ENVIRONMENT):
            self.partial.discard_failed(message.groups, message.producer)
        self.leases.give_back(message, guest=guest)

    def samples(
        self, head: Samples, *, checksum: int, invalid: Callable[[], str], keep: Callable[[], Record], now: float
    ) -> SamplesReply:
        """Take finished samples. `invalid` says why they may not be trained on, `keep` stores their bytes."""
        self.begin(now)
        return self.intake.take(head, checksum=checksum, invalid=invalid, keep=keep)

    def pieces(
        self, head: Pieces, *, invalid: Callable[[], str], keep: Callable[[Piece], Record], now: float
    ) -> PiecesReply:
        """Take pieces of samples. `invalid` says why they may not be kept, `keep` stores the bytes of one."""
        self.begin(now)
        return self.intake.pieces(head, invalid=invalid, keep=keep, partial=self.partial)

    def reward_lease(self, name: str, *, max_samples: int, request: int, now: float, judge: str = "") -> list[ToScore]:
        """Samples for this reward worker, oldest first. The same request again gets the same samples."""
        self.begin(now)
        return self.scoring.lease(name, max_samples=max_samples, request=request, judge=judge)

    def scores(self, message: Scores, *, now: float) -> ScoresReply:
        """Take scores and failures."""
        self.begin(now)
        self.workers.see("reward", message.worker, now).judge = message.judge
        return ScoresReply(*self.scoring.take(message))

    # ------------------------------------------------------------ the learner

    def register(
        self,
        *,
        name: str,
        pid: int,
        host: str,
        step: int,
        ledger: Ledger,
        takeover: bool,
        now: float,
        process_gone: bool = False,
        digests: dict[int, str] | None = None,
        once: int = 0,
    ) -> int:
        """Register a learner with its checkpoint of `step`; its epoch."""
        self.begin(now)
        return self.recovery.register(
            name=name,
            pid=pid,
            host=host,
            step=step,
            ledger=ledger,
            takeover=takeover,
            process_gone=process_gone,
            digests=digests,
            once=once,
        )

    def claim(self, *, epoch: int, step: int, version: int, now: float) -> Claimed | None:
        """The batch of `step`; None while it is not complete."""
        self.begin(now)
        return self.batches.claim(epoch=epoch, step=step, version=version)

    def commit(
        self, *, epoch: int, step: int, version: int, digest: str, now: float, groups: Sequence[int] | None = None
    ) -> None:
        """The optimizer step is done."""
        self.begin(now)
        self.batches.commit(epoch=epoch, step=step, version=version, digest=digest, groups=groups)

    def tune(self, changes: Mapping[str, Any], *, author: str, now: float) -> tuple[int, Changed, str]:
        """Change settings: the number of the change, key -> (old, new), a note."""
        self.begin(now)
        return self.live.tune(changes, author=author)

    def undo_tune(self, number: int, *, author: str, now: float) -> tuple[int, Changed, str]:
        """Return to the settings in force after change `number`; 0 is the configuration."""
        self.begin(now)
        return self.live.undo(number, author=author)

    def diagnosis(self, now: float) -> str:
        """Why the claim waits, in one sentence."""
        self.begin(now)
        return self._diagnosis.describe()


def finish_group(
    machine: GroupMachine, number: int, *, now: float, version: int | None = None, reward: float = 0.0
) -> str:
    """Send all missing samples of a leased group, made by `version` (None: the lease's). For examples and tests.

    Returns the name of the state that the group is in afterwards.
    """
    group = machine.table.groups[number]
    made_by = (group.deadline or 0) - group.bound if version is None else version
    missing = [index for index in range(machine.settings.group_size) if index not in group.samples]
    heads = tuple(SampleHead(index, 1, "stop", ((made_by, 1),)) for index in missing)
    head = Samples(group.holder, number, group.token, heads, {}, (), "", 1, rewards=dict.fromkeys(missing, reward))
    machine.samples(head, checksum=group.token, invalid=str, keep=lambda: Record(0, 0, 0, 0, group.token), now=now)
    found = machine.table.groups.get(number) or machine.table.ended[number]  # a filter may have dropped it
    return State(found.state).name
