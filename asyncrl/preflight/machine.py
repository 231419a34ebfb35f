"""Checks that this machine has what a configuration needs: ports, a store, cores, memory, accelerators, disk.

Guarantees:
1. ports are bound only during the check; Redis is asked with plain sockets within seconds;
2. the machine is described by /proc, /sys, /dev and the file system: no driver and no torch is loaded (`asyncrl doctor`
   does more). Only `device_memory`, for proposals, asks a program of the driver, within `MEMORY_TOOL_S`;
3. resources that another machine may have (cores, memory, devices) are reported as missing, not as mistakes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from asyncrl.config import Config
from asyncrl.config.redis_url import restore_password
from asyncrl.config.sections.tracker import ONLINE, read_prometheus_access
from asyncrl.errors import AsyncRLError, ConfigError, error_for
from asyncrl.net.http_access import read_secret
from asyncrl.net.probe import bind_problem, redis_problem
from asyncrl.plugins import is_place, known_plugins
from asyncrl.preflight.code import import_problem
from asyncrl.preflight.memory import IN_SHARED_MEMORY, RoleMemory, format_bytes
from asyncrl.runtime.device import device_nodes
from asyncrl.runtime.host_facts import count_cores
from asyncrl.runtime.run_dir import RunDir

#: Transports by which an engine in another process writes each version into files of its own.
COPYING = ("collective", "stream", "disk")
REDIS_SERVERS = ("redis-server", "valkey-server")
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

#: By type of accelerator: the program of its driver that tells memory in MiB, and where that stands in the output.
MEMORY_TOOLS = {
    "cuda": (("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"), r"^\s*(\d+)\s*$"),
    "npu": (("npu-smi", "info", "-t", "usages", "-i", "0"), r"HBM Capacity\(MB\)\s*:\s*(\d+)"),
}
MEMORY_TOOL_S = 10.0


class Machine(msgspec.Struct, frozen=True):
    """Resources of this machine, according to files."""

    cores: int  # of the machine, or of this container
    memory_bytes: int  # of the machine, or of this container
    devices: dict[str, int]  # accelerators by type
    disk_free_bytes: int  # at the run folder
    shm_free_bytes: int

    @property
    def accelerator(self) -> str:
        """The type of its accelerators; empty without one."""
        return next((kind for kind, count in self.devices.items() if count), "")


def look_at_machine(run_dir: Path, *, dev: Path = Path("/dev"), meminfo: Path = Path("/proc/meminfo")) -> Machine:
    cores = max(1, int(count_cores()[1]))
    devices = {kind: len(nodes) for kind, nodes in device_nodes(dev).items()}
    return Machine(cores, _memory(meminfo), devices, _free(run_dir), _free(dev / "shm"))


def device_memory(kind: str) -> int:
    """Bytes of the smallest accelerator of a type, as its driver's program tells; 0 if it does not."""
    command, pattern = MEMORY_TOOLS[kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEMORY_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return min((int(size) << 20 for size in re.findall(pattern, done.stdout, re.MULTILINE)), default=0)


def _memory(meminfo: Path) -> int:
    limits = []
    try:
        limits.append(int(meminfo.read_text().split("MemTotal:")[1].split()[0]) * 1024)
    except (OSError, ValueError, IndexError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def _free(path: Path) -> int:
    """Free bytes at the place of the folder."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def find_missing(config: Config, roles: Sequence[str], machine: Machine, memory: Sequence[RoleMemory]) -> Iterator[str]:
    """Resources that the configuration needs and this machine lacks."""
    wants = {
        "learner": ("learner.device", config.learner.device, config.learner.ranks),
        "producer": ("producers.device", config.producers.device, config.producers.count),
    }
    for role, (key, device, _) in wants.items():
        kind, _, number = device.partition(":")
        count = machine.devices.get(kind, 0)
        if role in roles and kind in machine.devices and count <= int(number if number.isdigit() else 0):
            yield f"{key} = {device!r}: this machine shows {count or 'no'} {kind} device{'s' * (count != 1)}"
    kind = machine.accelerator
    called = {"learner": "rank", "producer": "producer"}
    asked = [
        f"{count} {called[role]}{'s' * (count != 1)}"
        for role, (_, device, count) in wants.items()
        if role in roles
        and device.partition(":")[0] in ("auto", kind)
        and not (role == "producer" and config.producers.engine not in ("hf", "vllm"))
    ]
    total = sum(int(words.split()[0]) for words in asked)
    if kind and total > machine.devices[kind] and config.cluster.devices != "turns":
        yield f"{' and '.join(asked)} share {machine.devices[kind]} {kind} device{'s' * (machine.devices[kind] != 1)}"
    needs = {place: sum(one.total_bytes * one.count for one in memory if one.place == place) for place in ("host",)}
    if needs["host"] > machine.memory_bytes:
        need, there = format_bytes(needs["host"]), format_bytes(machine.memory_bytes)
        yield f"about {need} of host memory: this machine has {there}"
    # By the other transports engines of this host map the learner's versions, and have no files of their own.
    writers = ("learner", "producer", "evaluator") if config.weightsync.transport in COPYING else ("learner",)
    parts = [(part, one.count) for one in memory if one.role in writers for part in one.parts]
    staged = sum(count * part.bytes for part, count in parts if part.arithmetic.endswith(IN_SHARED_MEMORY))
    if staged > machine.shm_free_bytes:
        yield (
            f"about {format_bytes(staged)} of /dev/shm for staged weights: {format_bytes(machine.shm_free_bytes)} free "
            "(the rest goes to the run folder, slower)"
        )
    kept = sum(part.bytes for one in memory for part in one.parts if part.name == "checkpoints")
    if kept > machine.disk_free_bytes:
        yield f"about {format_bytes(kept)} of disk for checkpoints: {format_bytes(machine.disk_free_bytes)} are free"


def check_ports(config: Config, roles: Sequence[str]) -> Iterator[AsyncRLError]:
    """`tcp://` addresses of the services that start here are free."""
    seen: dict[str, str] = {}
    for service in ("buffer", "weightsync"):
        address = str(getattr(config.network, service))
        if service not in roles or not address.startswith("tcp://"):
            continue
        if address in seen and not address.endswith(":0"):
            yield ConfigError(
                "config.conflict",
                f"the same address as network.{seen[address]}",
                where=f"network.{service} = {address!r}",
            )
            continue
        seen[address] = service
        problem = bind_problem(address)
        if problem is not None:
            yield error_for(*problem, where=f"network.{service} = {address!r}")


def check_store(config: Config) -> Iterator[AsyncRLError]:
    """Redis answers at the given URL; a server program is on the PATH if one must be started."""
    buffer = config.buffer
    if buffer.store == "sqlite":
        return
    if buffer.redis_url:
        try:
            problem = redis_problem(restore_password(buffer.redis_url, RunDir(config.run_dir).store))
        except ConfigError as error:
            yield error
            return
        if problem:
            yield error_for("store.unreachable", problem, where="buffer.redis_url")
    elif buffer.store == "redis" and not any(shutil.which(name) for name in REDIS_SERVERS):
        yield error_for("store.no_server", f"none of {', '.join(REDIS_SERVERS)} is on the PATH", where="buffer.store")


def check_trackers(config: Config) -> Iterator[AsyncRLError]:
    """Everything that would end a tracker at its start; the run would continue without its curves."""
    trackers = config.trackers
    known = known_plugins("asyncrl.trackers").keys() - {"tensorboard"}
    for name in trackers.use:
        package = ONLINE.get(name, ("", ""))[0]
        if is_place(name):
            if what := import_problem(name):
                yield ConfigError("config.extra", what, where=f"trackers.use = {name!r}")
        elif name not in known:
            what = f"{name!r} is not known: one of {', '.join(sorted(known - {'callbacks'}))}, callbacks"
            yield ConfigError("config.type", what, where="trackers.use")
        elif package and importlib.util.find_spec(package) is None:
            what = f"tracker {name!r} needs the package {package}, which this environment lacks"
            yield ConfigError("config.extra", what, where="trackers.use", remedy=f"pip install 'asyncrl[{name}]'")
    if "callbacks" in trackers.use:
        where = "trackers.options.callbacks.call"
        names = trackers.options.get("callbacks", {}).get("call")
        if not isinstance(names, list) or not names:
            what = "it is not a list of 'module:name' or 'file.py:name'"
            yield ConfigError("config.missing", what, where=where, remedy='call = ["watch.py:Watch"]')
        else:
            problems = {str(name): import_problem(str(name)) for name in names}
            yield from (ConfigError("config.extra", what, where=where) for what in problems.values() if what)
    yield from _check_secrets(config)


def _check_secrets(config: Config) -> Iterator[AsyncRLError]:
    """Files with keys of trackers and of the metrics page, and the port of that."""
    trackers = config.trackers
    for name, text in trackers.key_file.items():
        try:
            read_secret(text, where=f"trackers.key_file.{name}")
        except ConfigError as error:
            yield error
    if port := trackers.prometheus_port:
        try:
            access = read_prometheus_access(trackers)
        except ConfigError as error:
            yield error
        else:
            if problem := bind_problem(f"tcp://{access.join_port(port)}"):
                yield ConfigError(problem[0], problem[1], where=f"trackers.prometheus_port = {port}")
