"""One planned process: its start, its log, its end.

Guarantees:
1. a child writes to its own log file; the supervisor reads new lines from there, complete ones only; an incomplete last
   line is returned after the process has ended;
2. a gang (torchrun) is asked to end through its workers, and its exit code is that of the first worker that failed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import deque
from pathlib import Path

from asyncrl.errors import EXIT_FAILED
from asyncrl.launcher.forked import ForkedProcess, ForkServer
from asyncrl.launcher.parent_guard import guard_command
from asyncrl.process_plan.plan import ProcessPlan
from asyncrl.runtime.child_environment import child_environment
from asyncrl.runtime.host_facts import descendants, kill_group, send

_DEATH_BEGIN = re.compile(r"Received \d+ death signal")  # torchrun was asked to end; its traceback follows
READ_BYTES = 256 << 10
_REPORT_BEGIN = re.compile(r"failed \(exitcode: -?\d+\) local_rank")
_WORKER_EXIT = re.compile(rb"exitcode\s*:\s*(-?\d+)")
_GANG_SIGNAL = re.compile(rb"Received (\d+) death signal")


def format_exit_code(code: int) -> str:
    """An exit code with the signal behind it: `137 (SIGKILL: ...)`."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return str(code)
    return f"{code} ({name}{': by hand, or by the system because memory was full' if name == 'SIGKILL' else ''})"


def effective_exit_code(returncode: int, log: bytes, *, gang: bool) -> int:
    """The exit code that counts: that of the failed worker if torchrun reports 1; 128 + number for a signal, also for
    one that torchrun got.
    """
    if gang and returncode == EXIT_FAILED:
        if found := _WORKER_EXIT.findall(log):
            returncode = int(found[-1])
        elif found := _GANG_SIGNAL.findall(log):
            returncode = -int(found[-1])
    return 128 - returncode if returncode < 0 else returncode


class Child:
    """One planned process and its state."""

    def __init__(self, plan: ProcessPlan, log: Path) -> None:
        self.plan = plan
        self.log = log
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.started = False
        self.code: int | None = None  # final exit code
        self.restart_at: float | None = None
        self.restarted: deque[float] = deque()
        self.restarts = 0
        self.last_lines: deque[str] = deque(maxlen=20)
        self._offset = log.stat().st_size if log.exists() else 0
        self._begin = self._offset
        self._partial = b""
        self._dying = False  # inside torchrun's traceback about a signal
        self._rules = 0  # separator lines left until torchrun's failure report ends

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def over(self) -> bool:
        """True when it will not run again."""
        return self.started and self.process is None and self.restart_at is None

    def start(self, forks: ForkServer | None = None) -> int:
        """Start the process, forked if `forks` may and can; its pid."""
        self.restart_at = None
        self.started = True
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        self._rules = 0
        self._dying = False
        env = {**self._inherited(), **self.plan.env}
        with self.log.open("ab") as output:
            self.process = (forks.fork(self.plan, env, output) if forks is not None else None) or subprocess.Popen(
                guard_command(self.plan.argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        return self.process.pid

    def _inherited(self) -> dict[str, str]:
        names = self.plan.inherits
        return dict(os.environ) if names is None else child_environment(names)

    def new_lines(self, *, ended: bool = False) -> list[str]:
        """Complete lines written since the last call (at most 256 KB at a time; `ended`: everything that is left)."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self._offset)
            data = file.read() if ended else file.read(READ_BYTES)
        self._offset += len(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        if ended and self._partial:
            whole.append(self._partial)
            self._partial = b""
        lines = [line.decode(errors="replace").rstrip() for line in whole]
        lines = [line for line in lines if not self._is_report(line)]
        self.last_lines.extend(line for line in lines if line.strip())
        return lines

    def _is_report(self, line: str) -> bool:
        """Whether a line belongs to torchrun's report about a failed worker, which hides the worker's own lines."""
        if not self.plan.gang:
            return False
        if self._dying or _DEATH_BEGIN.search(line):
            self._dying = "SignalException" not in line
            return True
        if _REPORT_BEGIN.search(line):
            self._rules = 2
        elif self._rules and set(line) == {"="}:
            self._rules -= 1
            return True
        return self._rules > 0

    def attempt_log(self) -> bytes:
        """The end of the current attempt's log."""
        with self.log.open("rb") as file:
            file.seek(max(self._begin, self.log.stat().st_size - (64 << 10)))
            return file.read()

    def terminate(self) -> None:
        """Ask for a graceful end. The workers of a gang are asked directly: torchrun would turn their success into
        1.
        """
        if self.process is None:
            return
        targets = descendants(self.process.pid, depth=1) if self.plan.gang else []
        for pid in targets or [self.process.pid]:
            send(pid, signal.SIGTERM)
        self.wake()

    def wake(self) -> None:
        """Continue a stopped process and all below it: it can neither end nor answer otherwise."""
        if self.process is not None:
            for pid in (self.process.pid, *descendants(self.process.pid)):
                send(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, its group and everything below it."""
        if self.process is not None:
            below = descendants(self.process.pid)
            kill_group(self.process.pid)
            for pid in below:
                send(pid, signal.SIGKILL)
