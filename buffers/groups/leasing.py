"""Producers' side of the state machine: lease, samples, loss, return.

Called through `buffers.groups.machine.Groups`; the layer above `fairness`. Guarantees:
1. a lease is granted only where (F) holds with it and, for a new prompt, (D) and the run's total allow it;
2. a lost lease keeps the samples that arrived; only the missing ones are leased again, at most `max_reissue` times;
3. a group keeps the bound of its first lease, and its deadline while it holds samples; with none left it gets a new
   one;
4. from an emptied store nothing is leased before a learner has registered: its ledger says what was trained already;
5. who holds a group that is no longer wanted is told (`cancelled`), at every heartbeat for a while;
6. a group whose last attempt its environment failed is DEAD as `environment_failed`; more than `max_failed_groups` of
   these end the run (`environment.budget`).
"""

from __future__ import annotations

import hashlib

from asyncrl.wire import Lease, LeaseReturn
from buffers.groups.changes import Worker
from buffers.groups.fairness import Sharing
from buffers.groups.judging import ENVIRONMENT_FAILED
from buffers.groups.records import Group, State
from buffers.groups.schedule import depth_allows, feasible

#: Reasons of a return that are no fault of the prompt: the attempt does not count.
GRACEFUL = frozenset({"stop", "stopping", "shutdown", "superseded"})
#: Reasons of a loss of which the holder may know nothing: it is told, should it come back.
FORGOTTEN = frozenset({"silent"})
#: Preempted workers come back under new names, thousands in a long run: one that stays away is forgotten (or after ten
#: times `lease_timeout_s`, where that is longer).
FORGET_S = 3600.0
#: Workers that are remembered, beside those that hold something.
MOST_WORKERS = 4096
#: How the reasons of environments begin (`asyncrl.environment.EnvironmentFailure`).
OF_ENVIRONMENTS = "environment."


def lease_seed(seed: int, number: int, attempt: int) -> int:
    """The seed of a group's samples, 56 bits, from that of the run. Another attempt draws others: what failed by the
    text that it sampled would fail again. The history tells the attempt with every lease, and its token with every
    sample.

    >>> lease_seed(0, 7, 0) == lease_seed(0, 7, 0), lease_seed(0, 7, 0) == lease_seed(0, 7, 1)
    (True, False)
    """
    text = f"{seed}/{number}" + (f"/{attempt}" if attempt else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Leasing(Sharing):
    """The layer below plus the leases of producers."""

    # ------------------------------------------------------------ workers

    def hello(self, role: str, name: str, *, pid: int, host: str, now: float) -> None:
        """A process introduces itself, holding nothing: what that name still holds here is lost at once."""
        self._meet(role, Worker(name, pid, host, now))
        if role == "producer":
            for number in sorted(self.held.get(name, ())):
                self._lose(self.groups[number], "restarted", now)
            self.cancelled.pop(name, None)
            self.barred.pop(name, None)
        elif role == "reward":
            self._lose_scoring(name)

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
        """A process is alive: its leases stay its own; with `holds` only those that it names."""
        worker = self.workers.get((role, name))
        if worker is None or worker.pid not in (0, pid):
            worker = self._meet(role, Worker(name))
            self.barred.pop(name, None)
            for number in sorted(self.held.get(name, ())) if role == "producer" else ():
                if self.groups[number].pid not in (0, pid):
                    self._lose(self.groups[number], "restarted", now)
        worker.pid, worker.host, worker.seen = pid, host, now
        worker.waits(waiting_for, now)
        worker.stats = stats or {}
        if holds is not None:
            if role == "producer":
                self._lose_unnamed(name, frozenset(holds), now)
            elif role == "reward":
                limit = self.settings.lease_timeout_s
                self.generation += self.scores_due.lose_unnamed(name, holds, now=now, limit_s=limit)

    def _lose_unnamed(self, name: str, holds: frozenset[tuple[int, int]], now: float) -> None:
        """Leases that their living holder does not know of: the grant never arrived, or a store that went back forgot
        the samples that had been acknowledged. No fault of the prompt.
        """
        for number in sorted(self.held.get(name, ())):
            group = self.groups[number]
            if (number, group.token) in holds:
                self.named[number] = now
            elif now - self.named.setdefault(number, now) > self.settings.lease_timeout_s:
                self._lose(group, "unnamed", now, counts=False)

    def saw(self, role: str, name: str, now: float) -> Worker:
        """The worker of that name, seen now."""
        worker = self.workers.get((role, name)) or self._meet(role, Worker(name))
        worker.seen = now
        return worker

    def _meet(self, role: str, worker: Worker) -> Worker:
        """A worker that is new, or new under its name. Names are what peers say: who was not heard from for longest
        and holds nothing makes room."""
        self.workers.pop((role, worker.name), None)
        idle = ((other.seen, key) for key, other in self.workers.items() if not self._holds(*key))
        gone = min(idle, default=None) if len(self.workers) >= MOST_WORKERS else None
        if gone is not None:
            del self.workers[gone[1]]
            self.barred.pop(gone[1][1], None)
        self.workers[role, worker.name] = worker
        return worker

    def _holds(self, role: str, name: str) -> bool:
        if role == "learner":
            return name == self.meta.learner[0]
        return bool(self.held.get(name) if role == "producer" else self.scores_due.held.get(name))

    def _lose_scoring(self, name: str) -> None:
        self.scores_due.lose(name)
        self.generation += 1

    def expire(self, now: float) -> None:
        """Take their leases from workers that were silent for `lease_timeout_s`."""
        limit = self.settings.lease_timeout_s
        for name in list(self.cancelled):
            self.cancelled[name] = {key: e for key, e in self.cancelled[name].items() if now - e.since <= limit}
            if not self.cancelled[name]:
                del self.cancelled[name]
        for name in [name for name, ids in self.held.items() if ids]:
            if now - self._last_seen("producer", name, now) > limit:
                for number in sorted(self.held[name]):
                    self._lose(self.groups[number], "silent", now)
        for name in self.scores_due.busy():
            if now - self._last_seen("reward", name, now) > limit:
                self._lose_scoring(name)
        self._forget_workers(now, max(FORGET_S, 10 * limit))

    def _forget_workers(self, now: float, limit_s: float) -> None:
        """Drop who was silent for so long and holds nothing."""
        for (role, name), worker in list(self.workers.items()):
            if role != "learner" and now - worker.seen > limit_s and not self.held.get(name):
                del self.workers[role, name]
                if role == "producer":
                    self.held.pop(name, None)
                    self.barred.pop(name, None)

    def living_workers(self, judge: str, now: float) -> set[str]:
        """Reward workers of this judge that were heard from."""
        limit = self.settings.lease_timeout_s
        return {
            worker.name
            for (role, _), worker in self.workers.items()
            if role == "reward" and worker.judge == judge and now - worker.seen <= limit
        }

    def living_judges(self, now: float) -> set[str]:
        """Judges with a living worker."""
        return {judge for judge in self.judge_names() if self.living_workers(judge, now)}

    def _last_seen(self, role: str, name: str, now: float) -> float:
        worker = self.workers.get((role, name))
        return (worker or self.saw(role, name, now)).seen  # after a restart of the service everybody starts anew

    # ------------------------------------------------------------ lease

    def lease(
        self, producer: str, *, engine_version: int, max_groups: int, request: int, now: float
    ) -> tuple[Lease, ...]:
        """The groups that this producer generates next, maybe none. The same request again gets the same leases.

        A waiting request is looked at many times, so this is no sign of life of the producer: `saw` is.
        """
        worker = self.workers.get(("producer", producer)) or self.saw("producer", producer, now)
        again = [
            group for number in sorted(self.held.get(producer, ())) if (group := self.groups[number]).request == request
        ]
        if again or request <= worker.answered:
            return tuple(self._granted(group) for group in again)
        if self._is_barred(producer, engine_version, now):
            return ()
        granted: list[Lease] = []
        quota, holds = self.settings.max_groups_in_flight, len(self.held.get(producer, ()))
        most = max_groups if not quota else min(max_groups, quota - holds)
        room = min(most, self._fair_room(worker, holds + most, engine_version, now))
        while len(granted) < room:
            found = self._next_for(engine_version)
            if found is None:
                break
            granted.append(self._grant(found, worker, engine_version, request, now))
        return tuple(granted)

    def lease_blocked(self, engine_version: int, producer: str = "") -> str:
        """Why a producer at this version gets nothing now; the empty string where it would get something."""
        settings = self.settings
        if 0 < settings.max_groups_in_flight <= len(self.held.get(producer, ())):
            return f"{producer} holds {settings.max_groups_in_flight} groups, which is its quota (max_groups_in_flight)"
        if self.barred.get(producer, (-1, 0.0))[0] == engine_version >= 0:
            return f"what {producer} holds as version {engine_version} is not what was published: it must sync"
        if self.meta.emptied:
            return "the store was emptied and no learner has registered since: what is trained already is not known"
        if engine_version < 0:
            return "the engine holds no weights yet"
        if engine_version > self.meta.newest + 1:
            return f"the engine is at version {engine_version}, the newest published one is {self.meta.newest}"
        lag = self._training_version - engine_version
        if lag > settings.depth:
            return f"the engine is {lag} versions behind, pipeline_depth is {settings.depth}: it must sync"
        if self._next_for(engine_version) is not None:
            worker = self.workers.get(("producer", producer))
            return "" if worker is None or not worker.others else f"what is ready is kept for {worker.others}"
        if self._competing >= self.unclaimed:
            if not self.pending:
                return "every prompt of the run is issued"
            return f"no room for the {len(self.pending)} groups that wait: the learner must take a batch"
        if not self._fits(engine_version, settings.max_staleness):
            return f"no room before deadline {engine_version + settings.max_staleness}: the learner must take a batch"
        if not self._deep_enough(self.outstanding, lag):
            return f"{self.outstanding} groups are ahead of the learner, pipeline_depth is {settings.depth}"
        return f"no room for the {len(self.pending)} groups that wait: the learner must take a batch"

    def _is_barred(self, producer: str, engine_version: int, now: float) -> bool:
        """Its samples of this version carried a wrong digest, a moment ago."""
        version, until = self.barred.get(producer, (engine_version, now))
        if version == engine_version and now < until:
            return True
        self.barred.pop(producer, None)
        return False

    def _fits(self, engine_version: int, bound: int) -> bool:
        deadline = engine_version + bound
        v = self.frontier
        return deadline >= v and feasible(self.due, v=v, batch=self.plan, extra=deadline)

    def _deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        """(D): one more group may be under way."""
        v = self._training_version
        return depth_allows(outstanding, depth=self.settings.depth, producer_lag=producer_lag, batch=self.plan, v=v)

    def _next_for(self, engine_version: int) -> Group | None:
        """A group that waits for another attempt, earliest deadline first, else a new prompt; None: nothing allowed."""
        settings = self.settings
        lag = self._training_version - engine_version
        if self.meta.emptied:
            return None
        if engine_version < 0 or engine_version > self.meta.newest + 1 or lag > settings.depth:
            return None
        found = self._next_pending(engine_version, lag)
        if found is not None:
            return found
        if self._competing >= self.unclaimed or not self._fits(engine_version, settings.max_staleness):
            return None
        if not self._deep_enough(self.outstanding, lag):
            return None
        return Group(self.meta.cursor, bound=settings.max_staleness, max_uses=settings.max_reuse)

    def _next_pending(self, engine_version: int, lag: int) -> Group | None:
        """Of the groups that wait for another attempt the first that may have it. Those of which nothing arrived differ
        by their bounds alone: each bound is judged once."""
        order, place = self.pending_order, len(self.pending_order) - self._unbegun
        for _, number in order[:place]:
            if self._may_resume(self.groups[number], engine_version, lag):
                return self.groups[number]
        judged: set[int] = set()
        for _, number in order[place:]:
            group = self.groups[number]
            if group.bound not in judged and self._may_resume(group, engine_version, lag):
                return group
            judged.add(group.bound)
        return None

    def _may_resume(self, group: Group, engine_version: int, lag: int) -> bool:
        if group.deadline is None:  # nothing of it arrived: like a new prompt, but it precedes those
            active = self.outstanding - self._unbegun
            return self._deep_enough(active, lag) and self._fits(engine_version, group.bound)
        if engine_version + group.bound >= group.deadline:
            return True
        self._out(group)  # these samples will be older than those it has: the deadline falls
        fits = self._fits(engine_version, group.bound)
        self._index(group)
        return fits

    def _grant(self, group: Group, worker: Worker, engine_version: int, request: int, now: float) -> Lease:
        if group.id == self.meta.cursor:
            self.meta.cursor += 1
            self._touch("meta")
            self.groups[group.id] = group
            group.issued = now + self.wall_offset
            self._event(now, "issue", g=group.id, **({"uses": group.max_uses} if group.max_uses > 1 else {}))
        else:
            self._out(group)
        deadline = engine_version + group.bound
        deadline = deadline if group.deadline is None else min(deadline, group.deadline)
        group.deadline = self._hand_out(group, deadline, now) if group.underway else deadline
        group.token, group.holder, group.pid, group.request = self._new_token(), worker.name, worker.pid, request
        self._in(group)
        self._event(
            now,
            "lease",
            g=group.id,
            token=group.token,
            attempt=group.attempt,
            producer=worker.name,
            w=engine_version,
            deadline=group.deadline,
            bound=group.bound,
        )
        if group.underway:
            self._tell_continued(group, now)
        return self._granted(group)

    def _granted(self, group: Group) -> Lease:
        asked = self.settings.group_size + self.settings.over_issue
        missing = tuple(index for index in range(asked) if index not in group.samples)
        # A sample that goes on elsewhere is the one that it would have been: its seed stays.
        seed = lease_seed(self.settings.seed, group.id, 0 if self.settings.continues else group.attempt)
        return Lease(group.id, group.token, group.attempt, missing, seed, group.deadline or 0)

    # ------------------------------------------------------------ loss and return

    def _lose(self, group: Group, why: str, now: float, *, counts: bool = True) -> None:
        """The holder will not finish it: samples that arrived stay, the rest waits for another producer."""
        self._event(now, "lost", g=group.id, token=group.token, producer=group.holder, why=why)
        if counts and group.attempt >= self.settings.max_reissue:
            reason = ENVIRONMENT_FAILED if why.startswith(OF_ENVIRONMENTS) else "max_reissue"
            self._end(group, State.DEAD, reason, now, f"attempt {group.attempt}: {why}", tell=why in FORGOTTEN)
            if reason == ENVIRONMENT_FAILED:
                self._count_failed(reason, why)
            return
        if why in FORGOTTEN:
            self._tell_holder(group, now)
        self._out(group)
        group.attempt += counts
        group.token, group.holder, group.pid, group.request = 0, "", 0, 0
        if not group.samples:
            group.deadline = None
        self._in(group)

    def _restart_group(self, group: Group, why: str, now: float) -> None:
        """All of its samples are given up; the prompt is issued again under the same id."""
        self._event(now, "lost", g=group.id, token=group.token, producer=group.holder, why=why)
        self._cancel(group, why, now)
        self._out(group)
        self._forget_samples(group)
        group.state, group.attempt, group.deadline, group.step = State.LEASED, group.attempt + 1, None, 0
        group.token, group.holder, group.pid, group.request = 0, "", 0, 0
        group.unscored = group.ready = group.claimed = 0.0
        group.uses = []
        self._in(group)

    def give_back(self, message: LeaseReturn, *, now: float) -> None:
        """A producer returns leases; with `dead` the prompt itself is at fault. Old tokens are ignored."""
        self.saw("producer", message.producer, now)
        if message.reason in GRACEFUL:
            self.workers["producer", message.producer].capacity = 0  # it ends: nothing is kept for it
        for number, token in message.groups:
            group = self.groups.get(number)
            if group is None or group.state != State.LEASED or group.token != token or not token:
                continue
            if message.dead:
                self._end(group, State.DEAD, "prompt", now, message.reason, tell=False)
            else:
                self._lose(group, message.reason[:200], now, counts=message.reason not in GRACEFUL)
