"""Batches of the learner: claim, commit, quarantine, checkpoint.

Guarantees:
1. a claim leaves a feasible schedule behind: the batch holds r(u) groups due at u or before, for every u. Taking the
   READY groups by earliest deadline holds the most of them for every u at once;
2. with `on_late` wait or drop no group is claimed above its bound: late ones are waited for, then dropped;
3. the batch of a step is recorded before it is handed out: the same step again gives the same groups in the same order;
4. a message of an older learner epoch is refused (`fenced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from asyncrl.errors import AsyncRLError, Fenced, StateLost, error_for
from buffers.groups.failure_budget import FailureBudget
from buffers.groups.group_table import GroupTable
from buffers.groups.leases import GroupLeases
from buffers.groups.live_settings import LiveSettings
from buffers.groups.records import COMPETING, Batch, Group, Ledger, State
from buffers.groups.schedule import Schedule
from buffers.groups.transaction import Transaction
from buffers.groups.workers import Workers
from buffers.values.id_set import IdSet, ranges_of


class Claimed(msgspec.Struct, frozen=True):
    """A recorded batch. `replayed` if an earlier learner had it already."""

    batch: Batch
    replayed: bool


class Batches:
    """What the learner asks for. The batch of a step is recorded before it is handed out."""

    def __init__(
        self,
        tx: Transaction,
        table: GroupTable,
        *,
        workers: Workers,
        live: LiveSettings,
        schedule: Schedule,
        budget: FailureBudget,
        leases: GroupLeases,
    ) -> None:
        self.tx = tx
        self.table = table
        self.workers = workers
        self.live = live
        self.schedule = schedule
        self.budget = budget
        self.leases = leases
        self.late_since: tuple[int, float] | None = None  # step, time since when the claim waits for late groups
        self.asked_since: tuple[int, float] | None = None  # step, time since when the claim waits at all

    def fence(self, epoch: int) -> None:
        """Refuse an older learner, and every learner after the store lost state: it must register again.

        An epoch from the future means that the store was lost. Raises `fenced` or `buffer.lost_state`.
        """
        if self.table.meta.emptied:
            raise StateLost("buffer.lost_state", "no learner has registered since the store was emptied or restored")
        known = self.table.meta.epoch
        if epoch > known:
            raise StateLost("buffer.lost_state", f"learner epoch {epoch}: only {known} is known here")
        if epoch != known:
            raise Fenced("fenced", f"learner epoch {epoch} is over, the registered one is {known}")

    def see_learner(self) -> None:
        """A sign of life of the registered learner. A claim that waits is looked at many times and is none."""
        name, pid, host = self.table.meta.learner
        worker = self.workers.see("learner", name, self.tx.now)
        worker.pid, worker.host = pid, host

    # ------------------------------------------------------------ claim

    def claim(self, *, epoch: int, step: int, version: int) -> Claimed | None:
        """The batch of `step`; None while it is not complete. Raises the fault of the run, if it has one."""
        self.fence(epoch)
        if self.budget.fault is not None:
            raise error_for(*self.budget.fault)
        batch = self.table.batches.get(step)
        if batch is None:
            self._check_next(step, version)
        meta = self.table.meta
        if meta.registered_step >= 0:
            meta.registered_step = -1
            self.table.put("meta")
        if batch is not None:
            return self._hand_out(batch)
        if self.asked_since is None or self.asked_since[0] != step:
            self.asked_since = (step, self.tx.now)
            self.live.watch_claim(step)
        chosen = self.choose(step)
        return None if chosen is None else self.record(step, chosen)

    def _check_next(self, step: int, version: int) -> None:
        committed = self.table.meta.version
        if step == version + 1 and version > committed:
            raise StateLost("buffer.lost_state", f"claim of step {step}: only {committed} is committed here")
        if step != version + 1 or version != committed:
            raise AsyncRLError(
                "wire.unexpected", f"claim of step {step} from version {version}: {committed} is committed"
            )

    def _hand_out(self, batch: Batch) -> Claimed:
        replayed = batch.epoch != self.table.meta.epoch
        self.tx.event(
            "claim",
            step=batch.step,
            version=batch.version,
            epoch=self.table.meta.epoch,
            groups=list(batch.groups),
            replayed=replayed,
        )
        return Claimed(batch, replayed)

    def choose(self, step: int) -> list[int] | None:
        """The groups of the next batch; None while it must wait."""
        size = self.schedule.batch_size(step)
        if size <= 0:
            return None
        if self.live.current.on_late != "train" and not self.settle_late(step, size):
            return None
        chosen = self.schedule.choose(step, size)
        if chosen is None:
            return None
        fresh = [group for number in chosen if not (group := self.table.groups[number]).uses]
        return self.choose(step) if self.leases.restart_abandoned(fresh, step - 1) else chosen

    def settle_late(self, step: int, size: int) -> bool:
        """Make room for a batch that satisfies r(u) for every u, by the rule for late groups; False: wait for them."""
        v, settings = step - 1, self.live.current
        for group in self.schedule.overdue(v):
            self._give_up(group, f"due at version {group.deadline}, the step starts from {v}", waited=False)
        while (short := self.schedule.shortage(v, size)) is not None:
            u, missing, excess = short
            if excess:  # more are due than a batch holds (tokens older than the lease): waiting cannot help these
                for number in self.schedule.victims(u, excess):
                    why = f"step {step} cannot hold all that are due at version {u}"
                    self._give_up(self.table.groups[number], why, waited=False)
                continue
            if self.late_since is None or self.late_since[0] != step:
                self.late_since = (step, self.tx.now)
            too_few = len(self.table.indexes.ready) + len(self.schedule.usable(v)) < size
            if (settings.on_late == "wait" or too_few) and self.tx.now - self.late_since[1] < settings.late_timeout_s:
                if self.leases.take_from_silent(partial(self.schedule.victims, u, missing)):
                    continue
                return False
            for number in self.schedule.victims(u, missing):
                self._give_up(self.table.groups[number], f"not ready when step {step} needed it", waited=True)
        self.late_since = None
        return True

    def _give_up(self, group: Group, why: str, *, waited: bool) -> None:
        """Drop a late group, or issue its prompt again: with `on_late = "drop"`, or if waiting could not have helped
        because its tokens are older than its lease."""
        again = self.live.current.on_late == "drop" or not waited
        if again and group.attempt < self.live.current.max_reissue:
            self.leases.restart(group, "late")
        else:
            self.table.end(group, State.DROPPED, "late", why)

    def late_groups(self, step: int) -> list[int]:
        """The groups that the claim of `step` waits for because they are late."""
        if self.late_since is None or self.late_since[0] != step:
            return []
        short = self.schedule.shortage(step - 1, self.schedule.batch_size(step))
        return [] if short is None else self.schedule.victims(short[0], short[1])

    def record(self, step: int, chosen: list[int]) -> Claimed:
        """Record the batch of a step and hand it out."""
        overrides = self.live.tuning.learner_overrides()
        batch = Batch(step, step - 1, self.table.meta.epoch, chosen, self.tx.wall_time, overrides)
        self.table.add_batch(batch)
        self.asked_since = None
        self.live.watch_batch(step)
        return self._hand_out(batch)

    # ------------------------------------------------------------ commit and after

    def commit(self, *, epoch: int, step: int, version: int, digest: str, groups: Sequence[int] | None = None) -> None:
        """The optimizer step is done. A step that is committed already is acknowledged again.

        `groups` are those in the weights: a Quarantine can be lost when the store is restored to an older state, and a
        claim whose copy came late may have been recorded anew. Raises `buffer.lost_state`.
        """
        self.fence(epoch)
        self.see_learner()
        committed, batch = self.table.meta.version, self.table.batches.get(step)
        if step <= committed:
            return
        if version != step:
            raise AsyncRLError("wire.unexpected", f"commit of step {step} as version {version}")
        if step != committed + 1 or batch is None:  # it was claimed here, so the store went back
            raise StateLost(
                "buffer.lost_state",
                f"commit of step {step}: {committed} is committed here and the batch of "
                f"the step is {'recorded' if batch is not None else 'not recorded'}",
            )
        if groups is not None and set(groups) != set(batch.groups):
            raise StateLost(
                "buffer.lost_state",
                f"commit of step {step} with the groups {sorted(groups)}: recorded are {sorted(batch.groups)}",
            )
        self.table.commit_batch(batch)
        self.table.add_digest(version, digest)
        self.tx.event("commit", step=step, version=version, epoch=epoch, digest=digest, groups=list(batch.groups))
        self.table.verify()

    def quarantine(self, *, epoch: int, step: int, groups: Sequence[int], reason: str) -> None:
        """Groups of a claimed step that the learner cannot use are DEAD and leave its batch."""
        self.fence(epoch)
        for number in groups:
            group = self.table.groups.get(number)
            claimed = group is not None and group.state == State.CLAIMED and step in group.uses
            if group is not None and claimed and step > self.table.meta.version:
                self._end_claimed(group, f"poison:{reason.split(':', maxsplit=1)[0]}", reason)
                self.budget.count_poison(reason)

    def _end_claimed(self, group: Group, reason: str, detail: str = "") -> None:
        """A claimed group cannot be trained. One that an earlier step has trained stays TRAINED, for the last time."""
        version = self.table.meta.version
        open_steps = [step for step in group.uses if step > version]
        if any(step not in self.table.batches for step in open_steps):
            raise AsyncRLError("internal", f"group {group.id} is in no batch")
        for step in open_steps:
            self.table.batches[step].groups.remove(group.id)
            self.table.put(f"b{step}")
        trained = [step for step in group.uses if step <= version]
        if not trained:
            self.table.end(group, State.DEAD, reason, detail)
            return
        with self.table.edit(group):
            group.uses, group.step, group.max_uses, group.state = trained, trained[-1], len(trained), State.TRAINED
        self.tx.event("drop", g=group.id, reason=reason)

    def lose_payloads(self, numbers: Sequence[int]) -> None:
        """The bytes of these groups are gone: generate them again. Claimed ones are DEAD.

        A group in the weights of the registered learner stays TRAINED: its bytes are needed only if that learner is
        lost, too, and then its batch is claimed again.
        """
        for number in numbers:
            group = self.table.groups[number]
            if group.state == State.TRAINED:
                continue
            if group.state == State.CLAIMED:
                self._end_claimed(group, "payload_lost")
            elif group.attempt >= self.live.current.max_reissue:
                self.table.end(group, State.DEAD, "max_reissue", "payload lost")
            else:
                self.leases.restart(group, "payload_lost")

    def ledger(self, *, epoch: int, step: int) -> Ledger:
        """What a checkpoint that contains `step` says about groups."""
        self.fence(epoch)
        table = self.table
        if step > table.meta.version:
            raise StateLost("buffer.lost_state", f"ledger of step {step}: only {table.meta.version} is committed here")
        used = [group for group in table.groups.values() if group.uses and group.uses[0] <= step]
        trained = [group.id for group in used]
        by_reason: dict[tuple[int, str], list[int]] = {}
        for ended in table.ended.values():
            by_reason.setdefault((ended.state, ended.reason), []).append(ended.id)
        ended_ranges = {key: ranges_of(numbers) for key, numbers in by_reason.items()}
        return Ledger(
            step=step,
            cursor=table.meta.cursor,
            epoch=table.meta.epoch,
            trained=IdSet([*table.retired.ranges(), *ranges_of(trained)]).ranges(),
            dropped={reason: found for (state, reason), found in ended_ranges.items() if state == State.DROPPED},
            dead={reason: found for (state, reason), found in ended_ranges.items() if state == State.DEAD},
            tuning=self.live.checkpoint_text(),
            uses={group.id: tuple(n for n in group.uses if n <= step) for group in used if group.max_uses > 1},
            archived=table.archive.summary(),
        )

    def checkpointed(self, *, epoch: int, step: int) -> None:
        """A checkpoint that contains `step` is durable: groups trained up to it are RETIRED, their payloads freed."""
        self.fence(epoch)
        table = self.table
        if step > table.meta.version:
            what = f"checkpoint of step {step}: only {table.meta.version} is committed here"
            raise StateLost("buffer.lost_state", what)
        self.see_learner()
        done = [number for number in sorted(table.batches) if number <= step]
        members = {number for step in done for number in table.batches.pop(step).groups}
        reusable = (group.id for group in table.groups.values() if group.max_uses > 1 and group.state == State.TRAINED)
        for number in sorted(members.union(reusable)):
            group = table.groups[number]
            if self.schedule.is_used_up(group, step):
                table.retire(group)
            elif number in members:  # it may be trained again: from now on its own row says in which steps it was
                table.put(f"g{number}")
        for number in done:
            table.put(f"b{number}")
        if done:
            self.tx.event("retire", step=done[-1])
            table.verify()

    def goodbye(self, *, epoch: int, done: bool, reason: str, step: int = 0) -> None:
        """The learner ends, with `step` steps in its weights (0: it does not say)."""
        self.fence(epoch)
        table = self.table
        if step > table.meta.version:
            raise StateLost("buffer.lost_state", f"end after step {step}: only {table.meta.version} is committed here")
        for group in [group for group in table.groups.values() if done and group.state in COMPETING]:
            table.end(group, State.DROPPED, "surplus")  # re-use or smaller batches left no place for it
        table.meta.done = done
        self.workers.remove("learner", table.meta.learner[0])
        table.meta.learner = ("", 0, "")
        table.put("meta")
        self.tx.event("end", done=done, reason=reason)
