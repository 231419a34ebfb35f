"""A server process for a test: started with a free port, ended with everything that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import warm

END_S = 10.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """`command` gets `--port N`. Its output goes to `log`."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [*command, "--port", str(self.port)]
        self._environment = {**os.environ, **(environment or {})}
        self.start()

    def start(self) -> None:
        """Start it, again on the same port."""
        with self.log.open("ab") as out:
            self.child = warm.popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def end(self) -> None:
        """Kill it and its children, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(END_S)

    def stop(self) -> None:
        """Let all its processes stand still."""
        os.killpg(self.child.pid, signal.SIGSTOP)

    def wait(self, words: str, *, within_s: float = 60.0) -> None:
        """Wait until its output has these words."""
        deadline = time.monotonic() + within_s
        while words not in self.log.read_text(errors="replace"):
            assert self.child.poll() is None and time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.05)
