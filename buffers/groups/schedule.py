"""Decides which group is leased next and which groups form the next batch, by (F), (D) and r(u) of docs/staleness.md.

Guarantees:
1. `Schedule` reads the table and changes nothing. No other class reads `max_staleness`;
2. the first `needed` fresh groups by deadline are in a batch, so it holds r(u) groups for every u. Groups that were
   trained before fill only the rest: with `fresh_first` the places that fresh groups leave, else by the same order;
3. a draw by priority is without replacement, with probabilities in proportion to the weights; its seed is passed in.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from buffers.groups.group_indexes import Entry
from buffers.groups.group_table import GroupTable
from buffers.groups.live_settings import LiveSettings
from buffers.groups.records import Group, Settings, State
from buffers.values.feasibility import capacity, depth_allows, feasible, levels, list_requirements


class Schedule:
    """Decisions about leases and batches over the table and the settings in force."""

    def __init__(self, table: GroupTable, live: LiveSettings) -> None:
        self.table = table
        self.live = live
        self._has_work: tuple[int, dict[int, bool]] = (-1, {})  # generation, engine version -> result

    # ------------------------------------------------------------ sizes

    @property
    def unclaimed(self) -> int:
        """Places of the run's total that are in no batch yet."""
        return self.live.current.total_groups - self.live.plan.capacity(0, self.table.frontier - 1)

    def batch_size(self, step: int) -> int:
        """The number of groups in the batch of `step`, by the plan and by what is left of the run."""
        return min(self.live.plan.size(step), self.unclaimed)

    @property
    def bound(self) -> int:
        """The bound of a group that is leased first now: its largest lag."""
        return self.live.current.max_staleness

    @property
    def depth(self) -> int:
        """Batches of work ahead of the step in training. "auto" is found from the waits of a learner: before there was
        one, the bound alone limits the work.
        """
        settings = self.live.current
        searched = settings.depth_rule == "auto" and not self.table.meta.epoch
        return settings.max_staleness if searched else settings.depth

    def versions_behind(self, engine_version: int) -> int:
        """How many versions an engine is behind, as far as (D) and the order to sync first count them. With an
        automatic depth they do not: it says how much work the learner needs, not how old that may be; (F) says that.
        """
        return 0 if self.live.current.depth_rule == "auto" else self.training_version - engine_version

    @property
    def training_version(self) -> int:
        """The version that the step in training starts from; between steps the committed one."""
        return max(self.table.meta.version, self.table.frontier - 1)

    @property
    def untouched(self) -> int:
        """Groups that wait for another attempt and have no samples yet."""
        order = self.table.indexes.pending_order
        return len(order) - bisect.bisect_left(order, (math.inf, -1))

    @property
    def outstanding(self) -> int:
        """Groups that (D) counts."""
        return self.table.outstanding

    # ------------------------------------------------------------ admission

    def fits(self, engine_version: int, bound: int, *, without: int | None = None) -> bool:
        """(F) holds with one more group of this bound, in place of a group with the deadline `without`."""
        deadline, v, due = engine_version + bound, self.table.frontier, self.table.indexes.due
        if without is not None:
            due = due - Counter({without: 1})
        return deadline >= v and feasible(due, v=v, batch=self.live.plan, extra=deadline)

    def deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        """(D) allows one more group."""
        v = self.training_version
        return depth_allows(outstanding, depth=self.depth, producer_lag=producer_lag, batch=self.live.plan, v=v)

    def next_group(self, engine_version: int) -> Group | None:
        """The group to lease next: one that waits for another attempt, earliest deadline first, else a new prompt."""
        settings, meta = self.live.current, self.table.meta
        lag = self.versions_behind(engine_version)
        if meta.emptied or engine_version < 0 or engine_version > meta.newest + 1 or lag > self.depth:
            return None
        if self.table.indexes.pending_order and (found := self._next_pending(engine_version, lag)) is not None:
            return found
        if self.table.indexes.competing >= self.unclaimed or not self.fits(engine_version, self.bound):
            return None
        if not self.deep_enough(self.outstanding, lag):
            return None
        return Group(meta.cursor, bound=self.bound, max_uses=settings.max_reuse)

    def has_work(self, engine_version: int) -> bool:
        """Whether there is a group for an engine at this version; found once while nothing changes."""
        generation = self.table.tx.generation
        if self._has_work[0] != generation:
            self._has_work = (generation, {})
        known = self._has_work[1]
        if engine_version not in known:
            known[engine_version] = self.next_group(engine_version) is not None
        return known[engine_version]

    def _next_pending(self, engine_version: int, lag: int) -> Group | None:
        """The first group that waits for another attempt and may have it. Groups without samples differ by
        their bounds alone, so each bound is looked at once."""
        order, groups = self.table.indexes.pending_order, self.table.groups
        first = len(order) - self.untouched
        for _, number in order[:first]:
            if self.may_resume(groups[number], engine_version, lag):
                return groups[number]
        bounds: set[int] = set()
        for _, number in order[first:]:
            group = groups[number]
            if group.bound not in bounds and self.may_resume(group, engine_version, lag):
                return group
            bounds.add(group.bound)
        return None

    def may_resume(self, group: Group, engine_version: int, lag: int) -> bool:
        """Whether a group that waits for another attempt may be leased to an engine at this version."""
        if group.deadline is None:  # nothing of it has arrived: like a new prompt, but before those
            active = self.outstanding - self.untouched
            return self.deep_enough(active, lag) and self.fits(engine_version, group.bound)
        if engine_version + group.bound >= group.deadline:
            return True
        # The missing samples will be older than those that arrived: the deadline falls.
        return self.fits(engine_version, group.bound, without=group.deadline)

    def may_continue(self, due: int, deadline: int) -> str:
        """Why a partial sample that is due at `due` is not continued in a group with `deadline`; empty if it may be."""
        if due < self.table.frontier:
            return "stale"
        # (F) for a deadline holds for every later one too, so each partial sample can be judged by itself.
        if due < deadline and not feasible(
            self.table.indexes.due, v=self.table.frontier, batch=self.live.plan, extra=due
        ):
            return "room"
        return ""

    def count_ready(self, engine_version: int) -> int:
        """How many groups could be leased to engines at this version; an estimate if bounds differ."""
        v, at = self.training_version, self.table.frontier
        plan, due = self.live.plan, self.table.indexes.due
        deadline = engine_version + self.bound
        resumable = len(self.table.indexes.pending) - self.untouched
        if self.table.meta.emptied or engine_version < 0 or deadline < at:
            return resumable
        deep = capacity(plan, v, v + self.depth - max(0, self.versions_behind(engine_version))) - self.outstanding
        places = min(capacity(plan, at, u) - n for u, n in levels(due, at, deadline) if u >= deadline) + 1
        left = self.unclaimed - self.table.indexes.competing
        return resumable + max(0, min(deep + self.untouched, places, left + self.untouched))

    def blocked_reason(self, engine_version: int) -> str:
        """Why an engine at this version gets no group; empty if it would get one."""
        meta, waiting = self.table.meta, len(self.table.indexes.pending)
        if meta.emptied:
            return "the store was emptied or restored; no learner has registered since to say which groups are trained"
        if engine_version < 0:
            return "the engine holds no weights yet"
        if engine_version > meta.newest + 1:
            return f"the engine is at version {engine_version}, the newest published one is {meta.newest}"
        lag = self.versions_behind(engine_version)
        if lag > self.depth:
            return f"the engine is {lag} versions behind, pipeline_depth is {self.depth}: it must sync"
        if engine_version + self.bound < self.table.frontier:
            lag = self.training_version - engine_version
            return f"the engine is {lag} versions behind, max_staleness is {self.bound}: it must sync"
        if self.next_group(engine_version) is not None:
            return ""
        if self.table.indexes.competing >= self.unclaimed and not waiting:
            return "every prompt of the run is issued"
        if self.table.indexes.competing < self.unclaimed:
            if not self.fits(engine_version, self.bound):
                deadline = engine_version + self.bound
                return f"no room before deadline {deadline}: the learner must take a batch"
            if not self.deep_enough(self.outstanding, lag):
                return f"{self.outstanding} groups are ahead of the learner, pipeline_depth is {self.depth}"
        return f"no room for the {waiting} groups that wait: the learner must take a batch"

    # ------------------------------------------------------------ batches

    def choose(self, step: int, size: int) -> list[int] | None:
        """The groups of the batch of `step`; None while too few are ready."""
        ready, used = self.table.indexes.ready, self.usable(step - 1)
        if len(ready) + len(used) < size:
            return None
        return self.mix(step, size, used) if used else [number for _, _, number in ready[:size]]

    def usable(self, v: int) -> list[Entry]:
        """Trained groups that the step from `v` may train once more, earliest deadline first."""
        used = self.table.indexes.used
        return used[bisect.bisect_left(used, (v, -1, -1)) :]

    def mix(self, step: int, size: int, used: list[Entry]) -> list[int]:
        """A batch of fresh groups, at least r(u) of them, and of groups that were trained before."""
        settings, groups = self.live.current, self.table.groups
        wanted = list_requirements(self.table.indexes.due, v=step - 1, batch=self.live.plan)
        needed = max((number for _, number in wanted), default=0)

        def draw(entries: Sequence[Entry], count: int) -> list[Entry]:
            def weight(number: int) -> float:
                return math.pow(reward_spread(groups[number]), settings.priority_exponent)

            return draw_weighted(entries, weight, count, f"{settings.seed}/{step}/replay")

        ready = self.table.indexes.ready
        return fill_batch(ready, used, size=size, needed=min(needed, size), settings=settings, draw=draw)

    def overdue(self, v: int) -> list[Group]:
        """Competing groups with a deadline below `v`, by id."""
        if min(self.table.indexes.due, default=v) >= v:
            return []  # the usual case; every claim that waits asks
        competing = (group for group in self.table.groups.values() if group.state < State.CLAIMED)
        late = [group for group in competing if group.deadline is not None and group.deadline < v]
        return sorted(late, key=lambda group: group.id)

    def shortage(self, v: int, size: int) -> tuple[int, int, int] | None:
        """The first u for which the batch cannot hold r(u): u, groups missing, groups beyond any batch of this size."""
        ready = self.table.indexes.ready
        for u, wanted in list_requirements(self.table.indexes.due, v=v, batch=self.live.plan):
            available = min(size, bisect.bisect_right(ready, (u, math.inf)))
            if available < wanted:
                return u, wanted - available, max(0, wanted - size)
        return None

    def victims(self, u: int, count: int) -> list[int]:
        """Groups due at u or before that the batch cannot hold: those that are least complete first."""
        due = [
            group
            for group in self.table.groups.values()
            if group.state < State.CLAIMED and group.deadline is not None and group.deadline <= u
        ]
        due.sort(key=lambda group: (group.state, group.deadline, len(group.samples), group.id))
        return [group.id for group in due[:count]]

    def is_used_up(self, group: Group, step: int) -> bool:
        """Whether no step after `step`, which is in a checkpoint, has trained the group or will."""
        if group.step > step:
            return False
        return len(group.uses) >= group.max_uses or (group.deadline or 0) < self.table.frontier or self.unclaimed <= 0


def fill_batch(
    fresh: Sequence[Entry],
    used: Sequence[Entry],
    *,
    size: int,
    needed: int,
    settings: Settings,
    draw: Callable[[Sequence[Entry], int], list[Entry]],
) -> list[int]:
    """The ids of a batch of `size`, from at least as many entries. `draw(entries, n)` takes n entries by priority.

    >>> order = Settings(group_size=1, batch_groups=1, max_staleness=1, depth=1, total_groups=9)
    >>> fill_batch([(2, 8, 8)], [(1, 3, 3), (2, 4, 4)], size=2, needed=1, settings=order, draw=lambda some, n: [])
    [8, 3]
    """
    certain = size if settings.fresh_first else needed
    chosen = list(fresh[:certain])
    others = list(used) if settings.fresh_first else sorted([*fresh[certain:], *used])
    missing = size - len(chosen)
    if missing > 0:
        chosen += draw(others, missing) if settings.replay_order == "priority" else others[:missing]
    return [number for _, _, number in chosen]


def reward_spread(group: Group) -> float:
    """Standard deviation of the group's rewards: its advantages grow with it."""
    return statistics.pstdev([sample.reward or 0.0 for sample in group.samples.values()]) if group.samples else 0.0


def draw_weighted(entries: Iterable[Entry], weights: Callable[[int], float], count: int, seed: str) -> list[Entry]:
    """`count` of the entries, drawn without replacement by weight; the same seed draws the same.

    >>> draw_weighted([(1, 1, 1), (1, 2, 2)], {1: 0.0, 2: 1.0}.__getitem__, 1, "seed")
    [(1, 2, 2)]
    """
    generator = random.Random(hashlib.blake2b(seed.encode(), digest_size=8).digest())
    keyed = []
    for entry in entries:  # Efraimidis and Spirakis: the largest of u ** (1 / weight) are such a draw
        weight, u = max(weights(entry[2]), 1e-9), generator.random()
        keyed.append((u ** (1.0 / weight) if u > 0 else 0.0, entry))
    keyed.sort(key=lambda pair: (-pair[0], pair[1]))
    return [entry for _, entry in keyed[:count]]
