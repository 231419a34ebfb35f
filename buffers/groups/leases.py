"""Leases of producers: training groups, and the prompts of an evaluation, by the same rules.

Guarantees:
1. a lost lease keeps the samples that arrived; only the missing ones are leased again, at most `max_reissue` times;
2. the same request gets the same leases; an answer under an old token is refused;
3. the holder of a lost lease is asked to stop, at every heartbeat for a while;
4. a training group is leased only if (F) holds with it and, for a new prompt, (D) and the run's total allow it. It
   keeps the bound of its first lease, and its deadline while it holds samples; with none left it gets a new one;
5. nothing is leased from a store that lost state before a learner has registered: its ledger says what is trained;
6. a group whose last attempt its environment failed is DEAD as `environment_failed`; more than `max_failed_groups` of
   these end the run (`environment.budget`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from asyncrl.wire import Lease, LeaseReturn
from buffers.groups.failure_budget import ENVIRONMENT_FAILED, FailureBudget
from buffers.groups.fair_share import FairShare
from buffers.groups.group_table import GroupTable
from buffers.groups.live_settings import LiveSettings
from buffers.groups.partial_samples import PartialSamples
from buffers.groups.records import Group, State
from buffers.groups.schedule import Schedule
from buffers.groups.transaction import Edit, Transaction
from buffers.groups.workers import Worker, Workers

SWAPPED = "swapped"  # reason of a producer that cannot keep the version of held-out prompts
#: Reasons of a return that are not the prompt's fault: the attempt does not count.
GRACEFUL = frozenset({"stop", "stopping", "shutdown", "superseded", SWAPPED})
#: Reasons of a loss that the holder may not know of: it is asked to stop if it returns.
UNKNOWN_TO_HOLDER = frozenset({"silent"})
LATE_SHARE, LATE_LEAST_S = 1 / 3, 5.0  # of `lease_timeout_s`; some heartbeats of a producer that is busy come late
#: Prefix of the reasons of environments (`asyncrl.environment.EnvironmentFailure`).
ENVIRONMENT = "environment."
REASON_CHARS = 200
#: Groups of one answer; a larger request gets the rest with its next one.
MOST_GROUPS_PER_ANSWER = 4096


def lease_seed(seed: int, number: int, attempt: int) -> int:
    """The seed of a group's samples, 56 bits. Another attempt draws other samples, because a failure that depends on
    the sampled text would repeat. The history holds the attempt of every lease and the token of every sample.

    >>> lease_seed(0, 7, 0) == lease_seed(0, 7, 0), lease_seed(0, 7, 0) == lease_seed(0, 7, 1)
    (True, False)
    """
    text = f"{seed}/{number}" + (f"/{attempt}" if attempt else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Leasable(Protocol):
    """An item that a producer generates samples for: a training group or a held-out prompt."""

    id: int
    token: int  # 0: it has no holder
    holder: str
    pid: int
    request: int
    attempt: int
    samples: dict[int, Any]
    records: list[Any]


class LeaseIndexes(Protocol):
    held: dict[str, set[int]]
    named: dict[int, float]


class LeaseTable(Protocol):
    """A table of leasable items. `event_prefix` marks its lines in the history."""

    event_prefix: str

    @property
    def indexes(self) -> LeaseIndexes: ...

    def get(self, number: int) -> Any: ...

    def edit(self, item: Any) -> Edit: ...


class LeaseOutcome(Protocol):
    """What the end of a lease means for its item."""

    def requeue(self, item: Any) -> None:
        """The item is being edited: it waits for another producer."""

    def give_up(self, item: Any, why: str) -> None:
        """No attempts are left."""

    def returned_dead(self, item: Any, why: str) -> None:
        """The producer says that the prompt itself is at fault."""


class Leases:
    """The leases of one table."""

    def __init__(
        self, tx: Transaction, table: LeaseTable, workers: Workers, live: LiveSettings, outcome: LeaseOutcome
    ) -> None:
        self.tx = tx
        self.table = table
        self.workers = workers
        self.live = live
        self.outcome = outcome

    def find_granted(self, producer: str, request: int) -> list[Any]:
        """The items that this request of the producer got before."""
        held = sorted(self.table.indexes.held.get(producer, ()))
        return [item for number in held if (item := self.table.get(number)).request == request]

    def assign(self, item: Leasable, worker: Worker, request: int) -> None:
        """Give the item, which is being edited, to a producer under a new token."""
        item.token, item.holder, item.pid, item.request = self.tx.next_token(), worker.name, worker.pid, request

    def lose(self, item: Leasable, why: str, *, counts: bool = True) -> None:
        """The holder will not finish the item. With `counts` this was one of its attempts."""
        self.tx.event(
            f"{self.table.event_prefix}lost", g=item.id, token=item.token, producer=item.holder, why=why[:REASON_CHARS]
        )
        if counts and item.attempt >= self.live.current.max_reissue:
            self.outcome.give_up(item, why)
            return
        if why in UNKNOWN_TO_HOLDER:
            self.workers.cancel(item.holder, item.id, item.token, self.tx.now)
        with self.table.edit(item):
            item.attempt += counts
            item.token, item.holder, item.pid, item.request = 0, "", 0, 0
            self.outcome.requeue(item)

    def lose_all(self, producer: str, why: str) -> None:
        """The producer holds nothing any more."""
        for number in sorted(self.table.indexes.held.get(producer, ())):
            self.lose(self.table.get(number), why)

    def renew(self, producer: str, pid: int, holds: frozenset[tuple[int, int]] | None) -> None:
        """A heartbeat of the producer's process. With `holds` it keeps only the leases (group, token) that it names.

        A lease that its living holder does not name for `lease_timeout_s` is lost without blame: the grant never
        arrived, or a restored store forgot samples that had been acknowledged.
        """
        named, now, limit = self.table.indexes.named, self.tx.now, self.live.current.lease_timeout_s
        for number in sorted(self.table.indexes.held.get(producer, ())):
            item = self.table.get(number)
            if item.pid not in (0, pid):
                self.lose(item, "restarted")
            elif holds is None or (number, item.token) in holds:
                named[number] = now
            elif now - named.setdefault(number, now) > limit:
                self.lose(item, "unnamed", counts=False)

    def expire(self) -> None:
        """Take the leases of producers that were silent for `lease_timeout_s`."""
        now, limit = self.tx.now, self.live.current.lease_timeout_s
        for name in [name for name, ids in self.table.indexes.held.items() if ids]:
            if now - self.workers.find("producer", name, now).seen > limit:
                self.lose_all(name, "silent")

    def give_back(self, message: LeaseReturn, *, guest: bool = False) -> None:
        """A producer returns leases; with `dead` the prompt itself is at fault. Old tokens are ignored, and so are the
        leases of other producers, whose tokens can be guessed. A `guest` alone cannot end a prompt: it is tried again,
        maybe elsewhere, while attempts are left.
        """
        reason = message.reason[:REASON_CHARS]
        for number, token in message.groups:
            item = self.table.get(number)
            if item is None or item.token != token or not token or item.holder != message.producer:
                continue
            if message.dead and not (guest and item.attempt < self.live.current.max_reissue):
                self.outcome.returned_dead(item, message.reason)
            elif message.dead:
                self.lose(item, reason)
            else:
                self.lose(item, reason, counts=reason not in GRACEFUL)


class GroupOutcome:
    """The end of a lease of a training group."""

    def __init__(self, table: GroupTable, budget: FailureBudget) -> None:
        self.table = table
        self.budget = budget

    def requeue(self, group: Group) -> None:
        if not group.samples:
            group.deadline = None

    def give_up(self, group: Group, why: str) -> None:
        reason = ENVIRONMENT_FAILED if why.startswith(ENVIRONMENT) else "max_reissue"
        detail = f"attempt {group.attempt}: {why}"
        self.table.end(group, State.DEAD, reason, detail, cancel=why in UNKNOWN_TO_HOLDER)
        if reason == ENVIRONMENT_FAILED:
            self.budget.count_failed(reason, why)

    def returned_dead(self, group: Group, why: str) -> None:
        self.table.prompts.observe(group.id, mixed=False)
        self.table.end(group, State.DEAD, "prompt", why, cancel=False)


class GroupLeases:
    """Which training groups a producer gets."""

    def __init__(
        self,
        tx: Transaction,
        table: GroupTable,
        *,
        live: LiveSettings,
        schedule: Schedule,
        shares: FairShare,
        leases: Leases,
        partial: PartialSamples,
    ) -> None:
        self.tx = tx
        self.table = table
        self.live = live
        self.schedule = schedule
        self.shares = shares
        self.leases = leases
        self.partial = partial
        self.workers = leases.workers
        self._looked = -math.inf  # for silent producers

    def lease(self, producer: str, *, engine_version: int, max_groups: int, request: int) -> tuple[Lease, ...]:
        """The groups that this producer generates next, maybe none."""
        worker = self.workers.find("producer", producer, self.tx.now)
        again = self.leases.find_granted(producer, request)
        if again or request <= worker.answered:
            return tuple(self._message(group) for group in again)
        if self.workers.is_barred(producer, engine_version, self.tx.now):
            return ()
        most, capacity = self._most(producer, max_groups)
        self.shares.note_capacity(worker, capacity)
        room = min(most, self.shares.room(worker, engine_version))
        granted: list[Lease] = []
        while len(granted) < room and (group := self.schedule.next_group(engine_version)) is not None:
            granted.append(self.grant(group, worker, engine_version, request))
        return tuple(granted)

    def _most(self, producer: str, max_groups: int) -> tuple[int, int]:
        """How many groups a request may get, and how many its producer can hold then."""
        quota, holds = self.live.current.max_groups_in_flight, len(self.table.indexes.held.get(producer, ()))
        most = min(max_groups, MOST_GROUPS_PER_ANSWER)
        most = min(most, quota - holds) if quota else most
        return most, holds + most

    def note_waiting(self, asked: Mapping[str, int]) -> None:
        """Requests that wait (producer -> groups): shares follow from what each producer can hold now."""
        for producer, max_groups in asked.items():
            worker = self.workers.get("producer", producer)
            if worker is not None and producer not in self.workers.barred:
                self.shares.note_capacity(worker, self._most(producer, max_groups)[1])

    def grant(self, group: Group, worker: Worker, engine_version: int, request: int) -> Lease:
        """Lease a group, new or waiting, to an engine at this version."""
        if group.id == self.table.meta.cursor:
            self._issue(group)
            self._assign(group, worker, engine_version, request)
            self.table.add(group)
        else:
            with self.table.edit(group):
                self._assign(group, worker, engine_version, request)
        self.tx.event(
            "lease",
            g=group.id,
            token=group.token,
            attempt=group.attempt,
            producer=worker.name,
            w=engine_version,
            deadline=group.deadline,
            bound=group.bound,
        )
        if group.partial:
            self.partial.record_continued(group)
        return self._message(group)

    def _assign(self, group: Group, worker: Worker, engine_version: int, request: int) -> None:
        deadline = engine_version + group.bound
        deadline = deadline if group.deadline is None else min(deadline, group.deadline)
        group.deadline = self.partial.hand_out(group, deadline) if group.partial else deadline
        self.leases.assign(group, worker, request)

    def _issue(self, group: Group) -> None:
        self.table.meta.cursor += 1
        self.table.put("meta")
        group.issued = self.tx.wall_time
        uses: Mapping[str, int] = {"uses": group.max_uses} if group.max_uses > 1 else {}
        self.tx.event("issue", g=group.id, **uses)

    def _message(self, group: Group) -> Lease:
        settings = self.live.current
        asked = settings.group_size + settings.over_issue
        missing = tuple([index for index in range(asked) if index not in group.samples])
        # A continued sample is the one that it would have been, so its seed stays.
        seed = lease_seed(settings.seed, group.id, 0 if settings.continues else group.attempt)
        row = self.table.prompts.assign(group)
        return Lease(group.id, group.token, group.attempt, missing, seed, group.deadline or 0, row)

    def blocked_reason(self, engine_version: int, producer: str = "") -> str:
        """Why a producer at this version gets no group now; empty if it would get one."""
        quota = self.live.current.max_groups_in_flight
        if 0 < quota <= len(self.table.indexes.held.get(producer, ())):
            return f"{producer} holds {quota} groups, which is its quota (max_groups_in_flight)"
        if self.workers.barred.get(producer, (-1, 0.0))[0] == engine_version >= 0:
            return f"{producer} holds other weights as version {engine_version} than were published: it must sync"
        reason = self.schedule.blocked_reason(engine_version)
        worker = self.workers.get("producer", producer)
        if not reason and worker is not None and worker.others:
            return f"the groups that are ready are reserved for {worker.others}"
        return reason

    def restart(self, group: Group, why: str) -> None:
        """Drop all samples of a group and issue its prompt again under the same id."""
        self.tx.event("lost", g=group.id, token=group.token, producer=group.holder, why=why)
        self.table.cancel(group, why)
        with self.table.edit(group):
            self.table.drop_samples(group)
            group.state, group.attempt, group.deadline, group.step = State.LEASED, group.attempt + 1, None, 0
            group.token, group.holder, group.pid, group.request = 0, "", 0, 0
            group.unscored = group.ready = group.claimed = 0.0
            group.uses = []

    def take_from_silent(self, late: Callable[[], Iterable[int]]) -> bool:
        """A claim waits for the groups `late()`: those whose producers have been silent for `LATE_SHARE` of the time
        that costs a lease go to others. Whether one did. Every drain asks, so it looks once a second.
        """
        now, limit = self.tx.now, max(LATE_LEAST_S, LATE_SHARE * self.live.current.lease_timeout_s)
        if 0 <= now - self._looked < 1.0:
            return False
        self._looked = now
        names = {name for name, ids in self.table.indexes.held.items() if ids}
        silent = {name for name in names if now - self.workers.find("producer", name, now).seen > limit}
        lost = [number for number in late() if self.table.groups[number].holder in silent] if silent else []
        for number in lost:
            self.leases.lose(self.table.groups[number], "silent")
        return bool(lost)

    def restart_abandoned(self, groups: list[Group], newest: int) -> int:
        """Restart groups with tokens of versions above `newest`: the learner went back to an older checkpoint, so these
        versions do not exist. Returns their number."""
        found = [group for group in groups if group.newest > newest]
        for group in found:
            self.restart(group, "abandoned")
        return len(found)
