"""The launcher's side of `asyncrl.launcher.fork_server`: which roles are forked, and processes that were.

Guarantees:
1. a role is forked only if its command is a module of this interpreter, and every variable that an interpreter or a
   library reads at its start has the server's value; `AFTER_IMPORT` has those that are read later;
2. a server that is dead, unfit, stopped or late costs a role nothing but the wait: it is executed, once.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from asyncrl.launcher.fork_server import READY, module_words
from asyncrl.process_plan.plan import ProcessPlan
from asyncrl.runtime.child_environment import child_environment, is_inherited
from asyncrl.runtime.device import TABLE

IMPORT_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 10.0
PR_SET_CHILD_SUBREAPER = 36
#: Read when a device, a collective or a role begins, not when its module is imported.
AFTER_IMPORT = frozenset({*(device.visible_env for device in TABLE.values()), "HIP_VISIBLE_DEVICES"})


def import_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that may change what an import does."""
    late = {name for name in env if name in AFTER_IMPORT or name.startswith("ASYNCRL_")}
    return {name: value for name, value in env.items() if is_inherited(name) and name not in late}


class ForkServer:
    """Forks the roles whose plans name imports."""

    def __init__(self, plans: Sequence[ProcessPlan], log: Path) -> None:
        self._log = log
        heavy = [plan for plan in plans if plan.imports]
        self._modules = list(dict.fromkeys(name for plan in heavy for name in plan.imports))
        self._env = import_settings(child_environment(more=heavy[0].env if heavy else {}))
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._deadline = 0.0

    def start(self) -> None:
        """Start the server if a role needs it and may be forked at all."""
        places = self._env.get("PYTHONPATH", "").split(os.pathsep)
        if not self._modules or sys.platform != "linux" or any(Path(at, "sitecustomize.py").exists() for at in places):
            return
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(ANSWER_TIMEOUT_S)
        command = [sys.executable, "-m", "asyncrl.launcher.fork_server", str(os.getpid()), str(theirs.fileno())]
        with theirs, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._deadline = time.monotonic() + IMPORT_TIMEOUT_S

    def is_importing(self) -> bool:
        """Whether a role that needs the imports should wait for this server."""
        if self._process is None or self._ready:
            return False
        if select.select([self._orders], [], [], 0)[0]:
            self._ready = self._orders.recv(len(READY)) == READY  # bounded: it is readable
            if not self._ready:
                self.close()  # it has ended
            return False
        if time.monotonic() > self._deadline:
            self.close()
        return self._process is not None

    def fork(self, plan: ProcessPlan, env: Mapping[str, str], output: IO[bytes]) -> ForkedProcess | None:
        """The process of a plan; None if it has to be executed."""
        if not plan.imports or self.is_importing() or not self._ready:
            return None
        words = module_words(plan.argv)
        if not words or import_settings(env) != self._env:
            return None
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        order = json.dumps({"words": words, "env": dict(env)}).encode()
        with ours, adopting_orphans():
            try:
                with theirs:
                    socket.send_fds(self._orders, [order], [output.fileno(), theirs.fileno()])
                pid = int(ours.recv(16))
                ours.send(b"go")
            except (OSError, ValueError):  # it is gone or stopped
                self.close()
                return None
        return ForkedProcess(pid)

    def close(self) -> None:
        """End the server; roles go on."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            self._orders.close()
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel blocks it; it ends later
                process.wait(timeout=ANSWER_TIMEOUT_S)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """This process becomes the parent of processes below it that lose theirs."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class ForkedProcess:
    """A child of this process that was forked elsewhere; like `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            except ChildProcessError:  # another part of this process has waited for it; Popen says 0, too
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
