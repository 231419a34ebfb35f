"""Registration of a learner, and the one step that makes the store agree with its checkpoint.

Called through `buffers.groups.Groups`. The checkpoint of step s0 wins over the store. Guarantees:
1. what the ledger trained is RETIRED, whatever the store says, and is never issued again (also where the store is
   empty);
2. recorded batches of s0 + 1, s0 + 2, ... come back by claim; a batch behind a gap returns to READY;
3. what the store retired and this (older) checkpoint does not hold is DROPPED as `rolled_back`, so its place is
   refilled;
4. a prompt issued before the checkpoint of which the store knows nothing is issued again under its id;
5. a second learner is refused while the first is heard from, unless it takes over; the first is then fenced.
"""

from __future__ import annotations

from asyncrl.errors import AsyncRLError, error_for
from buffers.book import Worker
from buffers.ledger import Ended, Group, IdSet, Ledger, State
from buffers.training import Training


class Reconciling(Training):
    """Training plus registration."""

    def register(
        self, *, name: str, pid: int, host: str, step: int, ledger: Ledger, takeover: bool, now: float,
        process_gone: bool = False, digests: dict[int, str] | None = None,
    ) -> int:  # fmt: skip
        """Take a learner in; its epoch. `process_gone`: the process registered before is known to have ended."""
        who = (name, pid, host)
        if self.fault is not None:
            raise error_for(*self.fault)
        if self.meta.learner == who and self.meta.registered_step == step:
            return self.meta.epoch  # a Register sent again
        self._refuse_second(who, takeover, process_gone, now)
        self.meta.epoch = max(self.meta.epoch, ledger.epoch) + 1
        self.meta.learner, self.meta.registered_step, self.meta.done = who, step, False
        self.workers[("learner", name)] = Worker(name, pid, host, now)
        self._reconcile(step, ledger, now)
        self.meta.newest = max(self.meta.newest, step)
        for version, digest in (digests or {}).items():
            self.note_digest(version, digest)
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
                "learner.duplicate", f"learner {name} (pid {pid} on {host}) was heard of {age:.1f} s ago, "
                f"at step {self.meta.version}",
            )  # fmt: skip

    @property
    def replay_to(self) -> int:
        """The last step whose batch is recorded; the committed version where there is none."""
        return self.frontier

    # ------------------------------------------------------------ reconcile

    def _reconcile(self, step: int, ledger: Ledger, now: float) -> None:
        trained = IdSet(ledger.trained)
        self._adopt_trained(trained)
        for number in [number for number in self.retired if number not in trained]:
            self._roll_back(number, now)
        self._adopt_ended(ledger, now)
        self._restore_batches(step)
        self._adopt_unknown(ledger.cursor, now)
        self.meta.version = step

    def _adopt_trained(self, trained: IdSet) -> None:
        """The checkpoint holds their gradient: they are consumed."""
        for number in trained:
            if number in self.retired:
                continue
            if number in self.ended:
                self._forget_ended(number)
            group = self.groups.get(number)
            if group is not None:
                if group.step in self.batches and number in self.batches[group.step].groups:
                    self._leave_batch(group)
                self._retire(group)
            else:
                self.retired.add(number)
                self._touch("retired")

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
                    if group.step in self.batches and number in self.batches[group.step].groups:
                        self._leave_batch(group)
                    self._end(group, state, reason, now, "by the ledger of the checkpoint")

    def _restore_batches(self, step: int) -> None:
        """Batches after `step` are claimed once more, as far as they follow each other; the others are given up."""
        follows = step + 1
        for number in sorted(self.batches):
            keep = number == follows
            follows += keep
            batch = self.batches[number]
            for member in list(batch.groups):
                group = self.groups[member]
                self._out(group)
                if keep:
                    group.state = State.CLAIMED
                else:
                    group.state, group.step, group.claimed = State.READY, 0, 0.0
                self._in(group)
            if not keep:
                del self.batches[number]
                self._touch(f"b{number}")

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
