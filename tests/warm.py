"""Python processes without their seconds of imports: forked from a parent that has torch and transformers already.

`warm.popen([sys.executable, "-m", "asyncrl", ...])` is a `subprocess.Popen`; its process is forked by this file, run as
a process of its own, which imports what roles import and has one thread. A child is a real process: its own pid,
session, signals, folder, environment and files; the module runs as `__main__` from its first line. Processes that it
starts with this interpreter are forked too (those of a launcher, the ranks of torchrun), as long as it has one thread;
any other command is executed as ever. What it leaves out is the start of the interpreter and its end: a test of those
(`python -m asyncrl --help`, the demo, some whole runs) takes `subprocess`.

A role that needs transformers starts with 0.1 s of CPU instead of 6 s.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: What roles import on their way to the first step.
MODULES = (
    "torch.distributed.fsdp", "torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "transformers.models.qwen3.modeling_qwen3", "safetensors.torch", "tokenizers", "zmq.asyncio",
    "buffers.client.producer", "buffers.client.learner", "buffers.groups.machine", "buffers.main",
    "buffers.stores.sqlite", "weightsync.main",
    "weightsync.publisher.publisher", "weightsync.receiver.receiver", "producers.engines.hf.engine", "producers.main",
    "producers.rewards.main",
    "learners.gang.local_gang", "learners.loop", "learners.main", "learners.backends.fsdp2.backend", "asyncrl.cli",
    "asyncrl.launcher.launch", "asyncrl.report",
)  # fmt: skip
ORDER_BYTES = 100_000
plain_popen = subprocess.Popen


# ---------------------------------------------------------------- the test's side


def popen(argv: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen`; what is no process of this interpreter, or customizes its start, is started as ever."""
    path = ((how.get("env") or os.environ).get("PYTHONPATH") or "").split(os.pathsep)
    if not can_run([str(word) for word in argv]) or any(Path(place, "sitecustomize.py").exists() for place in path):
        return subprocess.Popen(argv, **how)
    return Remote(server().address, argv, **how)


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    check: bool = False,
    capture_output: bool = False,
    input: Any = None,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    how |= {"stdin": subprocess.PIPE} if input is not None else {}
    with popen(argv, **how) as child:
        try:
            out, err = child.communicate(input, timeout=timeout)
        except BaseException:
            child.kill()
            raise
    done = subprocess.CompletedProcess(argv, child.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@functools.cache
def server() -> Server:
    """That of this process."""
    made = Server()
    atexit.register(made.close)
    return made


class Server:
    """The parent of the children. It ends with the process that made it, and its children with it."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.address = f"{self._folder.name}/socket"
        self._server = plain_popen(
            [sys.executable, __file__, self.address, *modules],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n", "the parent of the children did not start"

    def close(self) -> None:
        self._server.kill()
        self._server.communicate(timeout=60)
        self._folder.cleanup()


class Remote(plain_popen):
    """A child of the server that looks like one of this process."""

    def __init__(self, address: str, argv: Sequence[str], **how: Any) -> None:
        self._address = address
        super().__init__(argv, **how)

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        argv = [str(word) for word in asked["args"]]
        assert can_run(argv) and not asked["pass_fds"], argv
        order = order_of(asked, argv)
        self._words = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._words.settimeout(60)
        self._words.connect(self._address)
        with open(os.devnull, "r+b") as nothing:
            files = [place if place >= 0 else nothing.fileno() for place in places_of(asked)]
            socket.send_fds(self._words, [json.dumps(order).encode()], files)
            self.pid = int(self._words.recv(64))
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in PIPES))

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:
        return self._ended(0)

    def _wait(self, timeout: float | None) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._words.fileno() < 0:
            self.returncode = -signal.SIGKILL  # collected as garbage with this object: nobody can ask for its end
        if self.returncode is None and select.select([self._words], [], [], timeout)[0]:
            with self._waitpid_lock:  # type: ignore[attr-defined]  # threads may look at the same time
                if self.returncode is None:
                    said = self._words.recv(64)
                    self.returncode = int(said) if said else -signal.SIGKILL  # the server is gone, and the child
        return self.returncode


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def places_of(asked: dict[str, Any]) -> list[int]:
    """Files of the child's 0, 1 and 2; -1 where it has the parent's."""
    return [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]


def order_of(asked: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """What a child has to know."""
    assert asked["preexec_fn"] is None
    env = os.environ if asked["env"] is None else asked["env"]
    return {
        "argv": argv,
        "cwd": str(asked["cwd"] or os.getcwd()),
        "env": dict(env),
        "session": bool(asked["start_new_session"]),
    }


def can_run(argv: Sequence[str]) -> bool:
    """Whether the command is this interpreter with a module, a script or a text."""
    words = [word for word in argv[1:3] if word != "-u"]
    return argv[0] == sys.executable and bool(words) and (words[0] in ("-m", "-c") or not words[0].startswith("-"))


# ---------------------------------------------------------------- the server


def serve(address: str, modules: Sequence[str]) -> None:
    """Fork a child for every connection; say its pid, and its code at its end. Until stdin is closed."""
    for name in modules:
        importlib.import_module(name)
    assert alone(), "a forked child would miss the other threads"
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    wake, awake = socket.socketpair()
    for end in (wake, awake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
    os.write(1, b"ready\n")
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listener, wake], [], [], 60)
        if 0 in ready:
            break
        if wake in ready:
            wake.recv(4096)
        if listener in ready:
            connection, _ = listener.accept()
            text, files, _, _ = socket.recv_fds(connection, ORDER_BYTES, 3)
            if (pid := os.fork()) == 0:
                become(json.loads(text), files, tie=True)
            for file in files:
                os.close(file)
            connection.send(str(pid).encode())
            children[pid] = connection
        reap(children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def reap(children: dict[int, socket.socket]) -> None:
    """Tell the codes of those that have ended (negative: the signal)."""
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with children.pop(pid) as connection:
                try:
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                except OSError:
                    continue  # nobody waits for it


def alone() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


# ---------------------------------------------------------------- a child


def become(order: dict[str, Any], files: Sequence[int], *, tie: bool = False, keep: Sequence[int] = ()) -> None:
    """Turn this process, just forked, into the one that was asked for. Does not return."""
    code: int | None = 70
    try:
        if tie:
            die_with_parent()
        settle(order, files, keep)
        code = play(order["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(70 if code is None else code & 0xFF)


def settle(order: dict[str, Any], files: Sequence[int], keep: Sequence[int]) -> None:
    """Files, signals, session, folder, environment and path, as of a process that was executed."""
    gc.freeze()  # nothing of the parent is collected here: its files have numbers that are used again
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["session"]:
        os.setsid()
    kept = [os.dup(file) if file >= 0 else -1 for file in files]
    for number, file in enumerate(kept):
        if file >= 0:
            os.dup2(file, number)
    for number in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *keep}:
        with suppress(OSError):  # that of the listing
            os.close(number)
    os.chdir(order["cwd"])
    env = order["env"]
    os.environ.clear()
    os.environ.update(env)
    now = bool(env.get("PYTHONUNBUFFERED")) or "-u" in order["argv"][1:3]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout, sys.stderr = text_file(1, now), text_file(2, True)
    sys.path[:] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place] + OWN_PATH
    importlib.invalidate_caches()
    if "torch" in sys.modules and env.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    subprocess.Popen = Forked  # type: ignore[misc]
    os.execvp = execute  # type: ignore[assignment]


def text_file(number: int, now: bool) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if now else io.BufferedWriter(raw),
        "utf-8",
        write_through=now,  # type: ignore[arg-type]
        errors="backslashreplace" if number == 2 else "strict",
    )


def execute(file: str, argv: Sequence[str]) -> None:
    """`os.execvp`."""
    if can_run(argv):
        os._exit(play(list(argv)) & 0xFF)
    plain_execvp(file, argv)


def play(argv: list[str]) -> int:
    """What the interpreter does with its words, up to its end."""
    words = [word for number, word in enumerate(argv[1:]) if number > 1 or word != "-u"]
    prepare(words)
    try:
        kind, rest = (words[0], words[1:]) if words[0] in ("-m", "-c") else ("", words)
        sys.argv = [kind or rest[0], *rest[1:]]
        sys.path.insert(0, {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(rest[0]).resolve().parent)))
        if kind == "-m":
            sys.modules.pop(rest[0], None)  # not to be run again: it would warn
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            runpy.run_path(rest[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    flush()
    return code


def flush() -> None:
    for file in (sys.stdout, sys.stderr):
        if not file.closed:
            file.flush()


class Forked(plain_popen):
    """`subprocess.Popen` of a child: a fork where that is possible."""

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        argv = [str(word) for word in asked["args"]] if not isinstance(asked["args"], str) else [""]
        simple = can_run(argv) and asked["preexec_fn"] is None
        if not simple or not (Embryo.waiting or alone()):
            return super()._execute_child(*given)
        order, files = order_of(asked, argv), places_of(asked)
        if Embryo.waiting:
            self.pid = Embryo.waiting.pop().become(order, files)
        else:
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                become(order, files, keep=asked["pass_fds"])
            self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in PIPES))
        return None


class Embryo:
    """A child of torchrun that waits for what it will be: forked before torchrun has threads."""

    waiting: list[Embryo] = []

    def __init__(self) -> None:
        self._order, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            for other in (*Embryo.waiting, self):
                other._order.close()
            die_with_parent()
            text, files, _, _ = socket.recv_fds(theirs, ORDER_BYTES, 3)
            if not text:
                os._exit(0)
            become(json.loads(text), files if len(files) == 3 else [-1, -1, -1])
        theirs.close()

    def become(self, order: dict[str, Any], files: Sequence[int]) -> int:
        """Tell it; its pid. Where it was killed meanwhile, that is how the process ended."""
        given = [] if max(files) < 0 else [file if file >= 0 else number for number, file in enumerate(files)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
        with suppress(OSError):
            self._order.sendmsg([json.dumps(order).encode()], rights)
        self._order.close()
        return self.pid


def prepare(words: list[str]) -> None:
    """The ranks of torchrun, if this is to be torchrun. `learners.gang.local_gang` forks its own."""
    if words[:2] != ["-m", "torch.distributed.run"] or not alone():
        return
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    count = int(words[words.index("--nproc-per-node") + 1])
    Embryo.waiting += [Embryo() for _ in range(count)]
    subprocess_handler.Popen = Forked  # type: ignore[misc]


if __name__ == "__main__":
    plain_execvp = os.execvp
    sys.modules["warm"] = sys.modules["__main__"]
    sys.path[:] = [place for place in sys.path if place not in (str(ROOT), str(ROOT / "tests"))]
    OWN_PATH = list(sys.path)
    sys.path.insert(0, str(ROOT))
    serve(sys.argv[1], sys.argv[2:])
