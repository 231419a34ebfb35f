"""Scores samples in a child process that can be killed: the parent's half.

Guarantees:
1. a call that takes longer than the timeout is killed with its whole process group, and is a `timeout` of its sample; a
   child that exits or crashes is `died`; both start a new child and the other samples go on;
2. every sample of a job gets exactly one result, in any order, unless the parent itself is stopped;
3. functions that cannot be loaded are `config.reward`, at the start and at any restart;
4. a call is also ended (`died`) if its processes become more than `max_processes`, or its output more than
   `OUTPUT_BYTES`: a fork bomb or an endless print costs one sample and not the machine.
It never makes up a reward.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.process_plan.interpreters import python_with
from asyncrl.runtime.child_environment import child_environment
from asyncrl.runtime.host_facts import group_members
from producers.rewards.images import sees_images, select_images
from producers.rewards.outcome import JudgeSettings
from producers.rewards.pipe import (
    WHOLE_BATCH,
    Begin,
    Closed,
    Frame,
    FunctionSpec,
    Job,
    Pipe,
    Ready,
    Result,
    SandboxSpec,
    Setup,
    Silence,
)
from producers.rewards.sample import RewardSample

IMPORT_LIMIT_S = 120.0  # for the user's modules
LOAD_LIMIT_S = 1800.0  # for a judge's model
LOOK_S = 0.25  # how often a long call is checked
OUTPUT_BYTES = 256 << 20  # that one job may add to the worker's log
GRACE_S = 1.0  # above the timeout, so that an async function's own timeout comes first


class TooMuch(Exception):
    """A call exceeds its limits on the machine."""


def _output() -> int:
    """Size of the worker's log, which has the child's output; 0 if it is not a file."""
    found = os.fstat(1)
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


class Scorer:
    """One child process with the reward functions of a judge, or with its model (`judge`)."""

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        *,
        prompt_key: str,
        timeout_s: float,
        memory_bytes: int = 0,
        max_processes: int = 512,
        sandbox: SandboxSpec | None = None,
        judge: JudgeSettings | None = None,
        env: Collection[str] = (),
    ) -> None:
        """`env`: names of variables that the child inherits, in addition to those of every child."""
        self.version = ""
        self.restarts = 0
        self._setup = Setup(tuple(functions), prompt_key, timeout_s, memory_bytes, judge, sandbox or SandboxSpec())
        self._module = "producers.rewards.child" if judge is None else "producers.rewards.judges.child"
        self._start_limit_s = IMPORT_LIMIT_S if judge is None else LOAD_LIMIT_S
        self._max_processes = max_processes
        self._env = env
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._stopped = False
        self._label = ""  # the function that runs, or ran last
        self._ending = ""  # how the child ended

    def start(self) -> None:
        """Start the child and load the functions. Raises `config.reward` if they cannot be used, `config.extra` if a
        judge's engine has no environment here."""
        judge = self._setup.judge
        engine = judge.table.engine if judge is not None and judge.table.kind == "generative" else ""
        python = python_with(engine, where="judge.engine") or sys.executable
        to_child, from_child = os.pipe(), os.pipe()
        self._pipe = Pipe(from_child[0], to_child[1])
        self._child = subprocess.Popen(
            [python, "-m", self._module, str(to_child[0]), str(from_child[1])],
            pass_fds=(to_child[0], from_child[1]),
            env=child_environment(self._env),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._stopped:  # `stop` was called before the child existed
            self._kill()
        os.close(to_child[0])
        os.close(from_child[1])
        names = ", ".join(spec.function or spec.label for spec in self._setup.functions)
        try:
            self._pipe.send(self._setup)
            ready = self._pipe.receive(self._start_limit_s)
            problem = ready.problem if isinstance(ready, Ready) else f"the child sent {type(ready).__name__}"
        except Silence:
            problem = f"{names}: starting took longer than {self._start_limit_s:g} s"
        except (Closed, *UNREADABLE):
            problem = f"{names}: the process ended while it started"
        if problem:
            self.close()
            raise ConfigError("config.reward", problem)
        self.version = ready.version

    @property
    def sees_images(self) -> bool:
        """Whether a function, or the judge, may look at the images of a sample."""
        judge = self._setup.judge
        return judge.sees_images if judge else sees_images(spec.function for spec in self._setup.functions)

    def score(
        self,
        samples: Sequence[RewardSample],
        on_result: Callable[[Result], None],
        images: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Score all samples; `on_result` gets each result with the sample's place in `samples`, as it is ready.
        `images`: encoded, by the digests in the samples' rows."""
        waiting = [list(range(len(samples)))]  # jobs, as places
        while waiting:
            places = waiting.pop(0)
            left, culprit, reason = self._run(samples, places, on_result, images)
            if self._stopped:
                return
            if not left:
                continue
            # The child is gone. Its current sample has failed; the rest goes on in a new child. If it worked on the
            # whole batch, every sample gets its own job, to find the bad one.
            alone = len(left) == 1
            if culprit == WHOLE_BATCH and not alone:
                waiting[:0] = [[place] for place in left]
            else:
                failed = left[0] if alone else culprit
                on_result(Result(failed, reason=reason, detail=self._detail(reason)))
                rest = [place for place in left if place != failed]
                waiting[:0] = [rest] if rest else []
            try:
                self._restart()
            except ConfigError:
                if self._stopped:
                    return
                raise

    def _detail(self, reason: str) -> str:
        names = ", ".join(spec.label for spec in self._setup.functions)
        if reason == "timeout":
            return f"{self._label or names}: no result within {self._setup.timeout_s:g} s"
        return f"{self._label or names}: its process ended ({self._ending})"

    def _run(
        self,
        samples: Sequence[RewardSample],
        places: list[int],
        on_result: Callable[[Result], None],
        images: Mapping[str, bytes],
    ) -> tuple[list[int], int, str]:
        """Run one job. The remaining places, the place at fault and the reason; no places after a success."""
        assert self._pipe is not None
        left, culprit, self._label, self._ending = list(places), WHOLE_BATCH, "", ""
        log = _output()
        try:
            job = tuple(samples[place] for place in places)
            self._pipe.send(Job(job, select_images(job, images) if self.sees_images else {}))
            while left:
                frame = self._receive(log)
                if isinstance(frame, Begin):
                    culprit = WHOLE_BATCH if frame.place == WHOLE_BATCH else places[frame.place]
                    self._label = frame.label
                elif isinstance(frame, Result):
                    place = places[frame.place]
                    if place not in left:  # a function forked and returned twice: the first result counts
                        continue
                    left.remove(place)
                    culprit = WHOLE_BATCH
                    on_result(msgspec.structs.replace(frame, place=place))
        except Silence:
            return left, culprit, "timeout"
        except TooMuch as error:
            self._ending = str(error)
            return left, culprit, "died"
        except (Closed, IndexError, *UNREADABLE) as error:
            self._ending = self._exit_code() or str(error)
            return left, culprit, "died"
        return [], WHOLE_BATCH, ""

    def _receive(self, log: int) -> Frame:
        """The next frame of a job that began when the log had this size. Raises Silence at the timeout, or TooMuch."""
        assert self._pipe is not None and self._child is not None
        deadline = time.monotonic() + self._setup.timeout_s + GRACE_S
        while (left := deadline - time.monotonic()) > LOOK_S:
            with contextlib.suppress(Silence):
                frame: Frame = self._pipe.receive(LOOK_S)
                return frame
            if len(group_members(self._child.pid)) > self._max_processes:
                raise TooMuch(f"it had more than {self._max_processes} processes")
            if _output() - log > OUTPUT_BYTES:
                raise TooMuch(f"it printed more than {OUTPUT_BYTES >> 20} MiB")
        last: Frame = self._pipe.receive(max(0.0, left))
        return last

    def _exit_code(self) -> str:
        try:
            assert self._child is not None
            return f"exit code {self._child.wait(timeout=GRACE_S)}"
        except subprocess.TimeoutExpired:
            return ""

    def peak_bytes(self) -> int:
        """Peak memory of the child; 0 if unknown."""
        try:
            assert self._child is not None
            status = Path(f"/proc/{self._child.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) << 10
        except (OSError, IndexError, ValueError):
            return 0

    def _restart(self) -> None:
        self.restarts += 1
        self.close()
        self.start()

    def stop(self) -> None:
        """End a call under way without a result, from another thread: `score` returns, nothing is restarted."""
        self._stopped = True
        self._kill()

    def close(self) -> None:
        """Kill the child and everything it started."""
        self._kill()
        if self._child is not None:
            self._child.wait(timeout=10)
            self._child = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
