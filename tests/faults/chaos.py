"""Seeded faults on a living `Plant`, one after the other and sometimes two at once, until it is told to stop.

Every kind is a method that injects one fault and says whether it really hit a living process (or a message); what does
not hit is not counted. After each fault the next commit is waited for: that is the recovery time. The same seed gives
the same faults in the same order, at times that depend on the machine.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import redis
from plant import Plant, Role
from proxy import Link

from asyncrl.runtime.failpoints import SITES

PROGRESS_S = 45.0  # no commit for this long after a fault: the run hangs
#: Sites that a chaos run passes all the time, by the kind of role that passes them.
PASSED = {
    "buffer": ("buffer.before_segments", "buffer.after_segments", "buffer.rotate", "buffer.before_apply",
               "buffer.after_apply", "buffer.before_answer", "buffer.before_release", "buffer.after_open"),
    "producer": ("producer.after_lease", "producer.before_send", "producer.after_place", "producer.after_ack",
                 "weightsync.after_bucket", "weightsync.before_commit", "weightsync.after_commit"),
    "reward": ("reward.before_score", "reward.after_score", "reward.after_ack"),
    "learner": ("learner.at_register", "learner.after_register", "weightsync.staged"),
    "weightsync": ("weightsync.at_publish",),
}  # fmt: skip
assert all(site in SITES for sites in PASSED.values() for site in sites)


class Commits:
    """Follows the history file: how many groups were trained when."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.steps = 0  # lines, replays included
        self.groups = 0  # of steps seen for the first time
        self._highest = 0

    def look(self) -> int:
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        for line in data.splitlines():
            if b'"e":"commit"' in line:
                self.steps += 1
                step = int(line.split(b'"step":')[1].split(b",")[0])
                if step > self._highest:
                    self._highest = step
                    self.groups += line.split(b'"groups":[')[1].split(b"]")[0].count(b",") + 1
        return self.steps


class Chaos:
    """See the module."""

    def __init__(self, plant: Plant, seed: int, *, once: Path) -> None:
        self.plant = plant
        self.random = random.Random(seed)
        self.commits = Commits(plant.run.history)
        self.faults: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.recovery: dict[str, list[float]] = {}
        self._once = once
        self.log: list[str] = []  # what was done when
        self.fenced = 0  # learners that were taken over from and ended with 75
        self._until: list[tuple[float, Callable[[], None]]] = []
        self.kinds: dict[str, Callable[[], bool]] = {
            **{f"kill {kind}": self._killer(kind) for kind in PASSED},
            **{f"stop {kind}": self._stopper(kind) for kind in PASSED},
            "kill redis": lambda: self._redis(signal.SIGKILL), "stop redis": lambda: self._redis(signal.SIGSTOP),
            "flushall": self.flushall, "flushall and kill": self.flush_and_kill, "cut": self.cut, "delay": self.delay,
            "partition": self.partition, "lost messages": self.lose, "doubled messages": self.double,
            "flipped bits": self.flip, "fail-point": self.failpoint, "takeover": self.takeover,
        }  # fmt: skip

    # ------------------------------------------------------------ the loop

    def run(self, *, seconds: float, at_least: int, of_each: int) -> None:
        """Faults for so long, and until there were so many; every kind in turn, in a new order each round."""
        began = time.monotonic()
        names: list[str] = []
        while (
            time.monotonic() - began < seconds
            or sum(self.faults.values()) < at_least
            or min(self.faults[name] for name in self.kinds) < of_each
        ):
            names = names or self.random.sample(sorted(self.kinds), len(self.kinds))
            self.inject([names.pop() for _ in range(min(len(names), 1 + (self.random.random() < 0.25)))])
        while self._until:
            self._release()
            time.sleep(0.02)

    def inject(self, names: list[str]) -> None:
        """These faults at once, then wait for the next commit."""
        before, began = self.commits.look(), time.monotonic()
        hit = [name for name in names if self._try(name)]
        while self.commits.look() == before:
            self._release()
            assert time.monotonic() - began < PROGRESS_S, self.stuck()
            time.sleep(0.01)
        for name in hit:
            self.recovery.setdefault(name, []).append(time.monotonic() - began)
        pause = time.monotonic() + self.random.uniform(0.05, 0.4)
        while time.monotonic() < pause:
            self._release()
            time.sleep(0.02)

    def stuck(self) -> str:
        """What was done last, and how everybody is: for a run that makes no progress."""
        links = {role.name: role.link.state() for role in self.plant.roles.values() if role.link is not None}
        return "\n".join(["no commit any more; the last faults:", *self.log[-12:], f"links {links}", self.plant.tail()])

    def _note(self, what: str) -> None:
        self.log.append(f"{time.time():.2f} {what}")

    def _try(self, name: str) -> bool:
        for _ in range(3):
            try:
                hit = self.kinds[name]()
            except (ProcessLookupError, FileNotFoundError, redis.exceptions.RedisError):
                hit = False  # it was dead already, or is starting
            (self.faults if hit else self.missed)[name] += 1
            self._note(f"{name}{'' if hit else ' (missed)'}")
            if hit:
                return True
            time.sleep(0.1)
        return False

    def _release(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._until if entry[0] <= now]
        self._until = [entry for entry in self._until if entry not in due]
        for _, end in due:
            end()

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        self._until.append((time.monotonic() + seconds, end))

    def report(self) -> str:
        """Faults by kind, with the recovery times."""
        lines = [f"{sum(self.faults.values())} faults of {len(self.faults)} kinds"]
        for name, times in sorted(self.recovery.items()):
            lines.append(
                f"  {name}: {self.faults[name]}, next commit after {statistics.median(times):.2f} s (median), "
                f"{max(times):.2f} s (max)"
            )
        return "\n".join(lines)

    # ------------------------------------------------------------ processes

    def _role(self, kind: str) -> Role:
        return self.random.choice([role for role in self.plant.roles.values() if role.kind == kind])

    def _killer(self, kind: str) -> Callable[[], bool]:
        return lambda: bool(self.plant.kill(self._role(kind).name))

    def _stopper(self, kind: str) -> Callable[[], bool]:
        def stop() -> bool:
            pid = self.plant.kill(self._role(kind).name, signal.SIGSTOP)
            # A producer or reward worker sometimes for longer than its leases live.
            longest = 3.0 if kind in ("producer", "reward") else 1.2
            self._later(self.random.uniform(0.3, longest), lambda: _continue(pid))
            return True

        return stop

    def _redis(self, number: int) -> bool:
        pid = self.plant.redis_pid()
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            self._later(self.random.uniform(0.3, 1.2), lambda: _continue(pid))
        return True

    def flushall(self) -> bool:
        _continue(self.plant.redis_pid())  # where it stands still by another fault
        return bool(self.plant.redis().flushall())

    def flush_and_kill(self) -> bool:
        """Everything the service knew is gone: the store and the memory of it."""
        server = self.plant.redis()
        _continue(self.plant.redis_pid())
        self.plant.kill("buffer", signal.SIGSTOP)  # so that it cannot write its rows again in between
        try:
            return bool(server.flushall())
        finally:
            self.plant.kill("buffer")

    def failpoint(self) -> bool:
        """A new process of some role, that dies at a named place."""
        role = self._role(self.random.choice(sorted(PASSED)))
        site = self.random.choice(PASSED[role.kind])
        count = (
            1 if role.kind in ("learner", "weightsync") or site == "buffer.after_open" else self.random.randint(1, 20)
        )
        marks = {path.name for path in self._once.iterdir()}
        folder = self._once / f"{len(marks)}"
        folder.mkdir()
        role.env = {"ASYNCRL_FAILPOINT": f"{site}:kill:{count}", "ASYNCRL_FAILPOINT_ONCE": str(folder)}
        self.plant.kill(role.name)
        deadline = time.monotonic() + 90
        while not any(folder.iterdir()) and time.monotonic() < deadline:
            self._release()
            time.sleep(0.01)
        return any(folder.iterdir())

    def takeover(self) -> bool:
        """A learner stands still, another one takes its place, the first one wakes up: it must end with 75."""
        role = self.plant.roles["learner"]
        with self.plant._lock:
            old = role.process
            self.plant.kill("learner", signal.SIGSTOP)
            role.words = ["--takeover"]
            self.plant.spawn(role)
        assert old is not None
        epoch = len(self.plant.history("register"))
        deadline = time.monotonic() + 90
        while len(self.plant.history("register")) <= epoch and time.monotonic() < deadline:
            self._release()
            time.sleep(0.02)
        os.kill(old.pid, signal.SIGCONT)
        code = old.wait(30)
        # 69 or a signal where another fault came between them; a learner that ended with 0 would have gone on.
        assert code != 0, f"the learner that was replaced ended with 0\n{self.plant.tail()}"
        self.fenced += code == 75
        return True

    # ------------------------------------------------------------ sockets

    def _link(self) -> Link:
        links = [role.link for role in self.plant.roles.values() if role.link is not None]
        return self.random.choice(links)

    def cut(self) -> bool:
        link = self._link()
        link.closed = True
        link.cut()
        return self._hits(link, "cut", 1.0)

    def delay(self) -> bool:
        link = self._link()
        link.delay_s = self.random.uniform(0.02, 0.3)
        return self._hits(link, "delayed", 1.5)

    def partition(self) -> bool:
        """Nothing moves in one way or both, sometimes for longer than a lease lives; no connection breaks."""
        link = self._link()
        link.held = frozenset(self.random.choice((("up",), ("down",), ("up", "down"))))
        return self._hits(link, "held", 3.0)

    def lose(self) -> bool:
        link = self._link()
        link.lost = frozenset((self.random.choice(("up", "down")),))
        return self._hits(link, "lost", 0.6)

    def double(self) -> bool:
        link = self._link()
        link.twice = 0.5
        return self._hits(link, "doubled", 2.0)

    def flip(self) -> bool:
        link = self._link()
        link.flips = 0.3
        return self._hits(link, "flipped", 1.0)

    def _hits(self, link: Link, what: str, longest: float) -> bool:
        """Wait until the fault has met a message; it ends some time later."""
        before, deadline = link.counts[what], time.monotonic() + 5
        while link.counts[what] == before and time.monotonic() < deadline:
            self._release()
            time.sleep(0.01)
        self._later(self.random.uniform(0.2, longest), link.heal)
        return link.counts[what] > before


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
