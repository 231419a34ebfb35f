"""Registration of a learner, and the step that makes the store agree with the learner's checkpoint.

The checkpoint of step s0 wins over the store. Guarantees:
1. groups that the ledger trained are RETIRED, whatever the store says, and are never issued again, even if the store is
   empty;
2. recorded batches of s0 + 1, s0 + 2, ... are handed out again by claim; a batch behind a gap returns to READY;
3. groups that the store retired and this (older) checkpoint does not hold are DROPPED as `rolled_back`, so their places
   are refilled;
4. ids that the ledger has as `Archived` are at their end. If the store has other counts for them, those of the ledger
   are taken;
5. a prompt issued before the checkpoint that the store does not know is issued again under its id;
6. groups with samples of versions that the checkpoint and the recorded batches cannot reach again are generated anew:
   other weights will have these numbers. Samples of the abandoned weights that come later are refused by their digest,
   and a generator gets no work with them;
7. a second learner is refused while the first is heard from, unless it takes over; the first is then fenced.
"""

from __future__ import annotations

from asyncrl.errors import AsyncRLError, Fenced, error_for
from buffers.groups.batches import Batches
from buffers.groups.failure_budget import FailureBudget
from buffers.groups.group_table import GroupTable, abandon_versions, adopt, check_table, reopen, seal
from buffers.groups.leases import GroupLeases
from buffers.groups.live_settings import LiveSettings
from buffers.groups.partial_samples import PartialSamples
from buffers.groups.records import COMPETING, Ended, Group, Ledger, State
from buffers.groups.transaction import Transaction
from buffers.groups.workers import Worker, Workers
from buffers.values.archive import Archived
from buffers.values.id_set import IdSet, ranges_of

KEPT_REGISTRATIONS = 16


class Recovery:
    """Registers learners and reconciles the table with their checkpoints."""

    def __init__(
        self,
        tx: Transaction,
        table: GroupTable,
        *,
        workers: Workers,
        live: LiveSettings,
        budget: FailureBudget,
        leases: GroupLeases,
        partial: PartialSamples,
        batches: Batches,
    ) -> None:
        self.tx = tx
        self.table = table
        self.workers = workers
        self.live = live
        self.budget = budget
        self.leases = leases
        self.partial = partial
        self.batches = batches

    def note_state_lost(self) -> None:
        """The history holds transitions that the store does not: issue nothing before a learner's ledger is here."""
        self.table.meta.emptied = True
        self.table.put("meta")
        self.table.prompts.forget()

    def register(
        self,
        *,
        name: str,
        pid: int,
        host: str,
        step: int,
        ledger: Ledger,
        takeover: bool,
        process_gone: bool = False,
        digests: dict[int, str] | None = None,
        once: int = 0,
    ) -> int:
        """Register a learner; its epoch. Raises `learner.duplicate`, or the fault of the run.

        `process_gone`: the process registered before is known to have ended. `once`: random number of the message; a
        copy that arrives after the first claim must not fence its own learner, also where the store forgot the number.
        """
        meta, process = self.table.meta, (name, pid, host)
        given = dict(meta.registrations).get(once, 0) if once else 0
        if given:
            self.batches.fence(given)
            self.batches.see_learner()
            return given
        if self.budget.fault is not None:
            raise error_for(*self.budget.fault)
        if meta.learner == process and meta.registered_step == step and not meta.emptied:
            return meta.epoch  # a Register sent again
        if meta.learner == process and ledger.epoch < meta.epoch and step < meta.registered_step:
            raise Fenced("fenced", f"a registration at step {meta.registered_step} replaced this one at step {step}")
        if meta.done and not takeover and step < meta.version:  # it waited while the run was completed
            raise AsyncRLError(
                "learner.duplicate", f"the run is complete at step {meta.version}, this checkpoint is of step {step}"
            )
        self._refuse_second(process, takeover, process_gone)
        if meta.emptied and step not in (digests or {}) and step in self.table.digests:
            del self.table.digests[step]  # of weights that a later learner, unknown to this store, trained again
            self.table.put("digests")
        meta.epoch = max(meta.epoch, ledger.epoch) + 1
        meta.learner, meta.registered_step, meta.done, meta.emptied = process, step, False, False
        if once:
            meta.registrations = (*meta.registrations, (once, meta.epoch))[-KEPT_REGISTRATIONS:]
        self.workers.known["learner", name] = Worker(name, pid, host, self.tx.now)
        for version, digest in (digests or {}).items():
            self.table.add_digest(version, digest)
        self._reconcile(step, ledger)
        self.batches.late_since = self.batches.asked_since = None
        self.table.put("meta")
        self.tx.event("register", epoch=meta.epoch, step=step, pid=pid, host=host)
        seal(self.table)
        check_table(self.table)
        return meta.epoch

    def _refuse_second(self, process: tuple[str, int, str], takeover: bool, process_gone: bool) -> None:
        name, pid, host = self.table.meta.learner
        if not name or takeover or process_gone or (pid, host) == process[1:]:
            return
        age = self.tx.now - self.workers.find("learner", name, self.tx.now).seen
        if age <= self.live.current.learner_timeout_s:
            raise AsyncRLError(
                "learner.duplicate",
                f"learner {name} (pid {pid} on {host}) was heard from {age:.1f} s ago, "
                f"at step {self.table.meta.version}",
            )

    # ------------------------------------------------------------ reconcile

    def _reconcile(self, step: int, ledger: Ledger) -> None:
        table = self.table
        self.live.adopt(ledger.tuning)
        self._adopt_commits(step, ledger)
        trained = IdSet(ledger.trained)
        recorded = {number: len(batch.groups) for number, batch in table.batches.items()}
        self._adopt_archive(ledger.archived)
        self._adopt_trained(trained, ledger)
        for number in [number for number in table.retired if number not in trained]:
            self._roll_back(number)
        self._adopt_ended(ledger)
        self.restore_batches(step, trained, recorded)
        self._issue_unknown(ledger.cursor)
        table.meta.version = step
        abandon_versions(table, table.frontier)
        competing = [group for group in table.groups.values() if group.state in COMPETING]
        self.leases.restart_abandoned(competing, table.frontier)
        self.partial.discard_abandoned(table.frontier)

    def _adopt_commits(self, step: int, ledger: Ledger) -> None:
        """Write to the history the steps of the ledger whose commit never arrived here, or was forgotten."""
        for number, groups in sorted(ledger.steps.items()):
            if self.table.meta.version < number <= step:
                digest = self.table.digests.get(number, ("",))[-1]
                self.tx.event(
                    "commit", step=number, version=number, epoch=ledger.epoch, digest=digest, groups=list(groups)
                )

    def _adopt_archive(self, archived: Archived) -> None:
        """Open every chunk that the ledger does not have as archived. The others stay if the numbers agree; if not, the
        store is of another past, and what it knows of these prompts is given up."""
        table, ids = self.table, IdSet(archived.ranges)
        agrees = table.archive.agrees(archived)
        for chunk in table.archive.outside(ids):
            reopen(table, chunk)
        if agrees:
            return
        for number in [number for number in table.ended if number in ids]:
            table.remove_ended(number)
        for number in [number for number in table.retired if number in ids]:
            table.retired.discard(number)
        for group in [group for number, group in table.groups.items() if number in ids]:
            self._leave_batches(group)
            table.cancel(group, "by the ledger of the checkpoint")
            table.remove(group)
        table.put("retired")
        adopt(table, archived)

    def _adopt_trained(self, trained: IdSet, ledger: Ledger) -> None:
        """The checkpoint holds the gradient of these groups: they are retired, unless they may be trained again."""
        table = self.table
        for number in trained:
            if number in table.retired:
                continue
            if number in table.ended:
                table.remove_ended(number)
            group = table.groups.get(number)
            complete = group is not None and group.state in (State.READY, State.CLAIMED, State.TRAINED)
            if group is not None and complete and number in ledger.uses and group.max_uses > 1:
                self._adopt_uses(group, ledger.uses[number])
            elif group is not None:
                self._leave_batches(group)
                table.retire(group)
            else:
                table.retired.add(number)
                table.put("retired")

    def _adopt_uses(self, group: Group, steps: tuple[int, ...]) -> None:
        """These steps of the checkpoint have trained the group; recorded batches after them may hold it again."""
        batches = self.table.batches.items()
        recorded = [number for number, batch in batches if number > steps[-1] and group.id in batch.groups]
        with self.table.edit(group):
            group.uses = sorted({*steps, *recorded})
            group.step, group.state = group.uses[-1], State.TRAINED

    def _leave_batches(self, group: Group) -> None:
        for step in [step for step in group.uses if step in self.table.batches]:
            if group.id in self.table.batches[step].groups:
                self.table.batches[step].groups.remove(group.id)
                self.table.put(f"b{step}")

    def _roll_back(self, number: int) -> None:
        self.table.retired.discard(number)
        self.table.put("retired")
        self.table.add_ended(Ended(number, State.DROPPED, "rolled_back"))
        self.tx.event("drop", g=number, reason="rolled_back")

    def _adopt_ended(self, ledger: Ledger) -> None:
        """Groups that the ledger calls dropped or dead are so, unless the store knows their end better."""
        table = self.table
        for state, reasons in ((State.DROPPED, ledger.dropped), (State.DEAD, ledger.dead)):
            for reason, ranges in reasons.items():
                for number in IdSet(ranges):
                    if number in table.ended or number in table.retired:
                        continue
                    group = table.groups.get(number)
                    if group is None:
                        table.add_ended(Ended(number, state, reason))
                        continue
                    self._leave_batches(group)
                    table.end(group, state, reason, "by the ledger of the checkpoint")

    def restore_batches(self, step: int, trained: IdSet, recorded: dict[int, int]) -> None:
        """Batches after `step` are claimed once more as far as they follow each other; the others are dropped. A batch
        that the checkpoint took groups from (it had `recorded` before) belongs to another past: the store went back.
        """
        table = self.table
        follows = step + 1
        members: set[int] = set()
        for number in sorted(table.batches):
            members.update(table.batches[number].groups)
            if number == follows and len(table.batches[number].groups) == recorded[number]:
                follows += 1
            else:
                del table.batches[number]
                table.put(f"b{number}")
        members.update(group.id for group in table.groups.values() if group.uses)
        for member in sorted(members):
            self._restore_uses(table.groups[member], step, trained)

    def _restore_uses(self, group: Group, step: int, trained: IdSet) -> None:
        """Keep the steps in the checkpoint, and those whose batches are claimed once more."""
        batches = self.table.batches
        recorded = [n for n in group.uses if n > step and n in batches and group.id in batches[n].groups]
        before = [number for number in group.uses if number <= step] if group.id in trained else []
        with self.table.edit(group):
            group.uses = before + recorded
            group.step = group.uses[-1] if group.uses else 0
            group.state = State.CLAIMED if recorded else State.TRAINED if before else State.READY
            group.claimed = group.claimed if recorded else 0.0

    def _issue_unknown(self, cursor: int) -> None:
        """Issue prompts again that were issued before the checkpoint and that neither side knows now."""
        table = self.table
        known = IdSet([*table.archive.ids.ranges(), *table.retired.ranges(), *ranges_of((*table.groups, *table.ended))])
        table.meta.cursor = max(table.meta.cursor, cursor, *(end for _, end in known.ranges()[-1:]))
        bound = self.batches.schedule.bound
        for number in known.missing(table.meta.cursor):
            table.add(Group(number, attempt=1, bound=bound, issued=self.tx.wall_time))
            self.tx.event("lost", g=number, token=0, producer="", why="store_lost")
