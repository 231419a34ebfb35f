"""Programs on this host: a few warm runner processes, and the kind without isolation.

`producers.sandbox.bubblewrap` is the isolated kind. Each `LocalSandbox` keeps up to `workers` processes of
`producers.sandbox.runner`; each takes one program at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import threading
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from asyncrl.errors import AsyncRLError, ConfigError, Unavailable
from producers.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult, SandboxSession, check_job
from producers.sandbox.chromium import find_chromium
from producers.sandbox.process import (
    BROWSER,
    ENVIRONMENT,
    FLAGS,
    RUNNER,
    SESSION,
    START_LIMIT_S,
    Ended,
    RunnerProcess,
    Stopped,
    spawn,
)

MOST_JOBS = 2000  # of one process; then a new one
_numbers = itertools.count()


class LocalSandbox(Sandbox):
    """Common part of the kinds on this host: a few warm processes, one program at a time each."""

    def __init__(self, limits: SandboxLimits | None = None, *, workers: int = 1) -> None:
        super().__init__(limits)
        self._idle: list[RunnerProcess] = []
        self._lock = threading.Lock()
        self.at_once = workers
        self._places = threading.BoundedSemaphore(workers)
        # One thread for its whole life: PR_SET_PDEATHSIG fires when the *thread* that started the process ends.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox")

    @abstractmethod
    def start(self, script: Path = RUNNER, *, shell: bool = False, pages: str = "") -> subprocess.Popen[bytes]:
        """Start a process of `producers.sandbox.runner`, `session_runner` or `browser_runner`; `shell`: with commands
        of the host; `pages`: folder of the browser's pages."""

    @property
    @abstractmethod
    def is_isolated(self) -> bool:
        """Whether programs are isolated from the host."""

    def run_job(self, job: SandboxJob) -> SandboxResult:
        """Run one program to its end."""
        check_job(job)
        with self._places:  # bounded: each program has a time limit
            for last_try in (False, True):
                runner = self._acquire()
                try:
                    result = runner.run(job)
                except Ended as error:  # killed, for example by the kernel out of memory
                    runner.close()
                    if last_try:
                        raise Unavailable("sandbox.failed", f"it ended twice under the same program: {error}") from None
                    continue
                self._give_back(runner)
                return result
        raise AssertionError

    def open_session(self, *, shell: bool = False, pages: str = "") -> SandboxSession:
        if pages:
            if not self.is_isolated:
                raise ConfigError("sandbox.unavailable", "a browser runs only in bubblewrap")
            find_chromium()
        return LocalSession(self, shell=shell, pages=pages)

    def probe(self) -> None:
        """Start a process, and keep it for the first program."""
        self._give_back(self._acquire())

    def _acquire(self) -> RunnerProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.start_runner()

    def start_runner(self, script: Path = RUNNER, *, shell: bool = False, pages: str = "") -> RunnerProcess:
        """A process that is ready for programs. Raises `sandbox.unavailable`."""
        process = self._starter.submit(partial(self.start, script, shell=shell, pages=pages)).result(START_LIMIT_S)
        runner = RunnerProcess(process, self.limits, watched=self.is_isolated)
        try:
            runner.wait_ready()
        except (Ended, Stopped) as error:
            words = runner.last_words() or str(error)
            runner.close()
            raise ConfigError("sandbox.unavailable", f"it does not start: {words}") from None
        return runner

    def _give_back(self, runner: RunnerProcess) -> None:
        if runner.usable and runner.jobs < MOST_JOBS:
            with self._lock:
                self._idle.append(runner)
        else:
            runner.close()

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for runner in idle:
            runner.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, AsyncRLError):
            self.close()


class LocalSession(SandboxSession):
    """A process of its own, from the first program on."""

    def __init__(self, sandbox: LocalSandbox, *, shell: bool, pages: str) -> None:
        self._sandbox = sandbox
        self._shell = shell
        self._pages = pages
        self._runner: RunnerProcess | None = None
        self._lock = threading.Lock()  # programs of a session follow each other
        self._closed = False

    def run(self, code: str, *, timeout_s: float | None = None) -> SandboxResult:
        with self._lock:
            if self._closed:
                return SandboxResult(status="killed", exit_code=-9)
            if self._runner is None:
                script = BROWSER if self._pages else SESSION
                self._runner = self._sandbox.start_runner(script, shell=self._shell, pages=self._pages)
            runner = self._runner
            if self._closed:  # while it started: `close` did not see it
                runner.close()
                return SandboxResult(status="killed", exit_code=-9)
            try:
                result = runner.run(SandboxJob(code=code, timeout_s=timeout_s), shell=self._shell, session=True)
            except Ended:
                runner.close()
                result = SandboxResult(status="killed", exit_code=-9)
            if not runner.usable:
                runner.close()
                self._runner = None
                result = msgspec.structs.replace(result, state_lost=True)
            return result

    def close(self) -> None:
        self._closed = True
        if (runner := self._runner) is not None:
            runner.kill()
            with self._lock:  # bounded: the program that ran is dead
                runner.close()


class Unprotected(LocalSandbox):
    """No isolation: the program can do everything that this process can do, within its limits."""

    @property
    def is_isolated(self) -> bool:
        return False

    def __init__(self, limits: SandboxLimits | None = None, *, workers: int = 1) -> None:
        super().__init__(limits, workers=workers)
        self._folders = tempfile.TemporaryDirectory(prefix="asyncrl-program-")

    def start(self, script: Path = RUNNER, *, shell: bool = False, pages: str = "") -> subprocess.Popen[bytes]:
        """Start an ordinary process with its own folder."""
        folder = Path(self._folders.name, str(next(_numbers)))
        folder.mkdir()
        settings = {"uid": 0, "gid": 0, "folder": str(folder), "max_processes": 0, "paths": self.limits.paths}
        return spawn([sys.executable, *FLAGS, str(script), json.dumps(settings)], env=ENVIRONMENT)

    def close(self) -> None:
        super().close()
        self._folders.cleanup()
