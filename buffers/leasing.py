"""Producers' side of the state machine: lease, samples, loss, return.

Called through `buffers.groups.Groups`. Guarantees:
1. a lease is granted only where (F) holds with it and, for a new prompt, (D) and the run's total allow it;
2. a lost lease keeps the samples that arrived; only the missing ones are leased again, at most `max_reissue` times;
3. a group keeps the bound of its first lease, and its deadline while it holds samples; with none left it gets a new
   one;
4. a sample made by an older version than the lease's lowers the deadline, a newer one does not raise it;
5. an answer under an old token is refused, the same answer twice is acknowledged and changes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

from asyncrl.errors import AsyncRLError
from asyncrl.versions import oldest_version
from asyncrl.wire import Lease, LeaseReturn, Samples, SamplesReply
from buffers.admission import depth_allows, feasible
from buffers.book import Book, SampleEvent, Worker
from buffers.ledger import Group, Record, Sample, State

#: Reasons of a return that are no fault of the prompt: the attempt does not count.
GRACEFUL = frozenset({"stop", "stopping", "shutdown", "superseded"})


class Leasing(Book):
    """Book plus what producers do."""

    # ------------------------------------------------------------ workers

    def hello(self, role: str, name: str, *, pid: int, host: str, now: float) -> None:
        """A process introduces itself, holding nothing: what that name still holds here is lost at once."""
        self.workers[role, name] = Worker(name, pid, host, now)
        if role == "producer":
            for number in sorted(self.held.get(name, ())):
                self._lose(self.groups[number], "restarted", now)
        elif role == "reward":
            self._lose_scoring(name)

    def heartbeat(
        self, role: str, name: str, *, pid: int, host: str, now: float, waiting_for: str = "",
        stats: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        """A process is alive: its leases stay its own."""
        worker = self.workers.get((role, name))
        if worker is None or worker.pid not in (0, pid):
            worker = self.workers[role, name] = Worker(name)
            for number in sorted(self.held.get(name, ())) if role == "producer" else ():
                if self.groups[number].pid not in (0, pid):
                    self._lose(self.groups[number], "restarted", now)
        worker.pid, worker.host, worker.seen = pid, host, now
        worker.waiting_for, worker.stats = waiting_for, stats or {}

    def saw(self, role: str, name: str, now: float) -> Worker:
        """The worker of that name, seen now."""
        worker = self.workers.setdefault((role, name), Worker(name))
        worker.seen = now
        return worker

    def _lose_scoring(self, name: str) -> None:
        for key in sorted(self.scoring.pop(name, ())):
            del self.reward_leases[key]
            self.to_score[key] = None
        self.generation += 1

    def expire(self, now: float) -> None:
        """Take their leases from workers that were silent for `lease_timeout_s`."""
        limit = self.settings.lease_timeout_s
        for name in [name for name, ids in self.held.items() if ids]:
            if now - self._last_seen("producer", name, now) > limit:
                for number in sorted(self.held[name]):
                    self._lose(self.groups[number], "silent", now)
        for name in [name for name, keys in self.scoring.items() if keys]:
            if now - self._last_seen("reward", name, now) > limit:
                self._lose_scoring(name)

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
            group for number in sorted(self.held.get(producer, ()))
            if (group := self.groups[number]).request == request
        ]  # fmt: skip
        if again or request <= worker.answered:
            return tuple(self._granted(group) for group in again)
        granted: list[Lease] = []
        while len(granted) < max_groups:
            found = self._next_for(engine_version)
            if found is None:
                break
            granted.append(self._grant(found, worker, engine_version, request, now))
        return tuple(granted)

    def lease_blocked(self, engine_version: int) -> str:
        """Why a producer at this version gets nothing now; the empty string where it would get something."""
        settings = self.settings
        if engine_version < 0:
            return "the engine holds no weights yet"
        if engine_version > self.meta.newest + 1:
            return f"the engine is at version {engine_version}, the newest published one is {self.meta.newest}"
        lag = self._training_version - engine_version
        if lag > settings.depth:
            return f"the engine is {lag} versions behind, pipeline_depth is {settings.depth}: it must sync"
        if not self.pending and self._competing >= self.unclaimed:
            return "every prompt of the run is issued"
        if not self._fits(engine_version, settings.max_staleness):
            return f"no room before deadline {engine_version + settings.max_staleness}: the learner must take a batch"
        if not depth_allows(self.outstanding, depth=settings.depth, producer_lag=lag, batch=settings.batch_groups):
            return f"{self.outstanding} groups are ahead of the learner, pipeline_depth is {settings.depth}"
        return ""

    @property
    def _competing(self) -> int:
        return self.counts[State.LEASED] + self.counts[State.UNSCORED] + self.counts[State.READY]

    @property
    def _training_version(self) -> int:
        """The version that the step in training starts from; between steps the committed one."""
        return max(self.meta.version, self.frontier - 1)

    def _fits(self, engine_version: int, bound: int) -> bool:
        deadline = engine_version + bound
        v = self.frontier
        return deadline >= v and feasible(self.due, v=v, batch=self.settings.batch_groups, extra=deadline)

    def _next_for(self, engine_version: int) -> Group | None:
        """A group that waits for another attempt, earliest deadline first, else a new prompt; None: nothing allowed."""
        settings = self.settings
        lag = self._training_version - engine_version
        if engine_version < 0 or engine_version > self.meta.newest + 1 or lag > settings.depth:
            return None
        for number in self._pending_order():
            group = self.groups[number]
            if self._may_resume(group, engine_version, lag):
                return group
        if self._competing >= self.unclaimed or not self._fits(engine_version, settings.max_staleness):
            return None
        if not depth_allows(self.outstanding, depth=settings.depth, producer_lag=lag, batch=settings.batch_groups):
            return None
        return Group(self.meta.cursor, bound=settings.max_staleness)

    def _pending_order(self) -> list[int]:
        def urgency(number: int) -> tuple[float, int]:
            deadline = self.groups[number].deadline
            return (math.inf if deadline is None else deadline, number)

        return sorted(self.pending, key=urgency)

    def _may_resume(self, group: Group, engine_version: int, lag: int) -> bool:
        settings = self.settings
        if group.deadline is None:  # nothing of it arrived: like a new prompt, but it precedes those
            active = self.outstanding - sum(self.groups[number].deadline is None for number in self.pending)
            deep = depth_allows(active, depth=settings.depth, producer_lag=lag, batch=settings.batch_groups)
            return deep and self._fits(engine_version, group.bound)
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
            self._event(now, "issue", g=group.id)
        else:
            self._out(group)
        deadline = engine_version + group.bound
        group.deadline = deadline if group.deadline is None else min(deadline, group.deadline)
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
        return self._granted(group)

    def _granted(self, group: Group) -> Lease:
        missing = tuple(index for index in range(self.settings.group_size) if index not in group.samples)
        digest = hashlib.blake2b(f"{self.settings.seed}/{group.id}".encode(), digest_size=7).digest()
        return Lease(
            group.id, group.token, group.attempt, missing, int.from_bytes(digest, "little"), group.deadline or 0
        )

    # ------------------------------------------------------------ loss and return

    def _lose(self, group: Group, why: str, now: float, *, counts: bool = True) -> None:
        """The holder will not finish it: samples that arrived stay, the rest waits for another producer."""
        self._event(now, "lost", g=group.id, token=group.token, producer=group.holder, why=why)
        if counts and group.attempt >= self.settings.max_reissue:
            self._end(group, State.DEAD, "max_reissue", now, f"attempt {group.attempt}: {why}")
            return
        self._out(group)
        group.attempt += counts
        group.token, group.holder, group.pid, group.request = 0, "", 0, 0
        if not group.samples:
            group.deadline = None
        self._in(group)

    def _restart_group(self, group: Group, why: str, now: float) -> None:
        """All of its samples are given up; the prompt is issued again under the same id."""
        self._event(now, "lost", g=group.id, token=group.token, producer=group.holder, why=why)
        self._out(group)
        self._forget_samples(group)
        group.state, group.attempt, group.deadline, group.step = State.LEASED, group.attempt + 1, None, 0
        group.token, group.holder, group.pid, group.request = 0, "", 0, 0
        group.unscored = group.ready = group.claimed = 0.0
        self._in(group)

    def give_back(self, message: LeaseReturn, *, now: float) -> None:
        """A producer returns leases; with `dead` the prompt itself is at fault. Old tokens are ignored."""
        self.saw("producer", message.producer, now)
        for number, token in message.groups:
            group = self.groups.get(number)
            if group is None or group.state != State.LEASED or group.token != token or not token:
                continue
            if message.dead:
                self._end(group, State.DEAD, "prompt", now, message.reason)
            else:
                self._lose(group, message.reason, now, counts=message.reason not in GRACEFUL)

    # ------------------------------------------------------------ samples

    def samples(
        self, head: Samples, *, checksum: int, invalid: Callable[[], str], keep: Callable[[], Record], now: float
    ) -> SamplesReply:
        """Take finished samples. `invalid` says why they may not be trained on, `keep` stores their bytes."""
        self.saw("producer", head.producer, now)
        group = self.groups.get(head.group)
        if group is None:
            return SamplesReply((), (), {item.index: self._ended_reason(head.group) for item in head.samples})
        accepted, duplicate, refused = self._sort_samples(group, head, checksum)
        if not accepted:
            return SamplesReply((), tuple(duplicate), refused)
        reason = invalid() or self._wrong_digest(head) or self._wrong_rewards(head)
        if reason:
            self._poisoned(group, reason, now)
            return SamplesReply((), tuple(duplicate), refused | dict.fromkeys(accepted, f"poison: {reason}"))
        self._accept(group, head, set(accepted), keep(), now)
        return SamplesReply(tuple(accepted), tuple(duplicate), refused)

    def _ended_reason(self, number: int) -> str:
        if number in self.ended:
            return f"gone: {State(self.ended[number].state).name.lower()} ({self.ended[number].reason})"
        return "gone: retired" if number in self.retired else "unknown group"

    @staticmethod
    def _sort_samples(group: Group, head: Samples, checksum: int) -> tuple[list[int], list[int], dict[int, str]]:
        current = group.state == State.LEASED and head.token == group.token != 0
        if current and not group.samples:  # the usual case: everything is new
            return [item.index for item in head.samples], [], {}
        accepted: list[int] = []
        duplicate: list[int] = []
        refused: dict[int, str] = {}
        for item in head.samples:
            known = group.samples.get(item.index)
            if known is not None and known.token == head.token and group.records[known.record].checksum == checksum:
                duplicate.append(item.index)
            elif known is not None:
                refused[item.index] = "already there with other content"
            elif not current:
                refused[item.index] = "token: the lease was lost"
            else:
                accepted.append(item.index)
        return accepted, duplicate, refused

    def _wrong_digest(self, head: Samples) -> str:
        for version, digest in head.digests.items():
            known = self.digests.get(version)
            if known and digest and digest not in known:
                return f"digest: {head.producer} holds {digest} as version {version}, published was {known[-1]}"
        return ""

    @staticmethod
    def _wrong_rewards(head: Samples) -> str:
        if all(map(math.isfinite, head.rewards.values())):
            return ""
        bad = [index for index, reward in head.rewards.items() if not math.isfinite(reward)]
        return f"reward: of sample {bad[0]} is not finite"

    def _accept(self, group: Group, head: Samples, accepted: set[int], record: Record, now: float) -> None:
        self._out(group)
        number, at, rewards = len(group.records), self._stamp(now), head.rewards
        group.records.append(record)
        oldest_of_all = math.inf
        for item in head.samples:
            index, runs = item.index, item.runs
            if index not in accepted:
                continue
            if len(runs) == 1:  # one version for all tokens
                oldest = runs[0][0]
                digests = {oldest: head.digests.get(oldest, "")}
            else:
                oldest = oldest_version(runs) or 0
                digests = {version: head.digests.get(version, "") for version, _ in runs}
            oldest_of_all = min(oldest_of_all, oldest)
            reward = rewards.get(index)
            group.samples[index] = Sample(head.token, item.length, oldest, number, item.finish, reward)
            event = SampleEvent(at, group.id, index, head.token, head.producer, item.length, runs, digests, reward)
            self._events.append(event)
        group.deadline = min(group.deadline or 0, int(oldest_of_all) + group.bound)
        if len(group.samples) == self.settings.group_size:
            self._complete(group, now)
        self._in(group)

    def _complete(self, group: Group, now: float) -> None:
        """All samples are in (the group is out of the indexes)."""
        group.state, group.holder, group.unscored = State.UNSCORED, "", now + self.wall_offset
        self._event(now, "unscored", g=group.id)
        self._ready_if_scored(group, now)

    def _ready_if_scored(self, group: Group, now: float) -> None:
        if group.state != State.UNSCORED or any(sample.reward is None for sample in group.samples.values()):
            return
        self.meta.sequence += 1
        self._touch("meta")
        group.state, group.sequence, group.ready = State.READY, self.meta.sequence, now + self.wall_offset
        self._event(now, "ready", g=group.id)
        self.poison.append("")

    def _poisoned(self, group: Group, reason: str, now: float) -> None:
        kind = reason.split(":", maxsplit=1)[0]
        self._end(group, State.DEAD, f"poison:{kind}", now, reason)
        self._count_poison(reason)

    def _count_poison(self, reason: str) -> None:
        self.poison.append(reason)
        bad = [text for text in self.poison if text]
        if self.fault is None and len(bad) > self.settings.max_poison_rate * self.settings.poison_window:
            kinds = [text.split(":")[0] for text in bad]
            top = max(sorted(set(kinds)), key=kinds.count)
            last = [text for text in bad if text.split(":")[0] == top][-1]
            self.fault = (
                "poison.budget",
                f"{len(bad)} of the last {len(self.poison)} groups were poisoned, most by "
                f"{top} ({kinds.count(top)}); the last: {last}",
            )

    def lose_payloads(self, numbers: Sequence[int], *, now: float) -> None:
        """Their bytes are gone (power loss, damaged disk): generate them again; recorded ones are dead."""
        for number in numbers:
            group = self.groups[number]
            if group.state in (State.CLAIMED, State.TRAINED):
                self._leave_batch(group)
                self._end(group, State.DEAD, "payload_lost", now)
            elif group.attempt >= self.settings.max_reissue:
                self._end(group, State.DEAD, "max_reissue", now, "payload lost")
            else:
                self._restart_group(group, "payload_lost", now)

    def _leave_batch(self, group: Group) -> None:
        batch = self.batches.get(group.step)
        if batch is None:
            raise AsyncRLError("internal", f"group {group.id} is in no batch")
        batch.groups.remove(group.id)
        self._touch(f"b{batch.step}")
