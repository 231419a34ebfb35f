"""The process inside the sandbox that keeps state: variables, imports and files of one program are there in the next.

Started as pid 1 of the sandbox, by its file, next to `runner.py`, with the standard library alone. It runs the programs
of one sample in itself, so they can do anything to it; its parent bounds each one's time and memory, takes whatever it
sends as a claim, and ends it with everything that it started.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from typing import Any

Frame = dict[str, Any]

_runner = runpy.run_path(os.path.join(os.path.dirname(__file__), "runner.py"))  # nothing else of ours is there
receive, send = _runner["receive"], _runner["send"]
become_nobody, set_limits = _runner["become_nobody"], _runner["set_limits"]

AGAIN_S = 0.2  # until the end of its time is raised again, in a program that caught it
NO_CPU_LIMIT = 10**9  # seconds: the limit of each program is its wall time


class OutOfTime(BaseException):
    """Raised in a program when its time is over; `except Exception` does not catch it."""


def out_of_time(*_: Any) -> None:
    raise OutOfTime


def run(job: Frame, names: Frame, folder_file: str) -> tuple[str, int]:
    """Run a program, or a command of a shell; how it ended, and its exit code."""
    signal.setitimer(signal.ITIMER_REAL, job["timeout_s"], AGAIN_S)
    try:
        return "finished", run_command(job["code"], folder_file) if job["shell"] else run_program(job["code"], names)
    except OutOfTime:
        return "timeout", 1
    except MemoryError:
        return "memory", 1
    except SystemExit as error:
        return "finished", error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # any exception of a program is its result
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename != "program":
            shown = shown.tb_next  # skip the frames of this file
        traceback.print_exception(type(error), error, shown)
        return "finished", 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(Exception):  # a program may have closed or replaced its streams
            sys.stdout.flush()
            sys.stderr.flush()


def run_program(code: str, names: Frame) -> int:
    """Run Python among the names of earlier programs; prints the value of a last line that is an expression."""
    lines = ast.parse(code)
    last = lines.body.pop() if lines.body and isinstance(lines.body[-1], ast.Expr) else None
    exec(compile(lines, "program", "exec"), names)
    if last is not None:
        exec(compile(ast.Interactive([last]), "program", "single"), names)
    return 0


def run_command(command: str, folder_file: str) -> int:
    """Run a command of a shell; the next one begins in the folder in which it ends."""
    ending = f'{command}\n__code=$?; pwd -P > "{folder_file}"; exit $__code'
    child = os.posix_spawn("/bin/sh", ["sh", "-c", ending], os.environ, setsid=True)
    try:
        _, how = os.waitpid(child, 0)  # bounded: by the timer
    except OutOfTime:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)  # bounded: it was killed
        raise
    with contextlib.suppress(OSError), open(folder_file) as stream:
        os.chdir(stream.read().rstrip("\n"))
    return os.waitstatus_to_exitcode(how)


def take_output(stream: int, most: int) -> tuple[str, bool]:
    """What a program wrote to a file, up to `most` bytes, and whether there was more; the file is empty afterwards."""
    size = os.fstat(stream).st_size
    data = os.pread(stream, most, 0)
    os.ftruncate(stream, 0)
    os.lseek(stream, 0, os.SEEK_SET)
    return data.decode(errors="replace"), size > most


def reap() -> None:
    """Forget processes that ended in the background; this process is their parent."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Serve the programs of a sample until the parent goes away."""
    settings: Frame = json.loads(sys.argv[1])
    become_nobody(settings["uid"], settings["gid"])
    folder, outside = os.path.join(settings["folder"], "work"), settings["folder"]
    os.mkdir(folder, 0o700)
    os.chdir(folder)
    sys.path[:0] = [folder, *settings["paths"]]
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    signal.signal(signal.SIGALRM, out_of_time)
    streams = [os.open(os.path.join(outside, name), os.O_RDWR | os.O_CREAT, 0o600) for name in ("out", "err")]
    frames, nothing = (os.dup(0), os.dup(1)), os.open(os.devnull, os.O_RDONLY)
    names: Frame = {"__name__": "__main__"}
    send({"ready": True})
    limited = False
    while True:
        os.dup2(frames[0], 0)
        job = receive()
        if not limited:
            set_limits({**job, "timeout_s": NO_CPU_LIMIT}, settings["max_processes"])
            limited = True
        for target, source in enumerate((nothing, *streams)):
            os.dup2(source, target)
        began = time.monotonic()
        status, code = run(job, names, os.path.join(outside, "folder"))
        wall_s = time.monotonic() - began
        os.dup2(frames[1], 1)
        (out, more), (err, also) = (take_output(stream, job["output_bytes"]) for stream in streams)
        status = "output" if status == "finished" and (more or also) else status
        send({"status": status, "exit_code": code, "stdout": out, "stderr": err, "wall_s": wall_s, "files": {}})
        reap()


if __name__ == "__main__":
    main()
