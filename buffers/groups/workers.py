"""The workers that the service has heard from: producers, reward workers, the learner.

Not persisted: after a restart of the service every lease gets its full time again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.config.judges import display_name

#: Seconds after which a silent worker is forgotten. Preempted workers return under new names, thousands in a long run.
FORGET_S = 3600.0
#: Workers that are remembered in addition to those that hold work.
MOST_WORKERS = 4096


class Worker(msgspec.Struct):
    """A worker as the service last saw it."""

    name: str
    pid: int = 0
    host: str = ""
    seen: float = 0.0
    waiting_for: str = ""
    stats: dict[str, float] = {}
    answered: int = 0  # number of the last work request that was answered
    waiting_since: float | None = None  # start of the current uninterrupted wait
    capacity: int = 0  # groups that a producer can hold, by its last request; 0: it has not asked yet
    reserved: tuple[int, float] = (-1, 0.0)  # committed version, time since when groups are reserved for it
    others: str = ""  # producers for which groups are reserved that this one could take
    judge: str = ""  # judge that a reward worker scores for, by its last request

    def update_wait(self, what: str, now: float) -> None:
        """Record what the last heartbeat says the worker waits for; empty while it works."""
        self.waiting_for = what
        self.waiting_since = None if not what else now if self.waiting_since is None else self.waiting_since

    def waited_s(self, now: float) -> float:
        """Seconds of the current uninterrupted wait; 0 while it works."""
        return 0.0 if self.waiting_since is None else round(now - self.waiting_since, 3)


class Cancelled(msgspec.Struct, gc=False):
    """A lease that its holder should stop working on."""

    since: float
    reported: bool = False


class Workers:
    """Known workers by role and name, barred producers, and the leases that producers should stop working on.

    `holds` says whether a worker holds work, so that it is not forgotten.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Worker] = {}
        self.barred: dict[str, tuple[int, float]] = {}  # producer -> (version it holds wrongly, until when)
        self.cancelled: dict[str, dict[tuple[int, int], Cancelled]] = {}  # producer -> (group, token)
        self.holds: Callable[[str, str], bool] = lambda role, name: False

    def get(self, role: str, name: str) -> Worker | None:
        """The worker, if it is known."""
        return self.known.get((role, name))

    def find(self, role: str, name: str, now: float) -> Worker:
        """The worker; one that is unknown since a restart of the service starts anew."""
        return self.known.get((role, name)) or self.see(role, name, now)

    def see(self, role: str, name: str, now: float) -> Worker:
        """Record a sign of life."""
        worker = self.known.get((role, name)) or self.add(role, Worker(name))
        worker.seen = now
        return worker

    def add(self, role: str, worker: Worker) -> Worker:
        """Register a worker that is new, or new under its name.

        Names come from peers, so their number is limited: the idle worker that was silent longest makes room.
        """
        self.known.pop((role, worker.name), None)
        if len(self.known) >= MOST_WORKERS:
            idle = ((other.seen, key) for key, other in self.known.items() if not self.holds(*key))
            oldest = min(idle, default=None)
            if oldest is not None:
                del self.known[oldest[1]]
                self.barred.pop(oldest[1][1], None)
        self.known[role, worker.name] = worker
        return worker

    def remove(self, role: str, name: str) -> None:
        """Forget a worker."""
        self.known.pop((role, name), None)

    def alive(self, role: str, *, judge: str | None = None, now: float, limit_s: float) -> set[str]:
        """Names of the workers of a role (and judge) that were heard from within `limit_s`."""
        return {
            worker.name
            for (kind, _), worker in self.known.items()
            if kind == role and (judge is None or worker.judge == judge) and now - worker.seen <= limit_s
        }

    # ------------------------------------------------------------ bars

    def bar(self, producer: str, version: int, until: float) -> None:
        """Give the producer no work under `version` until then: its samples carried a wrong digest."""
        self.barred[producer] = (version, until)

    def is_barred(self, producer: str, version: int, now: float) -> bool:
        """Whether the producer gets no work under this version. A bar that is over is removed."""
        barred, until = self.barred.get(producer, (version, now))
        if barred == version and now < until:
            return True
        self.barred.pop(producer, None)
        return False

    # ------------------------------------------------------------ cancelled leases

    def cancel(self, producer: str, number: int, token: int, now: float) -> None:
        """The producer should stop working on this lease."""
        self.cancelled.setdefault(producer, {})[number, token] = Cancelled(now)

    def take_cancelled(self, producer: str, *, again: bool = False) -> tuple[tuple[int, int], ...]:
        """Leases `(group, token)` that this producer should stop; with `again` also those reported before."""
        mine = self.cancelled.get(producer)
        if not mine:
            return ()
        keys = tuple(key for key, entry in mine.items() if again or not entry.reported)
        for key in keys:
            mine[key].reported = True
        return keys

    # ------------------------------------------------------------ time

    def expire(self, now: float, limit_s: float) -> None:
        """Drop cancelled leases older than `limit_s`, and workers that were silent for long and hold nothing."""
        for name in list(self.cancelled):
            kept = {key: entry for key, entry in self.cancelled[name].items() if now - entry.since <= limit_s}
            if kept:
                self.cancelled[name] = kept
            else:
                del self.cancelled[name]
        forget_s = max(FORGET_S, 10 * limit_s)
        for (role, name), worker in list(self.known.items()):
            if role != "learner" and now - worker.seen > forget_s and not self.holds(role, name):
                del self.known[role, name]
                if role == "producer":
                    self.barred.pop(name, None)

    def last_seen(self, role: str, name: str, now: float) -> str:
        """`pid 7 on host-a, last seen 3.0 s ago`."""
        worker = self.known.get((role, name))
        if worker is None:
            return "never seen by this service"
        process = f"pid {worker.pid} on {worker.host}, " if worker.pid else ""
        return f"{process}last seen {now - worker.seen:.1f} s ago"

    def status(self, role: str, now: float) -> list[dict[str, Any]]:
        """The workers of a role as `asyncrl status` reports them."""
        return [
            {
                "name": worker.name,
                "pid": worker.pid,
                "host": worker.host,
                "age_s": round(now - worker.seen, 3),
                "waiting_for": worker.waiting_for,
                "waiting_s": worker.waited_s(now),
                "stats": worker.stats,
                **({"judge": display_name(worker.judge)} if role == "reward" else {}),
            }
            for (kind, _), worker in sorted(self.known.items())
            if kind == role
        ]
