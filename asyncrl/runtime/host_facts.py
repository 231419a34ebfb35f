"""Facts about processes, addresses and memory of this host, without psutil.

Guarantee: no function raises if a process ends meanwhile. Only Linux has `/proc`; on other systems a process seems to
have no descendants.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse


def count_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[int, float]:
    """CPU cores that this process may use, and this container's share of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return cores, min(float(cores), int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return cores, float(cores)


def descendants(pid: int, *, depth: int = 99) -> list[int]:
    """Processes below `pid`, at most `depth` generations down, nearest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        parent = parent_pid(int(folder.name))
        if parent:
            children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    layer = [pid]
    for _ in range(depth):
        layer = [child for parent in layer for child in children.get(parent, [])]
        if not layer:
            break
        found += layer
    return found


def parent_pid(pid: int) -> int:
    """The parent's pid; 0 if the process has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, parent = text.rpartition(")")[2].split()[:2]  # the name in brackets may hold any characters
    return 0 if state == "Z" else int(parent)


def child_pids(pid: int) -> list[int]:
    """Direct children of `pid`. Cheap if the kernel lists them; processes that start meanwhile may be missed."""
    found: list[int] = []
    try:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in children.read_text().split()]
    except OSError:  # it has ended
        return found
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")  # an optional feature of the kernel
    return found if found or listed.exists() else descendants(pid, depth=1)


def group_members(group: int) -> list[int]:
    """Processes of a process group, with any parents."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(int(folder.name))
    return found


def process_state(pid: int) -> str:
    """The state in /proc: R, S, D, T (stopped by a signal), t (by a debugger); empty if the process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state in "ZX" else state


def is_alive(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc/self").exists() or parent_pid(pid) > 0 or pid == 1


def kill_group(leader: int) -> None:
    """SIGKILL to the process group that `leader` leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to one process if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def reachable(address: str, *, timeout_s: float = 0.2) -> bool:
    """True if a process listens at an `ipc://` or `tcp://` address, or at one of several with commas between them."""
    if "," in address:
        return any(reachable(one, timeout_s=timeout_s) for one in address.split(","))
    if address.startswith("ipc://"):
        family, target = socket.AF_UNIX, address.removeprefix("ipc://")
        return _connects(family, target, timeout_s)
    parsed = urlparse(address)
    host = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1"}.get(parsed.hostname or "", parsed.hostname or "")
    return _connects(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, parsed.port or 0), timeout_s)


def _connects(family: int, target: Any, timeout_s: float) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(target)
        except OSError:
            return False
    return True


def free_host_bytes() -> int:
    """Available memory; very large if unknown, so that an allocation decides."""
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 1 << 62


def filesystem(folder: Path, mounts: Path) -> str:
    """The kind of the file system that holds the folder."""
    try:
        entries = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    except (OSError, IndexError):
        return "unknown"
    path = str(folder.resolve())
    holding = [(place, kind) for place, kind in entries if path == place or path.startswith(place.rstrip("/") + "/")]
    return max(holding, key=lambda entry: len(entry[0]))[1] if holding else "unknown"


def kernel_id() -> str:
    """Tells running kernels apart, and not containers of one; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
