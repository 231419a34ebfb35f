"""Probes of the machine: processor, memory, devices, disk, shared memory, limits, sockets, clock.

Only the standard library. Every probe takes its places as arguments, for tests.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from asyncrl.runtime.device import device_nodes
from asyncrl.runtime.host_facts import count_cores, filesystem

OK, WARN, MISSING, WRONG = "ok", "warn", "missing", "wrong"
GIB = 1 << 30
LEAST_PYTHON = (3, 11)
LEAST_FILES = 4096  # open at once: one socket per peer in a service, and segments
SOCKET_PATH_BYTES = 107  # of a unix socket on Linux
SOCKET_BELOW_BYTES = 40  # added by a run: /runs/NAME/sockets/weightsync.sock
SLOW_SYNC_S = 0.1
REMOTE = frozenset({"nfs", "nfs4", "cifs", "fuse.sshfs", "lustre", "9p", "ceph", "glusterfs"})
UNSYNCHRONIZED = 5  # adjtimex: TIME_ERROR


class Found(NamedTuple):
    """One finding: state, observation, and remedy (empty if none is needed)."""

    state: str  # ok, warn (works, and may surprise), missing (optional), wrong (must be fixed)
    says: str
    remedy: str = ""


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Found:
    """The interpreter is new enough, and the system supported."""
    shown = f"Python {'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version < LEAST_PYTHON:
        return Found(WRONG, shown, f"install Python {'.'.join(map(str, LEAST_PYTHON))} or newer")
    if platform.system() != "Linux":
        return Found(WARN, shown, "Linux is what is tested: shared memory and process control are Linux's here")
    return Found(OK, shown)


def processor(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> Found:
    """Cores, and this container's share of them."""
    cores, share = count_cores(cpu_max)
    shown = f"{cores} cores" + (f", {share:g} of them for this container" if share < cores else "")
    if share < 2:
        return Found(WARN, shown, "give it at least 2: six processes share them even in the demo")
    return Found(OK, shown)


def memory(meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")) -> Found:
    """Memory of the machine or of the container."""
    try:
        lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE))
        total, free = int(lines["MemTotal"]) << 10, int(lines["MemAvailable"]) << 10
    except (OSError, KeyError):
        return Found(WARN, f"{meminfo} cannot be read")
    shown = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available"
    try:
        bound = int(limit.read_text())
    except (OSError, ValueError):
        bound = total
    if bound < total:
        shown += f", at most {bound / GIB:.1f} GiB for this container"
    if min(free, bound) < 2 * GIB:
        return Found(WARN, shown, "end other processes: the demo needs about 2 GiB, `asyncrl check` estimates a run")
    return Found(OK, shown)


def devices(dev: Path = Path("/dev"), ascend: Path = Path("/usr/local/Ascend")) -> Found:
    """Accelerators, by their nodes in /dev; the probe `torch` tells whether torch can use them."""
    counts = {kind: len(nodes) for kind, nodes in device_nodes(dev).items()}
    shown = ", ".join(f"{count} x {kind}" for kind, count in counts.items() if count)
    if counts["npu"] and not (ascend.exists() or os.environ.get("ASCEND_HOME_PATH")):
        return Found(WARN, shown, "install CANN (Ascend's toolkit) and source its set_env.sh: torch_npu needs it")
    if not shown:
        return Found(
            MISSING,
            "no accelerator: everything runs on the CPU, small models alone",
            "nothing, or start the container with its devices (docker run --gpus all)",
        )
    return Found(OK, shown)


def disk(folder: Path | None = None, mounts: Path = Path("/proc/mounts")) -> Found:
    """Runs can be written here: space, type of the file system, duration of an fsync."""
    folder = folder or Path.cwd()
    kind = filesystem(folder, mounts)
    try:
        free = shutil.disk_usage(folder).free
        started = time.monotonic()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        took = time.monotonic() - started
    except OSError as error:
        return Found(WRONG, f"{folder} ({kind}): {error.strerror}", "set run.dir to a folder that can be written")
    shown = f"{free / GIB:.1f} GiB free in {folder} ({kind}), fsync of 1 MiB in {took * 1000:.0f} ms"
    if kind in REMOTE:
        return Found(
            WARN, shown, "set run.dir to a local disk: locks and SQLite are unreliable on network file systems"
        )
    if free < 5 * GIB:
        return Found(WARN, shown, "free some: checkpoints need 12 bytes per parameter each (`asyncrl check`)")
    if took > SLOW_SYNC_S:
        return Found(WARN, shown, 'a slow disk: buffer.fsync = "never" keeps everything but a loss of power safe')
    return Found(OK, shown)


def shared_memory(folder: Path = Path("/dev/shm")) -> Found:
    """Shared memory, through which generators on the same host get weights."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Found(WARN, f"{folder}: {error.strerror}", "weights are staged in the run folder instead, more slowly")
    shown = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {folder}"
    if usage.total < GIB:
        return Found(WARN, shown, "docker run --shm-size 16g: two copies of the weights are staged there")
    if usage.free < usage.total / 10:
        return Found(WARN, shown, f"remove what dead runs left: ls {folder}/asyncrl-*")
    return Found(OK, shown)


def limits(get: Callable[[int], tuple[int, int]] = resource.getrlimit) -> Found:
    """Open files and processes of a user."""
    files, hard = get(resource.RLIMIT_NOFILE)
    processes = get(resource.RLIMIT_NPROC)[0]
    unlimited = resource.RLIM_INFINITY
    words = ["unlimited" if number == unlimited else str(number) for number in (files, hard, processes)]
    shown = f"{words[0]} open files (hard {words[1]}), {words[2]} processes"
    if files != unlimited and files < LEAST_FILES:
        return Found(
            WARN,
            shown,
            f"ulimit -n {LEAST_FILES if hard == unlimited or hard >= LEAST_FILES else hard}, "
            "or LimitNOFILE in the unit",
        )
    if processes != unlimited and processes < 1024:
        return Found(WARN, shown, "ulimit -u 4096: every role has threads of its own")
    return Found(OK, shown)


def sockets(folder: Path | None = None) -> Found:
    """Services can listen: on a port of the loopback, and on a unix socket in the run folder."""
    folder = folder or Path.cwd()
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            one.listen()
            with socket.create_connection(one.getsockname(), timeout=3):
                pass
        with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as one:
            one.bind(f"{place}/s")
    except OSError as error:
        return Found(WRONG, f"cannot listen on this host: {error}", "look at the container's network and seccomp rules")
    length = len(os.fsencode(folder.resolve())) + SOCKET_BELOW_BYTES
    shown = "TCP on the loopback and unix sockets work"
    if length > SOCKET_PATH_BYTES:
        what = f"{shown}; {folder} is long: {length} bytes with a socket's name, {SOCKET_PATH_BYTES} fit"
        return Found(WARN, what, "set run.dir to a shorter path, or network.buffer to tcp://127.0.0.1:PORT")
    return Found(OK, shown)


def clock(state: int | None = None, now: float | None = None) -> Found:
    """A time server sets the wall clock. Decisions use the monotonic clock; logs of several hosts need the wall
    clock.
    """
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now if now is not None else time.time()))
    if (now if now is not None else time.time()) < 1.7e9:
        return Found(WARN, f"{shown}: in the past", "set the clock: certificates and logs depend on it")
    state = _kernel_clock() if state is None else state
    if state == UNSYNCHRONIZED:
        return Found(WARN, f"{shown}, not synchronized", "start chrony or systemd-timesyncd where several hosts work")
    return Found(OK, f"{shown}, {'synchronized' if state >= 0 else 'of a clock that cannot be asked'}")


def _kernel_clock() -> int:
    """State of the clock by adjtimex: 0 to 5; -1 without permission."""
    try:
        room = ctypes.create_string_buffer(256)  # struct timex; modes = 0: read only
        return int(ctypes.CDLL(None).adjtimex(room))
    except (OSError, AttributeError):
        return -1
