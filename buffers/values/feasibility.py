"""The arithmetic of docs/staleness.md over counts alone: (F), (D), r(u), and the plan of batch sizes.

`due` maps a deadline to the number of competing groups (leased, unscored, ready); `v` is the version that the next
claim starts from; `batch` is B: a number, or a plan if it was changed during the run. With a plan, `(u - v + 1) * B` is
the sum of the sizes of the steps that start from v .. u. Guarantees:
1. `feasible` is (F): for every u >= v, n(u) <= (u - v + 1) * B; only values of u at which n changes are looked at;
2. `required` gives r(u) = n(u) - (u - v) * B wherever it is positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec


class Plan(msgspec.Struct, frozen=True):
    """The number of groups in the batch of each step, as pairs (first step, size) in the order of the steps.

    >>> plan = Plan(((1, 4),)).resize(3, 2); plan.changes, plan.size(2), plan.size(3), plan.capacity(0, 3)
    (((1, 4), (3, 2)), 4, 2, 12)
    """

    changes: tuple[tuple[int, int], ...]

    def size(self, step: int) -> int:
        """B of that step."""
        return next((size for first, size in reversed(self.changes) if first <= step), self.changes[0][1])

    def capacity(self, v: int, u: int) -> int:
        """Groups that the steps which start from the versions v .. u hold together; 0 for u < v."""
        if len(self.changes) == 1:  # nearly always
            return self.changes[0][1] * (u - v + 1) if u >= v else 0
        ends = [first for first, _ in self.changes[1:]] + [u + 2]
        starts = [v + 1, *(first for first, _ in self.changes[1:])]
        return sum(
            size * max(0, min(end, u + 2) - max(start, v + 1))
            for (_, size), start, end in zip(self.changes, starts, ends, strict=True)
        )

    def resize(self, step: int, size: int) -> Plan:
        """The plan with another size from `step` on."""
        kept = tuple(change for change in self.changes if change[0] < step)
        return Plan(kept if kept and kept[-1][1] == size else (*kept, (step, size)))


def capacity(batch: int | Plan, v: int, u: int) -> int:
    """`(u - v + 1) * B`, or what the plan says."""
    return (u - v + 1) * batch if isinstance(batch, int) else batch.capacity(v, u)


def levels(due: Mapping[int, int], v: int, extra: int | None = None) -> Iterator[tuple[int, int]]:
    """`(u, n(u))` for u = v and every deadline above it, in order; `extra` is the deadline of one more group.

    >>> list(levels({3: 1, 5: 2}, v=4, extra=5))
    [(4, 1), (5, 4)]
    """
    points = {v, *(deadline for deadline in due if deadline > v)}
    if extra is not None:
        points.add(max(extra, v))
    below = sorted(due)
    count, place = 0, 0
    for u in sorted(points):
        while place < len(below) and below[place] <= u:
            count += due[below[place]]
            place += 1
        yield u, count + (1 if extra is not None and extra <= u else 0)


def feasible(due: Mapping[int, int], *, v: int, batch: int | Plan, extra: int | None = None) -> bool:
    """(F): the schedule with one more group of deadline `extra` can be met, B groups leaving per step.

    B = 1, eta = 2: three groups leased at version 0 (deadline 2) fit, a fourth does not.

    >>> feasible({2: 2}, v=0, batch=1, extra=2), feasible({2: 3}, v=0, batch=1, extra=2)
    (True, False)
    """
    points = dict(due)
    if extra is not None:
        points[extra] = points.get(extra, 0) + 1
    count = 0
    for u in sorted(points):  # below v: n(u) <= n(v), which the last deadline up to v stands for
        count += points[u]
        if count > capacity(batch, v, max(u, v)):
            return False
    return True


def depth_allows(outstanding: int, *, depth: int, producer_lag: int, batch: int | Plan, v: int = 0) -> bool:
    """(D): `outstanding < (depth + 1 - lag) * B`, where `outstanding` also counts the batch being trained, which
    starts from `v` (a plan asks).

    >>> depth_allows(7, depth=1, producer_lag=0, batch=4), depth_allows(4, depth=1, producer_lag=1, batch=4)
    (True, False)
    """
    return outstanding < capacity(batch, v, v + depth - max(0, producer_lag))


def list_requirements(due: Mapping[int, int], *, v: int, batch: int | Plan) -> list[tuple[int, int]]:
    """`(u, r(u))` where the batch of the claim from `v` must hold r(u) > 0 groups due at u or before.

    Only u = v and deadlines are listed: between two deadlines r falls, so it asks for nothing new there.

    >>> list_requirements({2: 2, 4: 1}, v=2, batch=1)
    [(2, 2), (4, 1)]
    """
    wanted = ((u, count - capacity(batch, v + 1, u)) for u, count in levels(due, v))
    return [(u, number) for u, number in wanted if number > 0]
