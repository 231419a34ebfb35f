"""The learner's side of the state machine: claim, commit, quarantine, checkpoint, ledger.

Called through `buffers.groups.machine.Groups`. Guarantees:
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
from collections.abc import Iterable, Sequence

import msgspec

from asyncrl.errors import AsyncRLError, Fenced, StateLost, error_for
from buffers.groups.records import COMPETING, Batch, Group, IdSet, Ledger, State, ranges_of
from buffers.groups.reuse import Entry, fill, spread, weighted
from buffers.groups.schedule import required
from buffers.groups.scoring import Scoring

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
        if epoch > self.meta.epoch:
            raise StateLost("buffer.lost_state", f"learner epoch {epoch}: only {self.meta.epoch} is known here")
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
        if step == version + 1 and version > self.meta.version:
            raise StateLost("buffer.lost_state", f"claim of step {step}: only {self.meta.version} is committed here")
        if step != version + 1 or version != self.meta.version:
            raise AsyncRLError(
                "wire.unexpected", f"claim of step {step} from version {version}: {self.meta.version} is committed"
            )
        if self.asked_since is None or self.asked_since[0] != step:
            self.asked_since = (step, now)
            self._watch_asked(step, now)
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
        size = self.batch_size(step)
        if size <= 0:
            return None
        if self.settings.on_late != "train" and not self._settle_late(step, size, now):
            return None
        used = self._usable(step - 1)
        if len(self.ready_order) + len(used) < size:
            return None
        chosen = self._mixed(step, size, used) if used else [number for _, _, number in self.ready_order[:size]]
        if not self._abandon([group for number in chosen if not (group := self.groups[number]).uses], step - 1, now):
            return chosen
        return self._choose(step, now)

    def _usable(self, v: int) -> list[Entry]:
        """Trained groups that the step from `v` may train once more, earliest deadline first."""
        return self.used_order[bisect.bisect_left(self.used_order, (v, -1, -1)) :]

    def _mixed(self, step: int, size: int, used: list[Entry]) -> list[int]:
        """A batch of fresh groups, r(u) of them at least, and of used ones."""
        settings = self.settings
        needed = max((number for _, number in required(self.due, v=step - 1, batch=self.plan)), default=0)

        def draw(entries: Sequence[Entry], count: int) -> list[Entry]:
            def weight(number: int) -> float:
                return math.pow(spread(self.groups[number]), settings.priority_exponent)

            return weighted(entries, weight, count, f"{settings.seed}/{step}/replay")

        return fill(self.ready_order, used, size=size, needed=min(needed, size), settings=settings, draw=draw)

    def _abandon(self, groups: Iterable[Group], newest: int, now: float) -> int:
        """Tokens of a version that does not exist (the learner went back to an older checkpoint) are not trained on:
        such groups are generated again. How many."""
        found = [
            group
            for group in groups
            if any(max(sample.oldest, sample.newest) > newest for sample in group.samples.values())
        ]
        for group in found:
            self._restart_group(group, "abandoned", now)
        return len(found)

    def _settle_late(self, step: int, size: int, now: float) -> bool:
        """Make room for a batch that satisfies r(u) for every u, by the rule for late groups; False: wait for them."""
        v = step - 1
        for group in self._overdue(v):
            self._late(group, f"due at version {group.deadline}, the step starts from {v}", now, waited=False)
        while (short := self._shortage(v, size)) is not None:
            u, missing, excess = short
            if excess:  # more are due than a batch holds (older tokens than leased): waiting cannot help these
                for number in self._victims(u, excess):
                    why = f"step {step} cannot hold all that are due at version {u}"
                    self._late(self.groups[number], why, now, waited=False)
                continue
            if self.late_since is None or self.late_since[0] != step:
                self.late_since = (step, now)
            patient = self.settings.on_late == "wait" or len(self.ready_order) + len(self._usable(v)) < size
            if patient and now - self.late_since[1] < self.settings.late_timeout_s:
                return False
            for number in self._victims(u, missing):
                self._late(self.groups[number], f"not ready when step {step} needed it", now, waited=True)
        self.late_since = None
        return True

    def _overdue(self, v: int) -> list[Group]:
        """Groups that compete with a deadline below `v`. Every claim that waits asks, so all are looked at only where
        there is one."""
        if min(self.due, default=v) >= v:
            return []
        found = (group for group in self.groups.values() if group.state < State.CLAIMED)
        late = [group for group in found if group.deadline is not None and group.deadline < v]
        return sorted(late, key=lambda group: group.id)

    def _shortage(self, v: int, size: int) -> tuple[int, int, int] | None:
        """The first u where the batch cannot hold r(u): u, how many are missing, how many are beyond any batch."""
        for u, wanted in required(self.due, v=v, batch=self.plan):
            ready = bisect.bisect_right(self.ready_order, (u, math.inf))
            if min(size, ready) < wanted:
                return u, wanted - min(size, ready), max(0, wanted - size)
        return None

    def _victims(self, u: int, count: int) -> list[int]:
        """Groups due at u or before that cannot be in the batch: first those not ready with least done."""
        due = [
            group
            for group in self.groups.values()
            if group.state < State.CLAIMED and group.deadline is not None and group.deadline <= u
        ]
        due.sort(key=lambda group: (group.state, group.deadline, len(group.samples), group.id))
        return [group.id for group in due[:count]]

    def _late(self, group: Group, why: str, now: float, *, waited: bool) -> None:
        """Give it up. With `wait` it was waited for, so that its time is over; where waiting could not help (its tokens
        are older than its lease) the prompt is not at fault, and is issued again like with `drop`."""
        again = self.settings.on_late == "drop" or not waited
        if again and group.attempt < self.settings.max_reissue:
            self._restart_group(group, "late", now)
        else:
            self._end(group, State.DROPPED, "late", now, why)

    def _record(self, step: int, chosen: list[int], now: float) -> Claimed:
        batch = Batch(step, step - 1, self.meta.epoch, chosen, now + self.wall_offset, self.tuning.learner())
        self.batches[step] = batch
        for number in chosen:
            self._take_in(self.groups[number], batch)
        self._touch(f"b{step}")
        self.asked_since = None
        self._watch_claimed(step, now)
        return self._again(batch, now)

    # ------------------------------------------------------------ commit and after

    def commit(
        self, *, epoch: int, step: int, version: int, digest: str, now: float, groups: Sequence[int] | None = None
    ) -> None:
        """The optimizer step is done. A step that is committed already is acknowledged again. `groups` of the weights:
        the word of a quarantine may be lost with a store that went back, and a claim of which a copy came late may be
        recorded anew.
        """
        self.fence(epoch)
        self.saw_learner(now)
        if step <= self.meta.version:
            return
        if version != step:
            raise AsyncRLError("wire.unexpected", f"commit of step {step} as version {version}")
        if step != self.meta.version + 1 or step not in self.batches:  # it was claimed here: the store went back
            raise StateLost(
                "buffer.lost_state",
                f"commit of step {step}: {self.meta.version} is committed here and the batch of "
                f"the step is {'recorded' if step in self.batches else 'not recorded'}",
            )
        if groups is not None and set(groups) != set(self.batches[step].groups):
            raise StateLost(
                "buffer.lost_state",
                f"commit of step {step} with the groups {sorted(groups)}: recorded are "
                f"{sorted(self.batches[step].groups)}",
            )
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
            if group is not None and group.state == State.CLAIMED and step in group.uses and step > self.meta.version:
                self._end_claimed(group, State.DEAD, f"poison:{reason.split(':', maxsplit=1)[0]}", now, reason)
                self._count_poison(reason)

    def ledger(self, *, epoch: int, step: int) -> Ledger:
        """What a checkpoint that contains `step` says about groups."""
        self.fence(epoch)
        if step > self.meta.version:
            raise StateLost("buffer.lost_state", f"ledger of step {step}: only {self.meta.version} is committed here")
        used = [group for group in self.groups.values() if group.uses and group.uses[0] <= step]
        trained = [group.id for group in used]
        by_reason: dict[tuple[int, str], list[int]] = {}
        for ended in self.ended.values():
            by_reason.setdefault((ended.state, ended.reason), []).append(ended.id)
        ended_ranges = {key: ranges_of(numbers) for key, numbers in by_reason.items()}
        return Ledger(
            step=step,
            cursor=self.meta.cursor,
            epoch=self.meta.epoch,
            trained=IdSet([*self.retired.ranges(), *ranges_of(trained)]).ranges(),
            dropped={reason: found for (state, reason), found in ended_ranges.items() if state == State.DROPPED},
            dead={reason: found for (state, reason), found in ended_ranges.items() if state == State.DEAD},
            tuning=self.tuning_text(),
            uses={group.id: tuple(n for n in group.uses if n <= step) for group in used if group.max_uses > 1},
        )

    def checkpointed(self, *, epoch: int, step: int, now: float) -> None:
        """A checkpoint that contains `step` is durable: what was trained up to it is RETIRED, its payloads are free."""
        self.fence(epoch)
        if step > self.meta.version:
            what = f"checkpoint of step {step}: only {self.meta.version} is committed here"
            raise StateLost("buffer.lost_state", what)
        self.saw_learner(now)
        done = [number for number in sorted(self.batches) if number <= step]
        held = {number for step in done for number in self.batches.pop(step).groups}
        lapsed = (group.id for group in self.groups.values() if group.max_uses > 1 and group.state == State.TRAINED)
        for number in sorted(held.union(lapsed)):
            group = self.groups[number]
            if self._used_up(group, step):
                self._retire(group)
            elif number in held:  # it may be trained again: from now on its own row says in which steps it was
                self._touch(f"g{number}")
        for number in done:
            self._touch(f"b{number}")
        if done:
            self._event(now, "retire", step=done[-1])
            self.settle(now)

    def _used_up(self, group: Group, step: int) -> bool:
        """No step after `step`, which is in a checkpoint, has trained the group or will."""
        if group.step > step:
            return False
        return len(group.uses) >= group.max_uses or (group.deadline or 0) < self.frontier or self.unclaimed <= 0

    def goodbye(self, *, epoch: int, done: bool, reason: str, now: float, step: int = 0) -> None:
        """The learner ends, with `step` steps in its weights (0: not said)."""
        self.fence(epoch)
        if step > self.meta.version:
            raise StateLost("buffer.lost_state", f"end after step {step}: only {self.meta.version} is committed here")
        for group in [group for group in self.groups.values() if done and group.state in COMPETING]:
            self._end(group, State.DROPPED, "surplus", now)  # re-use or smaller batches left no place for it
        self.meta.done = done
        self.workers.pop(("learner", self.meta.learner[0]), None)
        self.meta.learner = ("", 0, "")
        self._touch("meta")
        self._event(now, "end", done=done, reason=reason)
