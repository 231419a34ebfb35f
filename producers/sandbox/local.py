"""Programs on this host: isolated by bubblewrap, or not at all where that is spelled out.

Made by `producers.sandbox.open_sandbox`. Each `LocalSandbox` keeps up to `workers` sandboxes warm, each a process of
`producers.sandbox.runner` that takes one program at a time. What `Bubblewrap` gives a program:
1. namespaces of its own (user or an unprivileged uid, pid, network, IPC, UTS, cgroup): no network, no other process;
2. a read-only root with the interpreter, its library and the C library, and nothing else of the host: no home, no run
   folder, no keys; /tmp of `disk_bytes`, in memory; /dev and / cannot be written;
3. no capability, no new privileges, a filter of system calls (`producers.sandbox.seccomp`), a session of its own;
4. limits for each process (memory, CPU time, file size, open files, no core) and for the whole (processes, resident
   memory, looked at every `LOOK_S`), a wall clock, and a cap on what it writes;
5. it dies with the process that started it.
Where this cannot be had, nothing runs: `sandbox.unavailable`.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError, Unavailable
from asyncrl.runtime.host_facts import child_pids
from producers.sandbox import seccomp
from producers.sandbox.base import MIB, Sandbox, SandboxJob, SandboxLimits, SandboxResult, checked

LENGTH = struct.Struct("<Q")
START_LIMIT_S = 60.0
GRACE_S = 10.0  # beyond a program's own time, until its sandbox is taken for stuck
LOOK_S = 0.1
OWN_BYTES = 64 * MIB  # what the process inside may use beside the program
INODE_BYTES = 1 << 10
MOST_JOBS = 2000  # of one sandbox; then a new one
NEEDED_CAPABILITIES = (1 << 21) | (1 << 7) | (1 << 6)  # SYS_ADMIN, SETUID, SETGID
FIRST_UID, UIDS = 30_000, 30_000  # of which a sandbox that root starts takes one
INSIDE = Path(__file__).with_name("runner.py")
SHOWN = "/sandbox/runner.py"  # what it is called in there
_numbers = itertools.count()


class Ended(Exception):
    """The process inside has gone, or says what it never says."""


class Stopped(Exception):
    """A program was ended from outside: `status` of its result."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


class Inside:
    """One process of `producers.sandbox.runner`, which runs programs one after the other."""

    def __init__(self, process: subprocess.Popen[bytes], limits: SandboxLimits, *, watched: bool) -> None:
        self._process = process
        self._limits = limits
        self._watched = watched
        self._held = bytearray()
        self._within: list[int] = []  # descriptors of processes that do not die with the one that was started
        self.jobs = 0
        self.usable = True

    def wait_ready(self) -> None:
        """Raises Ended where it does not come up."""
        self._receive(time.monotonic() + START_LIMIT_S, 1 << 10, 0)
        if self._watched:
            self._within = [os.pidfd_open(pid) for pid in child_pids(self._process.pid)]

    def run(self, job: SandboxJob) -> SandboxResult:
        """One program. Raises Ended where the process has gone."""
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
        }
        most = 8 * limits.output_bytes * (2 + len(job.fetch)) + (1 << 16)  # JSON may write a byte as six
        began = time.monotonic()
        deadline = time.monotonic() + timeout_s + GRACE_S
        try:
            self._send(frame, deadline)
            done = self._receive(deadline, most, memory + OWN_BYTES)
        except Stopped as stopped:
            self.close()
            return SandboxResult(status=stopped.status, exit_code=-9, wall_s=time.monotonic() - began)
        self.usable = not done.pop("last", False)
        files = {name: base64.b64decode(content) for name, content in done.pop("files").items()}
        return SandboxResult(files=files, **done)

    def _send(self, frame: dict[str, Any], deadline: float) -> None:
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        os.set_blocking(pipe, False)  # so that a stopped reader cannot block the writer for ever
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
            frame: dict[str, Any] = json.loads(self._held[LENGTH.size : end])
        except UNREADABLE as error:
            raise Ended(str(error)) from None
        del self._held[:end]
        return frame

    def _look(self, memory: int) -> None:
        """Raises Stopped where the programs take more than they may together."""
        if not self._watched or not memory:
            return
        layer = child_pids(self._process.pid)  # the process inside: it sees the files that programs write
        found, resident = 0, sum(map(inode_bytes, layer))
        while layer:
            found += len(layer)
            resident += sum(map(resident_bytes, layer))
            if found > 2 * self._limits.max_processes + 8:
                raise Stopped("killed")
            layer = [child for parent in layer for child in child_pids(parent)]
        if resident > memory:
            raise Stopped("memory")

    def close(self) -> None:
        """Kill it with everything in it. A bwrap that root started has no right left to end the user inside."""
        self.usable = False
        for descriptor in self._within:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._within = []
        if self._process.returncode is None:  # afterwards its number may be somebody else's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=GRACE_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not flushed goes with it
                    stream.close()

    def last_words(self) -> str:
        """What it wrote to its errors, once closed it is lost."""
        if self._process.stderr is None:
            return ""
        os.set_blocking(self._process.stderr.fileno(), False)
        return (self._process.stderr.read(4096) or b"").decode(errors="replace").strip()


class LocalSandbox(Sandbox):
    """What the two kinds on this host share: a few warm processes, handed out one program at a time."""

    def __init__(self, limits: SandboxLimits | None = None, *, workers: int = 1) -> None:
        super().__init__(limits)
        self._idle: list[Inside] = []
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(workers)
        # One thread for its whole life: what asks to die with its parent dies with the *thread* that made it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox")

    @abstractmethod
    def start(self) -> subprocess.Popen[bytes]:
        """Start a process of `producers.sandbox.runner`."""

    @property
    @abstractmethod
    def isolated(self) -> bool:
        """Whether a program is kept from the host."""

    def run_job(self, job: SandboxJob) -> SandboxResult:
        """Run one program to its end."""
        checked(job)
        with self._places:  # bounded: each program has its time
            for last_try in (False, True):
                inside = self._open()
                try:
                    result = inside.run(job)
                except Ended as error:  # killed by somebody, such as the kernel out of memory
                    inside.close()
                    if last_try:
                        raise Unavailable("sandbox.failed", f"it ended twice under the same program: {error}") from None
                    continue
                self._give_back(inside)
                return result
        raise AssertionError

    def probe(self) -> None:
        """Start one, and keep it for the first program."""
        self._give_back(self._open())

    def _open(self) -> Inside:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        process = self._starter.submit(self.start).result(START_LIMIT_S)
        inside = Inside(process, self.limits, watched=self.isolated)
        try:
            inside.wait_ready()
        except (Ended, Stopped) as error:
            words = inside.last_words() or str(error)
            inside.close()
            raise ConfigError("sandbox.unavailable", f"it does not start: {words}") from None
        return inside

    def _give_back(self, inside: Inside) -> None:
        if inside.usable and inside.jobs < MOST_JOBS:
            with self._lock:
                self._idle.append(inside)
        else:
            inside.close()

    def close(self) -> None:
        """End the processes that wait for programs."""
        with self._lock:
            idle, self._idle = self._idle, []
        for inside in idle:
            inside.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError, AsyncRLError):
            self.close()


class Unprotected(LocalSandbox):
    """No isolation: the program can do what this process can do, within its limits. Only where it is spelled out."""

    @property
    def isolated(self) -> bool:
        return False

    def __init__(self, limits: SandboxLimits | None = None, *, workers: int = 1) -> None:
        super().__init__(limits, workers=workers)
        self._folders = tempfile.TemporaryDirectory(prefix="asyncrl-program-")

    def start(self) -> subprocess.Popen[bytes]:
        """An ordinary process with a folder of its own."""
        folder = Path(self._folders.name, str(next(_numbers)))
        folder.mkdir()
        settings = {"uid": 0, "gid": 0, "folder": str(folder), "max_processes": 0, "paths": self.limits.paths}
        return spawn([sys.executable, *FLAGS, str(INSIDE), json.dumps(settings)], env=ENVIRONMENT)

    def close(self) -> None:
        super().close()
        self._folders.cleanup()


class Bubblewrap(LocalSandbox):
    """Isolated by bubblewrap: see this module's guarantees."""

    @property
    def isolated(self) -> bool:
        return True

    def start(self) -> subprocess.Popen[bytes]:
        """Raises `sandbox.unavailable` where bubblewrap is missing."""
        found = shutil.which("bwrap")
        if sys.platform != "linux" or found is None:
            raise ConfigError("sandbox.unavailable", "bubblewrap (bwrap) is not on the PATH")
        number = (os.getpid() * 16 + next(_numbers)) % UIDS
        uid = FIRST_UID + number if privileged() else 0
        settings = {
            "uid": uid,
            "gid": uid,
            "folder": "/tmp",
            "max_processes": self.limits.max_processes,
            "paths": self.limits.paths,
        }
        filters = os.memfd_create("filter", 0) if seccomp.program() else -1
        try:
            extra = []
            if filters >= 0:
                os.write(filters, seccomp.program())
                os.lseek(filters, 0, os.SEEK_SET)
                extra = ["--seccomp", str(filters)]
            command = [
                found,
                *arguments(self.limits, as_root=bool(uid)),
                *extra,
                "--",
                interpreter(),
                *FLAGS,
                SHOWN,
                json.dumps(settings),
            ]
            return spawn(command, env=dict(os.environ), keep=(filters,) if filters >= 0 else ())
        finally:
            if filters >= 0:
                os.close(filters)


FLAGS = ("-s", "-S", "-P")  # nothing of the user's or the site's, and not the folder of the script
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
    "OMP_NUM_THREADS": "1",
}


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
    """Whether a pipe can be read or written, or has ended, within `LOOK_S`. `select` ends at descriptor 1024."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(1000 * LOOK_S))


def privileged() -> bool:
    """Whether this process can make namespaces as root and then give root up inside them."""
    if os.geteuid() != 0:
        return False
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return held & NEEDED_CAPABILITIES == NEEDED_CAPABILITIES


def interpreter() -> str:
    """The interpreter itself, not a link of a virtual environment to it."""
    return os.path.realpath(sys.executable)


def arguments(limits: SandboxLimits, *, as_root: bool) -> list[str]:
    """What bubblewrap is told. Root keeps no user namespace: an unprivileged uid of the host bounds its processes."""
    isolate = [
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--cap-drop",
        "ALL",
        "--cap-add",
        "CAP_SETUID",
        "--cap-add",
        "CAP_SETGID",
    ]
    if not as_root:
        isolate = ["--unshare-all", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    result = [*isolate, "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    libraries = os.pathsep.join(sorted({str(Path(interpreter()).parents[1] / "lib")}))
    for name, value in {**ENVIRONMENT, "LD_LIBRARY_PATH": libraries}.items():
        result += ["--setenv", name, value]
    for place in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"):
        if os.path.islink(place):
            result += ["--symlink", os.readlink(place), place]
        elif os.path.exists(place):
            result += ["--ro-bind", place, place]
    places = [*interpreter_paths(), *limits.paths]
    for folder in sorted({str(parent) for place in places for parent in Path(place).parents} - {"/", "/usr"}):
        result += ["--perms", "0755", "--dir", folder]
    for place in places:
        result += ["--ro-bind", place, place]
    result += ["--perms", "0755", "--dir", "/sandbox", "--ro-bind", str(INSIDE), SHOWN]
    result += ["--proc", "/proc", "--dev", "/dev"]
    result += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
    return [*result, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


def interpreter_paths() -> list[str]:
    """The interpreter and its standard library."""
    paths = {interpreter()}
    for name in ("stdlib", "platstdlib"):
        paths.add(sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix}))
    library = Path(interpreter()).parents[1] / "lib"
    if str(library) not in ("/lib", "/usr/lib") and library.is_dir():
        paths.add(str(library))
    return sorted(path for path in paths if not path.startswith(("/lib/", "/usr/lib/")))


def resident_bytes(pid: int) -> int:
    """Memory that a process holds, without the files that it maps; 0 where it has ended. What it shares with others
    (`mmap` of no file) counts for each of them."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def inode_bytes(pid: int) -> int:
    """What the files in a sandbox cost beside their contents, which `disk_bytes` bounds: the kernel counts nothing for
    an empty one. 0 where it cannot be seen."""
    try:
        found = os.statvfs(f"/proc/{pid}/root/tmp")
    except OSError:
        return 0
    return (found.f_files - found.f_ffree) * INODE_BYTES
