"""The process inside the sandbox: takes programs one after the other and runs each in a fork.

Started as pid 1 of the sandbox, by its file, with the standard library alone; the file is all of this project that is
visible there. Guarantees:
1. a program runs in a forked child with its limits set, in an empty folder, with nothing open but its three streams;
2. after each program everything that it started is killed and everything that it wrote is removed, before the next;
3. a program cannot trace, read or signal this process: it is pid 1, and not dumpable;
4. it holds no secrets: its parent sends no expected answers.
Without isolation it is an ordinary process, and 2 and 3 hold only for the program's process group.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import json
import os
import resource
import runpy
import select
import shutil
import signal
import site
import stat
import struct
import sys
import threading
import time
import traceback
from typing import Any

LENGTH = struct.Struct("<Q")
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
CHUNK = 1 << 16
MIB = 1 << 20

Frame = dict[str, Any]


def read_exactly(size: int) -> bytes:
    """Read from the parent. Ends the process if the parent is gone."""
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), MIB))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def receive() -> Frame:
    """The next frame of the parent."""
    (size,) = LENGTH.unpack(read_exactly(LENGTH.size))
    frame: Frame = json.loads(read_exactly(size))
    return frame


def send(frame: Frame) -> None:
    """A frame to the parent."""
    data = json.dumps(frame).encode()
    view = memoryview(LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(1, view) :]


def become_nobody(uid: int, gid: int) -> None:
    """Drop root, end with the parent, and deny access to programs. A bwrap of root has no capability to signal this
    process, so the kernel does not end it with the parent: `watch` checks too."""
    if uid:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of uid has cleared it
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def set_limits(job: Frame, max_processes: int) -> None:
    """Set the limits of the program and of each process that it starts."""
    seconds = int(job["timeout_s"]) + 2
    limits = [
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
    ]
    if max_processes:
        limits.append((resource.RLIMIT_NPROC, max_processes))
    for kind, value in limits:
        if value or kind == resource.RLIMIT_CORE:
            resource.setrlimit(kind, (value, value))


def program(job: Frame, folder: str, streams: tuple[int, int, int], settings: Frame, parent: int) -> None:
    """The forked child: become the program and run it. Does not return."""
    code = 1
    try:
        os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target)
        os.closerange(3, 4096)
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was killed before it could take this process with it
            return
        os.chdir(folder)
        sys.path[:0] = [folder, *settings["paths"]]
        sys.argv[:] = ["main.py", *job["args"]]
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
        site.setquit()
        set_limits(job, settings["max_processes"])
        runpy.run_path("main.py", run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # any exception of a program is its result
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename != "main.py":
            shown = shown.tb_next  # skip the frames of this file
        traceback.print_exception(type(error), error, shown)
    finally:
        ended = finish()
        os._exit(code & 0xFF if ended else 1)


def finish() -> bool:
    """Wait for threads, run exit functions, flush; False if that failed."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # a program may have closed or replaced its streams
        return False
    return True


class Running:
    """A running program: reads its streams, up to a cap."""

    def __init__(self, pid: int, pipes: tuple[int, int], job: Frame) -> None:
        self.pid = pid
        self._pipes = {pipes[0]: bytearray(), pipes[1]: bytearray()}
        self._order = pipes
        self._cap = job["output_bytes"]
        self._deadline = time.monotonic() + job["timeout_s"]
        self.status = ""
        self.exit_code = -int(signal.SIGKILL)  # unless it finishes

    def watch(self) -> None:
        """Wait until it ends, or exceeds its time or output."""
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe, select.POLLIN)
        poll.register(0, 0)  # to see that the other end is closed
        try:
            ended = os.pidfd_open(self.pid)
            poll.register(ended, select.POLLIN)
        except OSError:  # unsupported by this kernel: poll instead
            ended = -1
        while not self.status:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self.status = "timeout"
                break
            for descriptor, _ in poll.poll(1000 * (left if ended >= 0 else min(left, 0.02))):
                if descriptor == 0:  # the parent is gone; the kernel's signal cannot be used: see `become_nobody`
                    kill_all(self.pid)
                    os._exit(0)
                if descriptor in self._pipes and not self._read(descriptor):
                    poll.unregister(descriptor)
            self._reap()
        if ended >= 0:
            os.close(ended)

    def _read(self, pipe: int) -> bool:
        data = os.read(pipe, CHUNK)
        held = self._pipes[pipe]
        held += data[: max(0, self._cap - len(held))]
        if data and len(held) >= self._cap:
            self.status = "output"
        return bool(data)

    def _reap(self) -> None:
        found, how = os.waitpid(self.pid, os.WNOHANG)
        if found and not self.status:
            self.exit_code = os.waitstatus_to_exitcode(how)
            self.status = "finished" if self.exit_code >= 0 else "killed"

    def drain(self) -> None:
        """Read the rest of the pipes after all writers are dead."""
        for pipe in self._order:
            held = self._pipes[pipe]
            os.set_blocking(pipe, False)
            with contextlib.suppress(BlockingIOError):
                while len(held) < self._cap and (data := os.read(pipe, CHUNK)):
                    held.extend(data[: self._cap - len(held)])
            os.close(pipe)

    def streams(self) -> tuple[str, str]:
        """Its output and errors."""
        out, err = (bytes(self._pipes[pipe]).decode(errors="replace") for pipe in self._order)
        return out, err


def write_files(folder: str, job: Frame) -> None:
    """The program and its files."""
    for name, content in {**job["files"], "main.py": base64.b64encode(job["code"].encode(errors="replace"))}.items():
        place = os.path.join(folder, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as stream:
            stream.write(base64.b64decode(content))


def standard_input(folder: str, data: bytes) -> int:
    """A descriptor of an unlinked file with the data, because the call filter refuses memfd."""
    place = os.path.join(folder, "stdin")
    with open(place, "wb") as stream:
        stream.write(data)
    source = os.open(place, os.O_RDONLY)
    os.unlink(place)
    return source


def fetch(folder: str, job: Frame) -> dict[str, str]:
    """The requested regular files."""
    found = {}
    for name in job["fetch"]:
        try:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # `fdopen` raises for a folder: a failure of the sandbox
            os.close(descriptor)
            continue
        with os.fdopen(descriptor, "rb") as stream:
            found[name] = base64.b64encode(stream.read(job["output_bytes"])).decode()
    return found


def kill_all(pid: int) -> None:
    """Everything that the program started."""
    alone = os.getpid() == 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if alone:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while alone:  # ends with ChildProcessError, as pid 1 inherits them all
            os.waitpid(-1, 0)  # bounded: they were killed, and the parent has a deadline
        os.waitpid(pid, 0)  # bounded: it was killed


def empty(folder: str) -> bool:
    """Empty a folder, whatever the file modes; False if something remains."""
    with contextlib.suppress(OSError, RecursionError):
        for place, names, _ in os.walk(folder):
            for name in names:
                inner = os.path.join(place, name)
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    return not os.listdir(folder)


def run(job: Frame, settings: Frame) -> Frame:
    """Run one program; its result."""
    folder = os.path.join(settings["folder"], "work")
    os.mkdir(folder, 0o700)
    began = time.monotonic()
    write_files(folder, job)
    source = standard_input(settings["folder"], job["stdin"].encode(errors="replace"))
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        program(job, folder, (source, out_end, err_end), settings, parent)
    for descriptor in (source, out_end, err_end):
        os.close(descriptor)
    running = Running(pid, (out, err), job)
    running.watch()
    wall_s = time.monotonic() - began
    kill_all(pid)
    running.drain()
    stdout, stderr = running.streams()
    files = fetch(folder, job)
    if running.status == "finished" and running.exit_code and last_line(stderr).startswith("MemoryError"):
        running.status = "memory"
    return {
        "status": running.status,
        "exit_code": running.exit_code,
        "stdout": stdout,
        "stderr": stderr,
        "wall_s": wall_s,
        "files": files,
    }


def last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def main() -> None:
    """Serve programs until the parent goes away."""
    settings: Frame = json.loads(sys.argv[1])
    become_nobody(settings["uid"], settings["gid"])
    send({"ready": True})
    while True:
        job = receive()
        try:
            result = run(job, settings)
        except OSError as error:  # for example files that do not fit: a result of this job, not the end
            result = {"status": "error", "exit_code": 1, "stdout": "", "stderr": str(error), "wall_s": 0.0, "files": {}}
        clean = empty(settings["folder"])
        send({**result, "last": not clean})
        if not clean:
            return  # a new sandbox takes over


if __name__ == "__main__":
    main()
