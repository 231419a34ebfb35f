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

The transitions stand in layers, each a class on top of the one before: `book` (rows, indexes, changes), `tunable` (live
tuning), `judging` (poison, filters, budgets), `underway` (what was begun), `fairness` (shares of producers), `leasing`
(producers), `arriving` (samples), `pieces` (checkpoints of samples), `scoring` (reward workers), `training` (claim,
commit), `reconcile` (registration), and here the clock, the diagnosis. Guarantees:
1. time is passed in, randomness there is none: the same calls give the same decisions;
2. a decision touches memory only; `take()` gives the rows, events and free payloads for the store to apply at once;
3. `issued = leased + unscored + ready + claimed + trained + retired + dropped + dead` (`check`, on every commit);
4. with `on_late` wait or drop no group is claimed above its bound (staleness.md, section 4), whatever is tuned
   meanwhile; it is trained at most `max_reuse` times, as set when it was issued.

Example, B = 1, G = 2, eta = 2: the naive cap of (eta + 1) * B lets two quick groups overtake a slow one, and then two
groups are due at version 2. Here the claim at version 1 must hold r(2) = n(2) - (2 - 1) * 1 = 1 of the groups due at 2.

>>> from buffers.groups.records import Ledger, Settings
>>> groups = Groups(Settings(group_size=2, batch_groups=1, max_staleness=2, depth=2, total_groups=9))
>>> epoch = groups.register(name="l", pid=1, host="h", step=0, ledger=Ledger(), takeover=False, now=0.0)
>>> leases = groups.lease("p", engine_version=0, max_groups=9, request=1, now=0.0)
>>> [(lease.group, lease.deadline_version) for lease in leases]
[(0, 2), (1, 2), (2, 2)]
>>> groups.lease_blocked(0)
'no room before deadline 2: the learner must take a batch'
>>> [groups.finish(number, now=1.0) for number in (1, 2)]  # 0 is the slow one
['READY', 'READY']
>>> groups.claim(epoch=epoch, step=1, version=0, now=2.0).batch.groups
[1]
>>> groups.commit(epoch=epoch, step=1, version=1, digest="", now=3.0)
>>> groups.claim(epoch=epoch, step=2, version=1, now=4.0).batch.groups  # r(2) = 2 - 1 = 1, and 2 is due at 2
[2]
>>> groups.commit(epoch=epoch, step=2, version=2, digest="", now=5.0)
>>> groups.claim(epoch=epoch, step=3, version=2, now=6.0)  # r(2) = 1: only group 0 will do, it is waited for
>>> groups.diagnosis(7.0)
'step 3 waits 1.0 s for 1 group: 1 leased to p (last seen 6.0 s ago); late: group 0'
>>> groups.finish(0, now=8.0), groups.claim(epoch=epoch, step=3, version=2, now=8.0).batch.groups
('READY', [0])
>>> groups.tune({"max_staleness": 1, "pipeline_depth": 1}, author="me@here", now=9.0)[:2]  # 3 is leased with bound 1
(1, {'buffer.max_staleness': (2, 1), 'buffer.pipeline_depth': (2, 1)})
>>> leases = groups.lease("p", engine_version=2, max_groups=9, request=2, now=9.0)
>>> [(lease.group, lease.deadline_version) for lease in leases]
[(3, 3)]
>>> groups.check(); groups.ledger_counts()
{'issued': 4, 'leased': 1, 'unscored': 0, 'ready': 0, 'claimed': 1, 'trained': 2, 'retired': 0, 'dropped': 0, 'dead': 0}
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from asyncrl.config.judges import display_name
from asyncrl.wire import SampleHead, Samples
from buffers.groups.changes import Worker
from buffers.groups.reconcile import Reconciling
from buffers.groups.records import Record, State


class Groups(Reconciling):
    def tick(self, now: float) -> None:
        """What time alone does: leases of silent workers are lost. Late groups are settled by the claim that waits."""
        self.expire(now)

    def note_start(self, now: float) -> None:
        """The service starts: a learner that is registered gets its time to be heard from."""
        self._event(now, "service", service_epoch=self.service_epoch, max_staleness=self.settings.max_staleness)
        self.settle_judges(now)
        if self.meta.learner[0]:
            self.saw_learner(now)

    def note_emptied(self) -> None:
        """The run has a history, of which the store knows nothing: it waits for the ledger of a learner."""
        self.meta.emptied = True
        self._touch("meta")

    def finish(self, number: int, *, now: float, version: int | None = None, reward: float = 0.0) -> str:
        """All missing samples of a leased group at once, made by `version` (None: the lease's): for examples
        and tests.
        """
        group = self.groups[number]
        made_by = (group.deadline or 0) - group.bound if version is None else version
        missing = [index for index in range(self.settings.group_size) if index not in group.samples]
        heads = tuple(SampleHead(index, 1, "stop", ((made_by, 1),)) for index in missing)
        head = Samples(group.holder, number, group.token, heads, {}, (), "", 1, rewards=dict.fromkeys(missing, reward))
        self.samples(head, checksum=group.token, invalid=str, keep=lambda: Record(0, 0, 0, 0, group.token), now=now)
        found = self.groups.get(number) or self.ended[number]  # a filter may have dropped it
        return State(found.state).name

    # ------------------------------------------------------------ looking

    def diagnosis(self, now: float) -> str:
        """Who the claim waits for, in one sentence."""
        step = self.meta.version + 1
        size = self.batch_size(step)
        since = self.asked_since[1] if self.asked_since and self.asked_since[0] == step else now
        if size <= 0:
            return f"step {step}: all {self.settings.total_groups} groups of the run are in batches"
        missing = max(0, size - len(self.ready_order) - len(self._usable(step - 1)))
        late = self._late_ids(step)
        wanted = max(missing, len(late))
        head = f"step {step} waits {now - since:.1f} s for {wanted} group{'s' * (wanted != 1)}"
        parts = [*self._holders(now), *self._waiting_parts(now)] or [self._nobody(now)]
        tail = f"; late: group{'s' * (len(late) != 1)} {', '.join(map(str, late[:8]))}" if late else ""
        return f"{head}: {', '.join(parts)}{tail}"

    def _late_ids(self, step: int) -> list[int]:
        if self.late_since is None or self.late_since[0] != step:
            return []
        short = self._shortage(step - 1, self.batch_size(step))
        return [] if short is None else self._victims(short[0], short[1])

    def _holders(self, now: float) -> list[str]:
        held = sorted((name, len(ids)) for name, ids in self.held.items() if ids)
        return [f"{number} leased to {name} ({self._last_seen_words('producer', name, now)})" for name, number in held]

    def _last_seen_words(self, role: str, name: str, now: float) -> str:
        worker = self.workers.get((role, name))
        if worker is None:
            return "never seen by this service"
        who = f"pid {worker.pid} on {worker.host}, " if worker.pid else ""
        return f"{who}last seen {now - worker.seen:.1f} s ago"

    def _waiting_parts(self, now: float) -> list[str]:
        parts = []
        if self.pending:
            parts.append(f"{len(self.pending)} waiting for a producer")
        if self.counts[State.UNSCORED]:
            busy = Counter({name: len(keys) for name, keys in self.scores_due.held.items() if keys})
            by = [
                f"{number} samples at {name} ({self._last_seen_words('reward', name, now)})"
                for name, number in sorted(busy.items())
            ] + self._unheard_judges(now)
            parts.append(f"{self.counts[State.UNSCORED]} unscored" + (f" ({', '.join(by)})" if by else ""))
        return parts

    def _unheard_judges(self, now: float) -> list[str]:
        """Judges that samples wait for while none of their workers is alive."""
        alive = self.living_judges(now)
        silent = [name for name in self.judge_names() if self.scores_due.waits(name) and name not in alive]
        return [
            f"{self.scores_due.waits(name)} samples wait for judge {display_name(name)}, of which no worker is alive"
            for name in silent
        ]

    def _nobody(self, now: float) -> str:
        producers = [worker for (role, _), worker in self.workers.items() if role == "producer"]
        alive = [worker for worker in producers if now - worker.seen <= self.settings.lease_timeout_s]
        if not alive:
            last = sorted(producers, key=lambda worker: -worker.seen)[:4]
            told = [f"{worker.name} ({self._last_seen_words('producer', worker.name, now)})" for worker in last]
            return "none is leased and no producer is alive" + (f": {', '.join(told)}" if told else "")
        told = sorted(f"{worker.name} {worker.waiting_for or 'waits for work'}" for worker in alive)
        return f"none is leased; {'; '.join(told[:4])}"

    def workers_of(self, role: str, now: float) -> list[dict[str, Any]]:
        """The workers of a role for the status."""
        return [
            {
                "name": worker.name,
                "pid": worker.pid,
                "host": worker.host,
                "age_s": round(now - worker.seen, 3),
                "waiting_for": worker.waiting_for,
                "waiting_s": waited_s(worker, now),
                "stats": worker.stats,
                **({"judge": display_name(worker.judge)} if role == "reward" else {}),
            }
            for (kind, _), worker in sorted(self.workers.items())
            if kind == role
        ]


def waited_s(worker: Worker, now: float) -> float:
    """For how long it has been waiting without a break; 0 while it works."""
    return 0.0 if worker.waiting_since is None else round(now - worker.waiting_since, 3)
