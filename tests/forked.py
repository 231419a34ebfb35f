"""Real processes at once: forked from a parent that has imported everything and has no threads.

`Forks` starts this file as a process of its own. A child has its own pid and signals and takes SIGKILL like any other;
it runs a function of a module that the test names, with one end of a connection as the first argument.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """So that nothing is left of a test that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(address: str, modules: Sequence[str]) -> None:
    """Fork a child for every connection: it gets (module, function, arguments, environment)."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in modules:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a forked child would miss the other threads"
    listener = Listener(address, "AF_UNIX")
    print("ready", flush=True)
    while True:
        connection = listener.accept()
        if os.fork() == 0:
            become(connection)
        connection.close()


def become(connection: Connection) -> None:
    """The child."""
    code = 70
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        module, function, args, environment, log = connection.recv()
        if log:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
        os.environ.update(environment)
        connection.send(os.getpid())
        getattr(importlib.import_module(module), function)(connection, *args)
        code = 0
    except (EOFError, BrokenPipeError):
        code = 0  # the test has ended
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Child:
    """One process. `next` and `say` are the words between it and the test."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.pid: int = pipe.recv() if pipe.poll(20) else 0
        assert self.pid, "no process was forked"
        self.said: list[Any] = []

    def next(self, within_s: float = 10.0) -> Any:
        """Its next word; None where it has ended or says nothing for so long."""
        try:
            self.said.append(self.pipe.recv() if self.pipe.poll(within_s) else None)
        except (EOFError, OSError):
            self.said.append(None)
        return self.said[-1]

    def say(self, word: Any) -> None:
        """Tell it; a process that is gone hears nothing."""
        try:
            self.pipe.send(word)
        except (BrokenPipeError, OSError):
            return

    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it; its connection is closed."""
        with suppress(ProcessLookupError):  # it ends on its own at this moment
            if self.alive():
                self.signal(signal.SIGKILL)
        self.pipe.close()


class Forks:
    """The parent of the children. `modules` are imported once; `paths` go before those of the tests."""

    def __init__(self, modules: Sequence[str], *, paths: Sequence[Path] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._address = f"{self._folder.name}/socket"
        path = os.pathsep.join(map(str, [*paths, HERE, HERE.parent]))
        self._server = subprocess.Popen(
            [sys.executable, __file__, self._address, *modules],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line == "ready\n", f"the parent of the children did not start: {line!r}"
        self._children: list[Child] = []

    def start(
        self, module: str, function: str, *args: Any, environment: dict[str, str] | None = None, log: str = ""
    ) -> Child:
        """A child that runs `module.function(connection, *args)`."""
        pipe = Client(self._address, "AF_UNIX")
        pipe.send((module, function, args, environment or {}, log))
        child = Child(pipe)
        self._children.append(child)
        return child

    def end_children(self) -> None:
        for child in self._children:
            child.end()
        self._children.clear()

    def close(self) -> None:
        self.end_children()
        self._server.kill()
        self._server.wait(60)
        self._folder.cleanup()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
