"""One schedule: a whole run of the system under a fault plan, all of it from one seed.

The service is the real one, opened by the real `buffers.main.open_service`, on the simulated disk of `sim_disk`; the
processes around it are those of `sim_actors`; `sim_check` watches. Guarantees:
1. virtual time only: nothing waits, nothing is read from or written to a disk;
2. the same seed gives the same run, to the last digest (`World.digest`);
3. a fault is counted where it changed something: a kill of a living process, a write that was taken back, a message
   that somebody would have got.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec
from sim_actors import Producer, Rewarder
from sim_check import Checker, Violation, ends_of
from sim_config import config_of
from sim_disk import Files, Killed, Medium, NullDead, NullLog, SimHistory, SimSegments, SimStore
from sim_host import Host, Weights
from sim_learner import Checkpoint, Learner
from sim_net import Clock, Network, Process

import asyncrl.runtime.run_dir as rundir_module
import buffers.main as server_module
import buffers.service.service as service_module
import buffers.service.session as session_module
from asyncrl import wire
from asyncrl.config import Config
from asyncrl.errors import Unavailable
from asyncrl.runtime.run_dir import RunDir
from buffers.groups.group_table import GroupTable
from buffers.service.service import BufferService
from buffers.values.archive import CHUNK, RETIRED

WALL = 1_800_000_000.0
PATIENCE_S = 900.0  # virtual seconds for the whole run
MAX_EVENTS = 60_000


@lru_cache(maxsize=4)
def _folder(root: Any) -> RunDir:
    return RunDir(root)


@contextmanager
def _no_folders() -> Iterator[None]:
    """The paths of the one run folder, which does not exist, are put together once: that was a sixth of the time."""
    modules: tuple[Any, ...] = (session_module, server_module, service_module, rundir_module)
    letters = service_module.DeadLetters
    for module in modules:
        module.RunDir = _folder
    service_module.DeadLetters = NullDead  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        service_module.DeadLetters = letters  # type: ignore[misc]
        for module in modules:
            module.RunDir = RunDir


class World:
    """Everything."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        pick = rng.choice
        self.trace: list[str] | None = [] if keep_trace else None
        self.clock = Clock()
        self.hits: Counter[str] = Counter()
        self.eta = pick([0, 1, 1, 2, 2, 3])
        self.group_size, self.batch_groups = pick([1, 2, 2, 3]), pick([1, 2, 2, 3])
        self.steps = pick([3, 4, 5, 6])
        self.on_late = pick(["wait", "wait", "drop", "train"])
        self.max_reuse = pick([1, 1, 1, 2])
        self.two_judges = random.Random(f"judges of {seed}").random() < 0.3  # the other schedules stay as they were
        self.chooses = random.Random(f"chooses {seed}").random() < 0.3
        self.config = config_of(
            group_size=self.group_size,
            batch=self.batch_groups,
            eta=self.eta,
            depth=rng.randint(0, self.eta),
            on_late=self.on_late,
            max_reuse=self.max_reuse,
            steps=self.steps,
            reissue=pick([1, 3]),
            judges=self.two_judges,
            chooses=self.chooses,
        )
        self.may_exceed = self.on_late == "train"
        self.strict_places = self.max_reuse == 1
        self.bounds = {self.eta}
        self.checkpoint_every = pick([1, 2, 3])
        self.own_rewards = rng.random() < 0.4
        self.share_files = rng.random() < 0.5
        self.checkpoints = (
            random.Random(f"checkpoints of {seed}").random() < 0.4
        )  # the other schedules stay as they were
        self.sent_pieces: set[tuple[int, int, tuple[int, ...]]] = set()  # group, index, tokens of its beginning
        self.medium = Medium(pick(["sqlite", "redis"]))
        self.files = Files()
        self.history: list[bytes] = []
        self.small_files: dict[str, bytes] = {}  # of the run folder; written whole, so a loss of power takes none
        self.checkpoints: dict[int, Checkpoint] = {}
        self.saved_to = 0  # the highest step that was ever durable
        self.mark = 0  # highest learner epoch, in the run folder, and whose it is
        self.marked_by: Any = None
        self.odds = self._odds()
        hurry = rng.choice((0.5, 1.0, 1.5))
        self.net = Network(
            self.clock,
            rng,
            encoded=0.1,
            rates={"lost": 0.05 * hurry, "doubled": 0.07 * hurry, "delayed": 0.07 * hurry, "flipped": 0.02 * hurry},
        )
        self.net.hits = self.hits
        self.net.note = self.note if keep_trace else None
        self.check = Checker(self)
        self.check_opened = True
        self.net.watch = self.check.answered
        self.weights = Weights(self)
        self.pids = 0
        self.processes: dict[str, Process] = {}
        self.actors: dict[str, Any] = {}
        self.zombies: list[Any] = []
        self.stopped_hosts: list[Host] = []
        self.lost_roles: set[str] = set()
        self.issued: set[int] = set()
        self.diagnosis = ""
        self.over = False  # the last goodbye was taken
        self.finished: tuple[Any, ...] | None = None
        self.host: Host | None = None
        self.handled = 0
        self.events = 0
        self.plan: list[tuple[int, str]] = []
        self.ambushes: dict[type[wire.Message], tuple[int, str]] = {}
        self.contents: dict[int, int] = {}

    def _odds(self) -> dict[str, float]:
        rng = self.rng
        return {
            "poison": rng.choice((0.0, 0.0, 0.02)),
            "reward_raised": rng.choice((0.0, 0.05)),
            "quarantine": rng.choice((0.0, 0.0, 0.05)),
            "stale_tokens": rng.choice((0.0, 0.05)),
        }

    # ------------------------------------------------------------ small things

    def note(self, text: str) -> None:
        """A line of the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.clock.now - 1000:8.3f} {text}")

    def fail(self, kind: str, text: str) -> None:
        """A promise was broken."""
        raise Violation(kind, text)

    def odd(self, kind: str) -> bool:
        """Whether this misfortune happens now."""
        chance = self.odds[kind]
        return chance > 0 and self.net.faulty and self.rng.random() < chance

    def restart_after(self) -> float:
        """How long a supervisor takes."""
        return 1.0 + self.rng.random() * 2.0

    def newest_checkpoint(self) -> Checkpoint:
        """What a starting learner finds."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else Checkpoint(0, (), "", {})

    def ended_ids(self) -> set[int]:
        """Groups that the service calls dropped or dead."""
        ends = ends_of(self.net.service.service.machine.table) if self.net.service else {}
        return {number for number, kind in ends.items() if kind != RETIRED}

    def keep_content(self, batch: wire.Batch, payloads: Any) -> None:
        """What a batch consists of, for the digest of the weights."""
        at = 0
        for head in batch.groups:
            text = 0
            for payload in payloads[at : at + len(head.records)]:
                text = zlib.crc32(bytes(payload), text)
            at += len(head.records)
            self.contents[head.group] = text

    def content_of(self, batch: wire.Batch, without: Any) -> list[int]:
        """Of the groups that are trained."""
        return [self.contents[head.group] for head in batch.groups if head.group not in without]

    def read_places(self, batch: wire.Batch) -> Any:
        """The learner reads the segment files itself; None where they do not agree."""
        found, heads, at = [], [], 0
        for place in batch.places:
            record = self.files.written.get((place.segment, place.offset))
            if record is None or record[2] != place.checksum:
                return None
            found.append(record)
        for head in batch.groups:
            mine = tuple(bytes(record[0]) for record in found[at : at + len(head.records)])
            at += len(head.records)
            heads.append(msgspec.structs.replace(head, records=mine))
        return msgspec.structs.replace(batch, groups=tuple(heads)), tuple(record[1] for record in found)

    # ------------------------------------------------------------ the service

    @contextmanager
    def wired(self) -> Iterator[None]:
        """The real `open_service` on the simulated disk and clock."""
        names = {
            "Segments": self._segments,
            "History": self._history,
            "time": self,
            "process_gone": self._gone,
            "BufferService": self._service,
            "write_atomic": self._write,
            "_last_epoch": self._last_epoch,
        }
        before = {name: getattr(server_module, name) for name in names}
        GroupTable.chunk = 2 if self.seed % 2 else CHUNK
        log = session_module.MetricsLog
        for name, value in names.items():
            setattr(server_module, name, value)
        session_module.MetricsLog = NullLog  # type: ignore[misc,assignment]
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(server_module, name, value)
            session_module.MetricsLog = log  # type: ignore[misc]
            GroupTable.chunk = CHUNK

    def monotonic(self) -> float:
        """Seconds, as a clock that starts anew at every boot."""
        return self.clock.now

    def time(self) -> float:
        """Wall time."""
        return WALL + self.clock.now

    def _write(self, path: Any, data: bytes) -> None:
        self.small_files[str(path)] = data

    def _last_epoch(self, run_dir: Any) -> int:
        return int(self.small_files.get(str(run_dir.service), b"0"))

    def _segments(self, folder: Any, *, live: Any = (), **_: Any) -> SimSegments:
        return SimSegments(self.files, live=live, share=self.share_files)

    def _history(self, path: Any, *, last: bytes = b"", **_: Any) -> SimHistory:
        return SimHistory(self.history, last=last)

    def _service(self, config: Config, **parts: Any) -> BufferService:
        return BufferService(config, clock=self.monotonic, **parts)

    def _gone(self, pid: int, host: str) -> bool:
        known = [process for process in (*self.processes.values(), *self.zombies) if process.pid == pid]
        return not any(process.alive for process in known)

    def store(self) -> SimStore:
        """A connection."""
        return SimStore(self.medium)

    def start_buffer(self) -> None:
        """A service process starts, if none lives."""
        if self.net.service is not None:
            return
        self.note("buffer starts")
        try:
            self.host = self.net.service = Host(self)
        except Killed:  # a bomb went off in its first write
            self.clock.at(self.restart_after(), self.start_buffer)
        except Unavailable:
            self.clock.at(self.restart_after(), self.start_buffer)

    # ------------------------------------------------------------ the others

    def start_all(self) -> None:
        """Everybody starts."""
        self.start_buffer()
        for index in range(2):
            self.start("producer", f"p{index}")
        if not self.own_rewards:
            for index in range(2 + 2 * self.two_judges):
                self.start("reward", f"r{index}")
        self.start("learner", "l0")

    def start(self, role: str, name: str, *, takeover: bool = False) -> None:
        """A process of that name starts, if none of it lives."""
        old = self.processes.get(name)
        if (old is not None and old.alive) or self.finished is not None:
            return
        self.pids += 1
        process = self.processes[name] = Process(self.net, role=role, name=name, pid=self.pids)
        process.on_exit = self.ended
        actor: Any
        if role == "producer":
            actor = Producer(self, process, slots=self.rng.randint(1, 3), eager=self.rng.choice((0.2, 0.7, 1.0)))
        elif role == "reward":
            actor = Rewarder(self, process)
        else:
            actor = Learner(self, process, takeover=takeover)
        self.actors[name] = actor
        self.note(f"{name} starts, pid {process.pid}")
        process.start(actor.life())

    def ended(self, process: Process, why: str) -> None:
        """A process ended; its supervisor starts it again, unless it was superseded or is done."""
        self.note(f"{process.name} pid {process.pid} ends: {why}")
        if self.finished is not None or process in self.zombies:
            return
        host, who = self.net.service, (process.name, process.pid, "h")
        registered = host is not None and host.service.machine.table.meta.learner == who
        if why == "fenced" and registered and process is self.check.learner and self.mark <= self.check.epoch:
            self.fail("second", f"{process.name} pid {process.pid} was fenced, and nobody had taken over from it")
        if process.role == "learner" and why in ("fenced", "learner.duplicate"):
            self.hits["fenced_learner"] += 1
            self.clock.at(3.0, self.someone_must_learn)
            return
        if not why and process.role != "learner":
            self.clock.at(2.0, self.start, process.role, process.name)  # it was told "done" too early: see progress
            return
        self.clock.at(self.restart_after(), self.start, process.role, process.name)

    def someone_must_learn(self) -> None:
        """An operator looks: where no learner lives, one is started."""
        if self.finished is None and not any(p.alive and p.role == "learner" for p in self.processes.values()):
            complete = self.net.service is not None and self.net.service.service.machine.table.meta.done
            self.start("learner", "l0", takeover=complete)  # "the run is complete": then it is asked for by name

    def finish(self, learner: Learner) -> None:
        """The run is complete, unless another learner was registered meanwhile: then its weights are the run's."""
        if self.check.epoch > learner.epoch:
            self.over = False
            return
        self.note(f"done: {learner.process.name} with {learner.step} steps")
        self.finished = tuple(learner.lineage)

    # ------------------------------------------------------------ running

    def after_message(self, count: int) -> None:
        """The service has handled messages: time for the next fault of the plan?"""
        self.handled += count
        while self.plan and self.handled >= self.plan[-1][0]:
            _, kind = self.plan.pop()
            self.clock.at(self.rng.random() * 0.01, self.fault, kind)
        if not self.plan and self.handled >= self.calm_from:
            self.net.faulty = False

    calm_from = 0

    def after_call(self, message: wire.Message) -> None:
        """The service has handled this message: is there an ambush behind it?"""
        found = self.ambushes.get(type(message))
        if found is None:
            return
        left, kind = found
        if left > 1:
            self.ambushes[type(message)] = (left - 1, kind)
        else:
            del self.ambushes[type(message)]
            self.clock.at(self.rng.random() * 0.008, self.fault, kind)

    def fault(self, kind: str) -> None:
        """Let it happen."""
        from sim_faults import FAULTS

        if self.over:  # what happens to a store after the end of the run is nobody's loss
            return
        if FAULTS[kind](self):
            self.hits[kind] += 1
            self.note(f"FAULT {kind}")

    def run(self) -> World:
        """To the end; raises `Violation`."""
        with _no_folders():
            return self._run()

    def _run(self) -> World:
        self.start_all()
        clock = self.clock
        limit = clock.now + PATIENCE_S
        while self.finished is None:
            self.events += 1
            if not clock.step() or clock.now > limit or self.events > MAX_EVENTS:
                self.fail("progress", f"no end after {self.events} events, {clock.now - 1000:.0f} s: {self.diagnosis}")
        self.net.faulty = False
        if self.net.service is None or self.net.service.paused:
            self.net.service = None
            self.start_buffer()
        self.check.finish(self.finished, self.net.service.service.machine)
        return self

    def digest(self) -> str:
        """The whole run in a few characters: two runs of a seed have the same."""
        last = self.finished[-1].digest if self.finished else ""
        return f"{last}/{self.events}/{sum(self.hits.values())}/{self.clock.now:.6f}"
