"""A process that has imported what roles import, and forks roles: `python -m asyncrl.launcher.fork_server PARENT FD
MODULE...`. Its client is `asyncrl.launcher.forked`; docs/adr/0044-roles-are-forked.md has the reasons.

Guarantees:
1. it forks only if its imports started no thread and opened no file, and no backend of torch loads itself; otherwise it
   ends, and every role is executed;
2. a forked role is the launcher's child, as an executed one: the process between is gone before the role begins. It has
   its own session, log, command line, environment and random numbers, and dies with the launcher;
3. the server never reads an order: the environment of a role, which may hold keys, reaches no other role;
4. it ends with the launcher. Its own end harms no role.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.launcher.parent_guard import tie_to_parent

READY = b"ready"
ORDER_BYTES = 1 << 20
NO_ROLE = 3  # exit code of the process between, if it could not fork
ADOPTION_S = 0.001


def main(argv: Sequence[str]) -> None:
    """Import, fork roles until the launcher closes its end, and become each of them in its own process."""
    parent, number, *modules = argv
    if not tie_to_parent(int(parent)):
        sys.exit(1)
    orders = socket.socket(fileno=int(number))
    if importlib.util.find_spec("torch_npu") or entry_points(group="torch.backends"):
        sys.exit("a backend of torch loads itself: roles are executed")
    gc.disable()  # imports leave little garbage: a tenth of their time
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:  # the role says what it lacks, if it needs it
            print(f"not imported: {name}: {error}", flush=True)
    if reason := why_not_forked(orders.fileno()):
        sys.exit(f"{reason}: roles are executed")
    gc.freeze()  # no collection writes to the shared pages
    orders.send(READY)
    order = serve(orders, int(parent))
    if order is not None:
        run_module(order["words"])


def why_not_forked(*descriptors: int) -> str:
    """Why this process must not fork roles; empty if it may. `descriptors`: its own."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads after the imports"
    opened = {Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")}
    others = {path.readlink() for path in opened if int(path.name) not in (0, 1, 2, *descriptors) and path.is_symlink()}
    return f"the imports opened {', '.join(map(str, others))}" if others else ""


def serve(orders: socket.socket, parent: int) -> dict[str, Any] | None:
    """The order, in a forked role; None in the server, once the launcher has closed its end."""
    while orders.recv(1, socket.MSG_PEEK):  # bounded: the life of the launcher
        between = os.fork()
        if between:
            if os.waitpid(between, 0)[1]:  # bounded: two system calls
                return None
            continue
        text, (log, answer), _, _ = socket.recv_fds(orders, ORDER_BYTES, 2)
        between = os.getpid()
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(NO_ROLE)
        orders.close()
        while os.getppid() == between:  # bounded: the process between ends at once
            time.sleep(ADOPTION_S)
        order: dict[str, Any] = json.loads(text)
        with socket.socket(fileno=answer) as launcher:
            if not tie_to_parent(parent):
                os._exit(1)
            begin(order["words"], order["env"], log)
            launcher.send(b"%d" % os.getpid())
            if not launcher.recv(8):  # bounded: the launcher gives up by closing its end
                os._exit(1)
        return order
    return None


def begin(words: Sequence[str], env: Mapping[str, str], log: int = -1) -> None:
    """Give this process, just forked, the state of an executed one."""
    os.setsid()
    if log >= 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ.clear()
    os.environ.update(env)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # `random` seeds itself after a fork
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    gc.enable()
    show_command([sys.executable, "-m", *words])


def run_module(words: Sequence[str]) -> None:
    """`python -m words...` in this process."""
    sys.argv = list(words)
    sys.modules.pop(words[0], None)  # it runs as __main__, from its first line
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def show_command(words: Sequence[str]) -> None:
    """Let `ps` show the command of the role: write it over this process's own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    text = b"\0".join(map(os.fsencode, words))[: max(0, end - start - 1)]
    if start and text:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def module_words(argv: Sequence[str]) -> list[str]:
    """The module and arguments of a command of this interpreter, without its guard; empty for any other command."""
    words = list(argv)
    if words[1:3] == ["-m", "asyncrl.launcher.parent_guard"] and "--" in words:
        words = words[words.index("--") + 1 :]
    return words[2:] if len(words) > 2 and words[:2] == [sys.executable, "-m"] else []


class WaitingRank:
    """A process that waits for its command: forked while torchrun has one thread, and told what to be later."""

    def __init__(self, others: Sequence[WaitingRank]) -> None:
        parent = os.getpid()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        for rank in (*others, self):
            rank._orders.close()
        self._become(theirs, parent)

    def _become(self, orders: socket.socket, parent: int) -> NoReturn:
        if not tie_to_parent(parent) or not (text := orders.recv(ORDER_BYTES)):  # bounded: the life of torchrun
            os._exit(1)
        orders.close()
        order = json.loads(text)
        begin(order["words"], order["env"])
        run_module(order["words"])
        sys.exit(0)

    def tell(self, words: Sequence[str], env: Mapping[str, str]) -> int:
        """Let it run the module; its pid. One that was killed meanwhile is found dead by its parent."""
        with self._orders, suppress(BrokenPipeError):
            self._orders.send(json.dumps({"words": [*words], "env": dict(env)}).encode())
        return self.pid


def fork_ranks(count: int, *, imported: str) -> list[WaitingRank]:
    """Processes for the ranks of torchrun; none if this one has not `imported` what they need, or must not fork."""
    ranks: list[WaitingRank] = []
    if imported in sys.modules and not why_not_forked():
        for _ in range(count):
            ranks.append(WaitingRank(ranks))
    return ranks


if __name__ == "__main__":
    main(sys.argv[1:])
