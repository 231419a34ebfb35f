"""Child processes that a benchmark asks in turns, one JSON line in and one out; both ends, and their memory.

Used by `bench_engines`, `bench_learner` and what they start. The end in the child imports nothing but the standard
library: it may run in an environment of its own. What libraries print there goes to stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO


class Child:
    """The parent's end. `ready` is the first line that the child said, after it was told `first`."""

    def __init__(self, command: Sequence[str], *, first: Any, log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.ready = self.ask(first)

    def ask(self, line: Any) -> Any:
        """What it answers. Where it has ended, this process ends and says so."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait(30)}:\n{self.tail()}")
        return json.loads(answer)

    def tail(self) -> str:
        """The end of what it printed."""
        return Path(self._log.name).read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End its input, and it with it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()


class Answers:
    """The child's end of its output: made before anything can print."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, line: Any) -> None:
        """One answer."""
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()

    @staticmethod
    def hear() -> Any:
        """The next question; None where the input has ended."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None


def resident(field: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (the most since `forget_peak`). Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in /proc/self/status")


def forget_peak() -> None:
    """Set the high-water mark of the resident memory back to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
