"""The folder of a run: its layout, the locks of its roles and launchers, and the addresses of its services.

Guarantees:
1. the layout is defined only here; other modules do not join paths of a run;
2. a file that others read is written under a temporary name, synced and renamed;
3. a role that must be unique (buffer, weight sync) holds a lock on its file: a second process is refused.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlparse

import msgspec

from asyncrl.config import Config
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.metrics import open_lines
from asyncrl.net.addresses import ipc_address
from asyncrl.net.keys import Keys, read_keys, write_keys

WILDCARDS = frozenset({"0.0.0.0", "*", "::"})  # every interface: not an address to connect to


class RunDir:
    """Paths of a run. Creating the object touches nothing; `create` makes the folder (0700)."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.config = self.root / "config.toml"  # resolved configuration that every role reads
        self.processes = self.root / "processes.jsonl"  # one line per started process: role, name, pid, host
        self.history = self.root / "history.jsonl"  # the buffer's event log, for audit and trace
        self.samples = self.root / "samples.jsonl"  # a few samples per step, for the report
        self.evaluations = self.root / "evaluations"  # every scored sample of held-out prompts, one file per step
        self.metrics = self.root / "metrics"  # learner, roles, buffer, weightsync, evaluation: .jsonl
        self.tensorboard = self.root / "tensorboard"
        self.trackers = self.root / "trackers"  # files of online trackers, and their positions
        self.logs = self.root / "logs"  # one file per process
        self.alive = self.root / "alive"  # signs of life: one small file per role
        self.sockets = self.root / "sockets"
        self.store = self.root / "store"  # index.sqlite or the private Redis
        self.segments = self.root / "segments"
        self.images = self.root / "images"  # images of prompts, each once: <first two letters>/<digest>
        self.dead = self.root / "dead"  # dead letters: refused samples, one file each
        self.archive = self.root / "archive"  # the batch of every step, with `log.archive`
        self.checkpoints = self.root / "checkpoints"
        self.service = self.root / "service.epoch"  # the newest epoch of a buffer service
        self.learner = self.root / "learner.json"  # the highest learner epoch and its holder
        self.export = self.root / "export"  # the final weights, Hugging Face format
        self.report = self.root / "report.html"
        self.result = self.root / "result.json"  # how the run ended

    def create(self) -> RunDir:
        """Make the folder and those inside it."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.metrics, self.logs, self.alive, self.sockets, self.store, self.segments, self.checkpoints):
            folder.mkdir(mode=0o700, exist_ok=True)
        return self

    def require(self) -> RunDir:
        """Raise `run.missing` if this is not the folder of a run."""
        if not self.config.exists():
            policies = ", ".join(map(str, policy_runs(self.root)))
            what = f"it has several policies; name the run of one: {policies}" if policies else "no config.toml in it"
            raise ConfigError("run.missing", what, where=str(self.root))
        return self

    def lock(self, role: str) -> IO[str]:
        """Hold the role's lock until the file is closed. Raises `service.duplicate` naming the holder."""
        file = (self.root / f"{role}.lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise AsyncRLError("service.duplicate", f"{role} already runs ({holder})", where=str(self.root)) from None
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return file

    def record_process(self, role: str, name: str) -> None:
        """Record that this process works for the run (for the report)."""
        line = {"t": time.time(), "role": role, "name": name, "pid": os.getpid(), "host": socket.gethostname()}
        with open_lines(self.processes) as file:
            file.write(msgspec.json.encode(line) + b"\n")


def policy_runs(root: Path) -> list[Path]:
    """The runs in the folder of several policies (`[policies]`); none in that of an ordinary run."""
    if (root / "config.toml").exists():
        return []
    return [path.parent for path in sorted(root.glob("*/config.toml")) if (path.parent / "sockets").is_dir()]


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (OSError, *UNREADABLE):
        return {}
    return value if isinstance(value, dict) else {}


def endpoint(config: Config, service: str) -> str:
    """Address of `buffer` or `weightsync`: the setting, or a socket in the run folder for "auto"."""
    address = str(getattr(config.network, service))
    return ipc_address(RunDir(config.run_dir).sockets, service) if address == "auto" else address


def buffer_address(config: Config, connect: str = "") -> str:
    """Where clients reach the buffer: `connect`, or its own address, and that of its stand-by after a comma."""
    known = [*(connect or endpoint(config, "buffer")).split(","), config.network.standby]
    return ",".join(dict.fromkeys(filter(None, known)))


def sibling_address(address: str, connect: str) -> str:
    """The address of a service for a remote process that reached the other service at `connect`.

    >>> sibling_address("tcp://0.0.0.0:5556", "tcp://10.0.0.7:5555")
    'tcp://10.0.0.7:5556'
    """
    listens, reached = urlparse(address), urlparse(connect.partition(",")[0])
    if listens.scheme != "tcp" or listens.hostname not in WILDCARDS or reached.scheme != "tcp" or not reached.hostname:
        return address
    host = f"[{reached.hostname}]" if ":" in reached.hostname else reached.hostname
    return f"tcp://{host}:{listens.port}"


def run_keys(config: Config, *, make: bool = False) -> Keys | None:
    """The CURVE keys of `network.key_file`; None without one. With `make` a missing file is created."""
    if not config.network.key_file:
        return None
    path = Path(config.network.key_file)
    if make and not path.exists():
        return write_keys(path)
    return read_keys(path)


def run_id(config: Config) -> str:
    """The identity of a run on the wire: its name and folder."""
    return f"{config.run.name}@{RunDir(config.run_dir).root}"


def format_json(value: Any) -> str:
    """Indented JSON of a value, for readers."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def describe(value: Any) -> str:
    """Compact JSON text of a builtin value, for messages that carry one."""
    return msgspec.json.encode(value).decode()


LAUNCHER_PREFIX = "launcher-"  # lock files of launchers: launcher-TARGET-HOST-PID.lock


def launcher_mark(target: str) -> str:
    """The name of this launcher's lock. It includes the host, because launchers in containers have the same pid."""
    return f"{LAUNCHER_PREFIX}{target}-{socket.gethostname()}-{os.getpid()}"


@contextmanager
def launcher_lock(run: RunDir, target: str) -> Iterator[None]:
    """Hold the lock by which `asyncrl stop` finds this launcher."""
    lock = run.lock(launcher_mark(target))
    try:
        yield
    finally:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


def launchers(run: RunDir) -> list[tuple[str, int]]:
    """(target, pid) of the living launchers on this host. Another process may reuse a pid, but cannot hold the lock."""
    found = []
    for path in sorted(run.root.glob(f"{LAUNCHER_PREFIX}*.lock")):
        target, _, place = path.stem.removeprefix(LAUNCHER_PREFIX).partition("-")
        pid = place.rpartition("-")[2]
        if not pid.isdigit():
            continue
        holder = _holder(path)
        if holder is None:
            with suppress(OSError):
                path.unlink()  # its launcher was killed
        elif holder.endswith(f" on {socket.gethostname()}"):
            found.append((target, int(pid)))
    return found


def _holder(path: Path) -> str | None:
    """The holder of a launcher's lock; empty if it is unknown, None if the lock is free. Writes nothing."""
    try:
        with path.open() as file:
            holder = file.read().strip()
            if holder:  # else a launcher is just taking it: only the holder writes
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
    except BlockingIOError:
        return holder
    except (OSError, UnicodeDecodeError):
        return ""
    return ""
