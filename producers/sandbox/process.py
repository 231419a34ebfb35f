"""One warm process of `producers.sandbox.runner`, from the outside: frames, limits, its end."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE
from asyncrl.runtime.host_facts import child_pids
from producers.sandbox.base import MIB, SandboxJob, SandboxLimits, SandboxResult

LENGTH = struct.Struct("<Q")
START_LIMIT_S = 60.0
GRACE_S = 10.0  # beyond a program's own time, until its sandbox counts as stuck
LOOK_S = 0.1
OWN_BYTES = 64 * MIB  # for the runner itself, in addition to the program
INODE_BYTES = 1 << 10
RUNNER, SESSION, BROWSER = (
    Path(__file__).with_name(name) for name in ("runner.py", "session_runner.py", "browser_runner.py")
)
FLAGS = ("-s", "-S", "-P")  # without the user's and the site's packages, and without the script's folder
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
    "OMP_NUM_THREADS": "1",
}


class Ended(Exception):
    """The runner is gone, or sent garbage."""


class Stopped(Exception):
    """A program was ended from outside; `status` of its result."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


class RunnerProcess:
    """One process of `producers.sandbox.runner` or `session_runner`; it runs programs one after the other."""

    def __init__(self, process: subprocess.Popen[bytes], limits: SandboxLimits, *, watched: bool) -> None:
        self._process = process
        self._limits = limits
        self._watched = watched
        self._held = bytearray()
        self._inner: list[int] = []  # descriptors of processes that survive the started one
        self._ending = threading.Lock()  # `kill` may come from another thread
        self.jobs = 0
        self.usable = True

    def wait_ready(self) -> None:
        """Raises Ended if it does not start."""
        self._receive(time.monotonic() + START_LIMIT_S, 1 << 10, 0)
        if self._watched:
            self._inner = [os.pidfd_open(pid) for pid in child_pids(self._process.pid)]

    def run(self, job: SandboxJob, *, shell: bool = False, session: bool = False) -> SandboxResult:
        """Run one program, or a command of a shell. `session`: something of it may stay. Raises Ended if the process is
        gone, or sent garbage."""
        limits = self._limits
        timeout_s = job.timeout_s if job.timeout_s is not None else limits.timeout_s
        memory = job.memory_bytes if job.memory_bytes is not None else limits.memory_bytes
        self.jobs += 1
        frame = {
            "code": job.code,
            "stdin": job.stdin,
            "args": job.args,
            "fetch": job.fetch,
            "timeout_s": timeout_s,
            "files": {name: base64.b64encode(content).decode() for name, content in job.files.items()},
            "memory_bytes": memory,
            "output_bytes": limits.output_bytes,
            "file_bytes": limits.disk_bytes,
            "shell": shell,
        }
        most = 8 * limits.output_bytes * (2 + len(job.fetch)) + (1 << 16)  # JSON may write a byte as six
        began = time.monotonic()
        deadline = time.monotonic() + timeout_s + GRACE_S
        try:
            self._send(frame, deadline)
            done = self._receive(deadline, most, memory + OWN_BYTES)
            self._look(memory + OWN_BYTES if session else 0)  # short calls end before the first look
        except Stopped as stopped:
            self.close()
            return SandboxResult(status=stopped.status, exit_code=-9, wall_s=time.monotonic() - began)
        self.usable = not done.pop("last", False)
        try:
            return msgspec.convert(done, SandboxResult)  # files are base64
        except msgspec.ValidationError as error:
            raise Ended(str(error)) from None

    def _send(self, frame: dict[str, Any], deadline: float) -> None:
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        os.set_blocking(pipe, False)  # so that a stopped reader cannot block the writer forever
        data = json.dumps(frame).encode()
        left = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while left:
                if time.monotonic() >= deadline:
                    raise Stopped("timeout")
                if ready(pipe, select.POLLOUT):
                    left = left[os.write(pipe, left) :]
        except OSError as error:
            raise Ended(str(error)) from None

    def _receive(self, deadline: float, most_bytes: int, memory: int) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while (frame := self._take(most_bytes)) is None:
            if time.monotonic() >= deadline:
                raise Stopped("timeout")
            if not ready(pipe, select.POLLIN):
                if self._process.poll() is not None:
                    raise Ended(f"exit code {self._process.returncode}")
                self._look(memory)
                continue
            data = os.read(pipe, 1 << 16)
            if not data:
                raise Ended("it ended")
            self._held += data
        return frame

    def _take(self, most_bytes: int) -> dict[str, Any] | None:
        if len(self._held) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._held)
        if size > most_bytes:
            raise Stopped("output")
        end = LENGTH.size + size
        if len(self._held) < end:
            return None
        try:
            frame = msgspec.json.decode(bytes(self._held[LENGTH.size : end]), type=dict[str, Any])
        except UNREADABLE as error:
            raise Ended(str(error)) from None
        del self._held[:end]
        return frame

    def _look(self, memory: int) -> None:
        """Raises Stopped if the programs together exceed a limit."""
        if not self._watched or not memory:
            return
        layer = child_pids(self._process.pid)  # the process inside, which sees the programs' files
        found, resident = 0, sum(map(inode_bytes, layer))
        while layer:
            found += len(layer)
            resident += sum(map(resident_bytes, layer))
            if found > 2 * self._limits.max_processes + 8:
                raise Stopped("killed")
            layer = [child for parent in layer for child in child_pids(parent)]
        if resident > memory:
            raise Stopped("memory")

    def kill(self) -> None:
        """Kill it with everything inside, also while another thread runs a program. A bwrap of root has no right to end
        the user inside, so they are killed first."""
        with self._ending:
            for descriptor in self._inner:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            if self._process.returncode is None:  # later its pid may be reused
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and forget it."""
        self.usable = False
        self.kill()
        with self._ending:
            for descriptor in self._inner:
                os.close(descriptor)
            self._inner = []
            self._process.wait(timeout=GRACE_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # unflushed data is lost
                    stream.close()

    def last_words(self) -> str:
        """Its standard error; call it before `close`."""
        if self._process.stderr is None:
            return ""
        os.set_blocking(self._process.stderr.fileno(), False)
        return (self._process.stderr.read(4096) or b"").decode(errors="replace").strip()


def spawn(command: list[str], *, env: dict[str, str], keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """A process with pipes, in a session of its own."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        pass_fds=keep,
        start_new_session=True,
    )


def ready(descriptor: int, event: int) -> bool:
    """Whether a pipe can be read or written, or has ended, within `LOOK_S`. `select` fails above descriptor 1024."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(1000 * LOOK_S))


def resident_bytes(pid: int) -> int:
    """Memory of a process, without mapped files; 0 if it has ended. Shared memory (`mmap` without a file) counts for
    each process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def inode_bytes(pid: int) -> int:
    """Memory of the files in a sandbox besides their contents, which `disk_bytes` bounds: the kernel does not count
    empty files. 0 if unknown."""
    try:
        found = os.statvfs(f"/proc/{pid}/root/tmp")
    except OSError:
        return 0
    return (found.f_files - found.f_ffree) * INODE_BYTES
