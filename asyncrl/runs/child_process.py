"""The process that trains or scores for a command: tied to it, and alive only as long as it makes progress."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import AsyncRLError
from asyncrl.launcher.parent_guard import guard_command
from asyncrl.process_plan.interpreters import python_path
from asyncrl.process_plan.plan import environment
from asyncrl.runtime.host_facts import kill_group

POLL_S = 0.2


def run_child(
    words: Sequence[str], log: Path, *, threads: int, limit_s: float, progress: Callable[[], int], where: str
) -> int:
    """Run the command to its end; its exit code. Its output goes to `log`; `progress` counts what it has done.

    Raises `hang` if the count does not grow within `limit_s`.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            guard_command(words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment(threads, python_path())},
            start_new_session=True,
        )
    done, moved = 0, time.monotonic()
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=POLL_S)
            if (count := progress()) > done:
                done, moved = count, time.monotonic()
            if time.monotonic() - moved > limit_s:
                raise AsyncRLError("hang", f"no progress within {limit_s:g} s", where=where)
    finally:
        if process.poll() is None:
            kill_group(process.pid)
