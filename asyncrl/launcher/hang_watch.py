"""Detects that a run makes no progress, and diagnoses the reason.

Guarantees:
1. no step for `run.hang_timeout_s` is a hang; from a learner's start to its first step `run.start_timeout_s` applies if
   it is longer. A learner that ended with code 70 shortly before the limit counts as a hang;
2. the diagnosis comes from the buffer, with a deadline; without an answer it names the silence, and every process of
   the run on this host that is stopped (SIGSTOP, a debugger). It includes the counts of the queue;
3. before anything ends, all roles on this host write their stacks to their logs (SIGUSR1); stopped ones are continued
   first. Only processes recorded in the run folder get the signal: they have the handler. It ends nothing itself.
   `learners.gang.watchdog` ends a rank that hangs in a collective.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from asyncrl.config import Config
from asyncrl.launcher.liveness_watch import process_tree
from asyncrl.metrics import JsonTail, read_lines
from asyncrl.monitor.text import QUEUE_STATES
from asyncrl.runtime.host_facts import descendants, process_state, send
from asyncrl.runtime.liveness import STOPPED
from asyncrl.runtime.run_dir import RunDir, buffer_address, run_keys

LOOK_S = 0.5
NEARLY = 0.9  # share of the limit after which the learner's own code 70 counts as the same hang
DUMP_S = 0.5  # time for the stacks to reach the logs


def ask_buffer(config: Config) -> dict[str, Any]:
    """The buffer's status, or `{"error": ...}`."""
    from asyncrl.monitor.control import service_status  # sockets and NumPy: only a run that hangs needs them

    return service_status(buffer_address(config), run_keys(config))


class HangWatch:
    """The clock of a run. `ask` gets the buffer's status; `clock` counts seconds."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        *,
        ask: Callable[[Config], dict[str, Any]] = ask_buffer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._config = config
        self._ask = ask
        self._clock = clock
        self._steps = JsonTail(run.metrics / "learner.jsonl")
        self._steps.poll()  # steps of an earlier start
        self._since = clock()
        self._starting = True
        self._next_look = 0.0

    def learner_started(self) -> None:
        """Restart the clock: the learner must load its model first."""
        self._steps.poll()
        self._since = self._clock()
        self._starting = True

    def look(self, *, learner_ended: bool = False) -> str:
        """The text for the user if the limit has passed, else empty. `learner_ended`: by itself, with code 70."""
        now = self._clock()
        if now < self._next_look and not learner_ended:
            return ""
        self._next_look = now + LOOK_S
        if self._steps.poll():
            self._since = now
            self._starting = False
        name, limit = self._limit()
        silent = now - self._since
        if silent <= limit * (NEARLY if learner_ended else 1.0):
            return ""
        if not learner_ended and self._ends():
            self._since = now  # an evaluation has its own time limit, and so has another policy
            return ""
        return f"no step for {silent:.0f} s ({name} = {limit:g}). {self.diagnosis()}"

    def _limit(self) -> tuple[str, float]:
        """The setting in force, and its seconds."""
        run = self._config.run
        if self._starting and run.start_timeout_s > run.hang_timeout_s:
            return "run.start_timeout_s", run.start_timeout_s
        return "run.hang_timeout_s", run.hang_timeout_s

    def _ends(self) -> bool:
        """Whether the learner has done its last step and waits for a running evaluation, or for other policies."""
        if not self._config.evaluation.enabled and not self._config.run.other_policies:
            return False
        status = self._ask(self._config)
        waits = bool(self._config.run.other_policies) or (status.get("evaluation") or {}).get("running")
        return bool(waits) and int(status.get("version", 0)) >= self._config.learner.steps

    def diagnosis(self) -> str:
        """One sentence about the processes that the run waits for."""
        status = self._ask(self._config)
        if "error" in status:
            what = f"the buffer does not answer: {status['error']}"
        else:
            learner = (status.get("learner") or {}).get("waiting_for", "")
            what = str(
                status.get("waiting_for") or learner or "the buffer waits for no process; see the learner's stacks"
            )
        mine = {os.getpid(): "launcher"}
        stopped = [one for one in process_tree(mine, self._names()) if (process_state(one.pid) or "-") in STOPPED]
        names = ", ".join(f"{one.name} (pid {one.pid} on {socket.gethostname()})" for one in stopped)
        counts = status.get("ledger") or self._last_counts()
        queue = ", ".join(f"{state} {int(counts[state])}" for state in QUEUE_STATES if counts.get(state))
        return what + (f"; stopped by a signal: {names}" if stopped else "") + (f"; queue: {queue}" if queue else "")

    def _last_counts(self) -> dict[str, Any]:
        """The last line that the buffer wrote, if it does not answer now."""
        lines = read_lines(self._run.metrics / "buffer.jsonl")[-1:]
        return lines[0] if lines else {}

    def _names(self) -> dict[int, str]:
        noted = [line for line in read_lines(self._run.processes) if isinstance(line.get("pid"), int)]
        return {line["pid"]: str(line.get("name")) for line in noted}

    def local_roles(self) -> list[tuple[str, int]]:
        """(name, pid) of the living roles started by this process."""
        names = self._names()
        return [(names[pid], pid) for pid in descendants(os.getpid()) if pid in names]

    def dump_stacks(self) -> None:
        """Let every local role write its stacks to its log."""
        for _, pid in self.local_roles():
            send(pid, signal.SIGUSR1)
            send(pid, signal.SIGCONT)
        time.sleep(DUMP_S)
