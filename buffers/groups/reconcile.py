"""Registration of a learner, and the one step that makes the store agree with its checkpoint.

Called through `buffers.groups.machine.Groups`. The checkpoint of step s0 wins over the store. Guarantees:
1. what the ledger trained is RETIRED, whatever the store says, and is never issued again (also where the store is
   empty);
2. recorded batches of s0 + 1, s0 + 2, ... come back by claim; a batch behind a gap returns to READY;
3. what the store retired and this (older) checkpoint does not hold is DROPPED as `rolled_back`, so its place is
   refilled;
4. a prompt issued before the checkpoint of which the store knows nothing is issued again under its id;
5. samples of versions that the checkpoint and the recorded batches cannot reach again are given up, their groups are
   generated anew: another weight of the same number made them;
6. a second learner is refused while the first is heard from, unless it takes over; the first is then fenced.
"""

from __future__ import annotations

from asyncrl.errors import AsyncRLError, error_for
from buffers.groups.changes import Worker
from buffers.groups.records import COMPETING, Ended, Group, IdSet, Ledger, State
from buffers.groups.training import Training

KEPT_REGISTRATIONS = 16


class Reconciling(Training):
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
        """Take a learner in; its epoch. `process_gone`: the process registered before is known to have ended. `once`:
        random number of the message: a copy that arrives after the first claim must not fence the learner it is from.
        """
        who = (name, pid, host)
        given = dict(self.meta.registrations).get(once, 0) if once else 0
        if given:
            self.fence(given)
            self.saw_learner(now)
            return given
        if self.fault is not None:
            raise error_for(*self.fault)
        if self.meta.learner == who and self.meta.registered_step == step:
            return self.meta.epoch  # a Register sent again
        if self.meta.done and not takeover and step < self.meta.version:  # it waited while the run was completed
            raise AsyncRLError(
                "learner.duplicate",
                f"the run is complete at step {self.meta.version}, this checkpoint is of step {step}",
            )
        self._refuse_second(who, takeover, process_gone, now)
        self.meta.epoch = max(self.meta.epoch, ledger.epoch) + 1
        self.meta.learner, self.meta.registered_step, self.meta.done = who, step, False
        self.meta.emptied = False
        if once:
            self.meta.registrations = (*self.meta.registrations, (once, self.meta.epoch))[-KEPT_REGISTRATIONS:]
        self.workers[("learner", name)] = Worker(name, pid, host, now)
        for version, digest in (digests or {}).items():
            self.note_digest(version, digest)
        self._reconcile(step, ledger, now)
        self.meta.newest = max(self.meta.newest, step)
        self.late_since = self.asked_since = None
        self._touch("meta")
        self._event(now, "register", epoch=self.meta.epoch, step=step, pid=pid, host=host)
        self.check()
        return self.meta.epoch

    def _refuse_second(self, who: tuple[str, int, str], takeover: bool, process_gone: bool, now: float) -> None:
        name, pid, host = self.meta.learner
        if not name or takeover or process_gone or (pid, host) == who[1:]:
            return
        first = self.workers.get(("learner", name)) or self.saw("learner", name, now)
        age = now - first.seen
        if age <= self.settings.learner_timeout_s:
            raise AsyncRLError(
                "learner.duplicate",
                f"learner {name} (pid {pid} on {host}) was heard of {age:.1f} s ago, at step {self.meta.version}",
            )

    @property
    def replay_to(self) -> int:
        """The last step whose batch is recorded; the committed version where there is none."""
        return self.frontier

    # ------------------------------------------------------------ reconcile

    def _reconcile(self, step: int, ledger: Ledger, now: float) -> None:
        self.adopt_tuning(ledger.tuning)
        self._adopt_commits(step, ledger, now)
        trained = IdSet(ledger.trained)
        recorded = {number: len(batch.groups) for number, batch in self.batches.items()}
        self._adopt_trained(trained, ledger)
        for number in [number for number in self.retired if number not in trained]:
            self._roll_back(number, now)
        self._adopt_ended(ledger, now)
        self._restore_batches(step, trained, recorded)
        self._adopt_unknown(ledger.cursor, now)
        self.meta.version = step
        self._abandon([group for group in self.groups.values() if group.state in COMPETING], self.frontier, now)
        self._abandon_underway(self.frontier, now)

    def _adopt_commits(self, step: int, ledger: Ledger, now: float) -> None:
        """Steps of the ledger whose commit never arrived here, or was forgotten, are told to the history."""
        for number, groups in sorted(ledger.steps.items()):
            if self.meta.version < number <= step:
                digest = self.digests.get(number, ("",))[-1]
                self._event(
                    now, "commit", step=number, version=number, epoch=ledger.epoch, digest=digest, groups=list(groups)
                )

    def _adopt_trained(self, trained: IdSet, ledger: Ledger) -> None:
        """The checkpoint holds their gradient: they are consumed, but for those that may be trained again."""
        for number in trained:
            if number in self.retired:
                continue
            if number in self.ended:
                self._forget_ended(number)
            group = self.groups.get(number)
            complete = group is not None and group.state in (State.READY, State.CLAIMED, State.TRAINED)
            if group is not None and complete and number in ledger.uses and group.max_uses > 1:
                self._adopt_uses(group, ledger.uses[number])
            elif group is not None:
                self._forget_batches(group)
                self._retire(group)
            else:
                self.retired.add(number)
                self._touch("retired")

    def _adopt_uses(self, group: Group, steps: tuple[int, ...]) -> None:
        """These steps of the checkpoint have trained it; recorded batches after them may hold it again."""
        self._out(group)
        recorded = [number for number, batch in self.batches.items() if number > steps[-1] and group.id in batch.groups]
        group.uses = sorted({*steps, *recorded})
        group.step, group.state = group.uses[-1], State.TRAINED
        self._in(group)

    def _forget_batches(self, group: Group) -> None:
        for step in [step for step in group.uses if step in self.batches]:
            if group.id in self.batches[step].groups:
                self.batches[step].groups.remove(group.id)
                self._touch(f"b{step}")

    def _roll_back(self, number: int, now: float) -> None:
        self.retired.discard(number)
        self._touch("retired")
        self._note_ended(Ended(number, State.DROPPED, "rolled_back"))
        self._touch(f"x{number}")
        self._event(now, "drop", g=number, reason="rolled_back")

    def _adopt_ended(self, ledger: Ledger, now: float) -> None:
        """What the checkpoint's ledger calls dropped or dead is so, unless the store knows its end better."""
        for state, reasons in ((State.DROPPED, ledger.dropped), (State.DEAD, ledger.dead)):
            for reason, ranges in reasons.items():
                for number in IdSet(ranges):
                    if number in self.ended or number in self.retired:
                        continue
                    group = self.groups.get(number)
                    if group is None:
                        self._note_ended(Ended(number, state, reason))
                        self._touch(f"x{number}")
                        continue
                    self._forget_batches(group)
                    self._end(group, state, reason, now, "by the ledger of the checkpoint")

    def _restore_batches(self, step: int, trained: IdSet, recorded: dict[int, int]) -> None:
        """Batches after `step` are claimed once more, as far as they follow each other; the others are given up. One of
        which the checkpoint took groups (it had `recorded` before) belongs to another past: the store went back.
        """
        follows = step + 1
        members: set[int] = set()
        for number in sorted(self.batches):
            members.update(self.batches[number].groups)
            if number == follows and len(self.batches[number].groups) == recorded[number]:
                follows += 1
            else:
                del self.batches[number]
                self._touch(f"b{number}")
        members.update(group.id for group in self.groups.values() if group.uses)
        for member in sorted(members):
            self._restore_uses(self.groups[member], step, trained)

    def _restore_uses(self, group: Group, step: int, trained: IdSet) -> None:
        """What is left of its steps: those in the checkpoint, and those whose batches are claimed once more."""
        recorded = [number for number in group.uses if number > step and group.id in self._members(number)]
        before = [number for number in group.uses if number <= step] if group.id in trained else []
        self._out(group)
        group.uses = before + recorded
        group.step = group.uses[-1] if group.uses else 0
        group.state = State.CLAIMED if recorded else State.TRAINED if before else State.READY
        group.claimed = group.claimed if recorded else 0.0
        self._in(group)

    def _members(self, step: int) -> list[int]:
        batch = self.batches.get(step)
        return [] if batch is None else batch.groups

    def _adopt_unknown(self, cursor: int, now: float) -> None:
        """Prompts that were issued before the checkpoint and that nobody knows now are issued again."""
        self.meta.cursor = max(self.meta.cursor, cursor, *(end for _, end in self.retired.ranges()[-1:]))
        if len(self.groups) + len(self.ended) + len(self.retired) == self.meta.cursor:
            return
        for number in range(self.meta.cursor):
            if number in self.groups or number in self.ended or number in self.retired:
                continue
            group = Group(number, attempt=1, bound=self.settings.max_staleness, issued=now + self.wall_offset)
            self.groups[number] = group
            self._in(group)
            self._event(now, "lost", g=number, token=0, producer="", why="store_lost")
