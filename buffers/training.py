"""The learner's side of the state machine: claim, commit, quarantine, checkpoint, ledger.

Called through `buffers.groups.Groups`. Guarantees:
1. a claim leaves a feasible schedule behind: it holds r(u) groups due at u or before for every u; taking the READY
   groups
   by earliest deadline holds the most of them for every u at once, so the batch is the first B of that order;
2. with `wait` or `drop` no group is claimed above its bound: late ones are waited for, then dropped;
3. the batch of a step is recorded before it is handed out: the same step again gives the same groups in the same order;
4. a message of an older learner epoch is refused with `fenced`.
"""

from __future__ import annotations

import bisect
import math

import msgspec

from asyncrl.errors import AsyncRLError, Fenced, error_for
from buffers.admission import required
from buffers.ledger import Batch, Group, Ledger, State, ranges_of
from buffers.scoring import Scoring

KEPT_DIGESTS = 256


class Claimed(msgspec.Struct, frozen=True):
    """A recorded batch. `replayed` where a learner before this one had it already."""

    batch: Batch
    replayed: bool


class Training(Scoring):
    """Scoring plus what the learner does."""

    late_since: tuple[int, float] | None = None  # (step, since when) that the claim waits for late groups
    asked_since: tuple[int, float] | None = None  # (step, since when) that the claim waits at all

    def fence(self, epoch: int) -> None:
        """Refuse an older learner. An epoch from the future means that the store was lost: it must register again."""
        if epoch != self.meta.epoch:
            raise Fenced("fenced", f"learner epoch {epoch} is over, the registered one is {self.meta.epoch}")

    # ------------------------------------------------------------ claim

    def claim(self, *, epoch: int, step: int, version: int, now: float) -> Claimed | None:
        """The batch of `step`, None while it is not complete. Raises the run's fault where it has one."""
        self.fence(epoch)
        if self.meta.registered_step >= 0:
            self.meta.registered_step = -1
            self._touch("meta")
        if self.fault is not None:
            raise error_for(*self.fault)
        if step in self.batches:
            return self._again(self.batches[step], now)
        if step != version + 1 or version != self.meta.version:
            raise AsyncRLError(
                "wire.unexpected", f"claim of step {step} from version {version}: {self.meta.version} is committed"
            )
        if self.asked_since is None or self.asked_since[0] != step:
            self.asked_since = (step, now)
        chosen = self._choose(step, now)
        return None if chosen is None else self._record(step, chosen, now)

    def saw_learner(self, now: float) -> None:
        """The registered learner is alive (a claim that waits is looked at many times and is no sign of life)."""
        name, pid, host = self.meta.learner
        worker = self.saw("learner", name, now)
        worker.pid, worker.host = pid, host

    def _again(self, batch: Batch, now: float) -> Claimed:
        replayed = batch.epoch != self.meta.epoch
        self._event(
            now,
            "claim",
            step=batch.step,
            version=batch.version,
            epoch=self.meta.epoch,
            groups=list(batch.groups),
            replayed=replayed,
        )
        return Claimed(batch, replayed)

    def _choose(self, step: int, now: float) -> list[int] | None:
        size = min(self.settings.batch_groups, self.unclaimed)
        if size <= 0:
            return None
        if self.settings.on_late != "train" and not self._settle_late(step, size, now):
            return None
        if len(self.ready_order) < size:
            return None
        return [number for _, _, number in self.ready_order[:size]]

    def _settle_late(self, step: int, size: int, now: float) -> bool:
        """Make room for a batch that satisfies r(u) for every u, by the rule for late groups; False: wait for them."""
        v = step - 1
        for number in sorted(self.groups):
            group = self.groups[number]
            if group.state < State.CLAIMED and group.deadline is not None and group.deadline < v:
                self._late(group, f"due at version {group.deadline}, the step starts from {v}", now)
        while (short := self._shortage(v, size)) is not None:
            u, missing, excess = short
            if excess:  # more are due than a batch holds (older tokens than leased): waiting cannot help these
                for number in self._victims(u, excess):
                    self._late(self.groups[number], f"step {step} cannot hold all that are due at version {u}", now)
                continue
            if self.late_since is None or self.late_since[0] != step:
                self.late_since = (step, now)
            patient = self.settings.on_late == "wait" or len(self.ready_order) < size
            if patient and now - self.late_since[1] < self.settings.late_timeout_s:
                return False
            for number in self._victims(u, missing):
                self._late(self.groups[number], f"not ready when step {step} needed it", now)
        self.late_since = None
        return True

    def _shortage(self, v: int, size: int) -> tuple[int, int, int] | None:
        """The first u where the batch cannot hold r(u): u, how many are missing, how many are beyond any batch."""
        for u, wanted in required(self.due, v=v, batch=self.settings.batch_groups):
            ready = bisect.bisect_right(self.ready_order, (u, math.inf))
            if min(size, ready) < wanted:
                return u, wanted - min(size, ready), max(0, wanted - size)
        return None

    def _victims(self, u: int, count: int) -> list[int]:
        """Groups due at u or before that cannot be in the batch: first those not ready with least done."""
        due = [
            group for group in self.groups.values()
            if group.state < State.CLAIMED and group.deadline is not None and group.deadline <= u
        ]  # fmt: skip
        due.sort(key=lambda group: (group.state, group.deadline, len(group.samples), group.id))
        return [group.id for group in due[:count]]

    def _late(self, group: Group, why: str, now: float) -> None:
        if self.settings.on_late == "drop" and group.attempt < self.settings.max_reissue:
            self._restart_group(group, "late", now)
        else:
            self._end(group, State.DROPPED, "late", now, why)

    def _record(self, step: int, chosen: list[int], now: float) -> Claimed:
        batch = Batch(step, step - 1, self.meta.epoch, chosen, now + self.wall_offset)
        self.batches[step] = batch
        for number in chosen:
            self._take_in(self.groups[number], batch)
        self._touch(f"b{step}")
        self.asked_since = None
        return self._again(batch, now)

    # ------------------------------------------------------------ commit and after

    def commit(self, *, epoch: int, step: int, version: int, digest: str, now: float) -> None:
        """The optimizer step is done. A step that is committed already is acknowledged again."""
        self.fence(epoch)
        self.saw_learner(now)
        if step <= self.meta.version:
            return
        if step != self.meta.version + 1 or version != step or step not in self.batches:
            raise AsyncRLError(
                "wire.unexpected", f"commit of step {step} as version {version}: {self.meta.version} is committed and "
                f"the batch of the step is {'recorded' if step in self.batches else 'not recorded'}",
            )  # fmt: skip
        self.meta.version = version
        for number in self.batches[step].groups:
            self._take_in(self.groups[number], self.batches[step])
        self.meta.newest = max(self.meta.newest, version)
        self._touch("meta")
        self.note_digest(version, digest)
        self._event(
            now,
            "commit",
            step=step,
            version=version,
            epoch=epoch,
            digest=digest,
            groups=list(self.batches[step].groups),
        )
        self.settle(now)

    def note_digest(self, version: int, digest: str) -> None:
        """The weights of `version` have this digest. A version that was trained again may have two."""
        if version > self.meta.newest:
            self.meta.newest = version
            self._touch("meta")
        known = self.digests.get(version, ())
        if digest and digest not in known:
            self.digests[version] = (*known, digest)[-4:]
            for old in sorted(self.digests)[:-KEPT_DIGESTS]:
                del self.digests[old]
            self._touch("digests")

    def quarantine(self, *, epoch: int, step: int, groups: tuple[int, ...], reason: str, now: float) -> None:
        """Groups of a claimed step that the learner cannot use are DEAD and leave its batch."""
        self.fence(epoch)
        for number in groups:
            group = self.groups.get(number)
            if group is not None and group.state == State.CLAIMED and group.step == step:
                self._leave_batch(group)
                self._poisoned(group, reason, now)

    def ledger(self, *, epoch: int, step: int) -> Ledger:
        """What a checkpoint that contains `step` says about groups."""
        self.fence(epoch)
        if step > self.meta.version:
            raise AsyncRLError("wire.unexpected", f"ledger of step {step}: only {self.meta.version} is committed")
        trained = [group.id for group in self.groups.values() if group.state == State.TRAINED and group.step <= step]
        by_reason: dict[tuple[int, str], list[int]] = {}
        for ended in self.ended.values():
            by_reason.setdefault((ended.state, ended.reason), []).append(ended.id)
        ended_ranges = {key: ranges_of(numbers) for key, numbers in by_reason.items()}
        return Ledger(
            step=step, cursor=self.meta.cursor, epoch=self.meta.epoch,
            trained=ranges_of([*self.retired, *trained]) if trained else self.retired.ranges(),
            dropped={reason: found for (state, reason), found in ended_ranges.items() if state == State.DROPPED},
            dead={reason: found for (state, reason), found in ended_ranges.items() if state == State.DEAD},
        )  # fmt: skip

    def checkpointed(self, *, epoch: int, step: int, now: float) -> None:
        """A checkpoint that contains `step` is durable: what was trained up to it is RETIRED, its payloads are free."""
        self.fence(epoch)
        self.saw_learner(now)
        done = [number for number in sorted(self.batches) if number <= min(step, self.meta.version)]
        for number in done:
            for group in self.batches.pop(number).groups:
                self._retire(self.groups[group])
            self._touch(f"b{number}")
        if done:
            self._event(now, "retire", step=done[-1])
            self.settle(now)

    def goodbye(self, *, epoch: int, done: bool, reason: str, now: float) -> None:
        """The learner ends."""
        self.fence(epoch)
        self.meta.done = done
        self.workers.pop(("learner", self.meta.learner[0]), None)
        self.meta.learner = ("", 0, "")
        self._touch("meta")
        self._event(now, "end", done=done, reason=reason)
