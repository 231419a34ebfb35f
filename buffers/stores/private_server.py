"""A Redis (or Valkey) server of the run's own: unix socket in the run folder, no port, append-only file.

Guarantees:
1. only the owner can connect: no TCP port, socket mode 0600 in a 0700 folder, no answer without a password. The
   service's user may run the commands of its two scripts on the keys of asyncrl, nothing else. The owner of the folder
   has a user `admin` for inspection (its password: `redis.admin`);
2. it dies with the process that started it, also when that one is killed (Linux);
3. what it answered is in its append-only file: a kill loses nothing, a loss of power what `fsync` says;
4. it answers within 10 s of `start`, or the end of its log is the error;
5. no password stands in an argument, a log, or the file of its users, which holds digests.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import Unavailable
from asyncrl.net.addresses import ipc_address, prepare_folder
from buffers.stores.keys import PREFIX

READY_S = 10.0
VERSION_S = 5.0
USER, ADMIN = "asyncrl", "admin"
#: The commands of the store and of its scripts: a script may do no more than the user that runs it.
COMMANDS = ("ping", "evalsha", "script|load", "hget", "hset", "hdel", "hgetall", "del")
PR_SET_PDEATHSIG = 1


def find_server() -> str | None:
    """The server program on the PATH."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class PrivateServer:
    def __init__(self, program: str, folder: Path, *, fsync: str) -> None:
        self._program = program
        self._folder = folder.resolve()
        # Redis's own everysec holds writes back, and answers, while a flush of the second before is still under way: a
        # kill would lose what it had answered. So it writes at once, and `sync` flushes.
        self._fsync = {"everysec": "no", "always": "always", "never": "no"}[fsync]
        self._every_second = fsync == "everysec"
        self._log = self._folder / "redis.log"
        self._pid_file = self._folder / "redis.pid"
        self._socket = ipc_address(self._folder, "redis").removeprefix("ipc://")
        self._acl_file = self._folder / "redis.acl"
        self._admin_file = self._folder / "redis.admin"
        self._process: subprocess.Popen[bytes] | None = None
        self._password, self._admin = secrets.token_hex(24), secrets.token_hex(24)
        self.url = f"unix://{USER}@{self._socket}?password={self._password}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._wait_for_the_last_one()
        prepare_folder(self._socket)  # not in the run's folder if that has a long path
        Path(self._socket).unlink(missing_ok=True)
        self._write_users()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, *self._arguments()],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent() if sys.platform == "linux" else None,  # noqa: PLW1509 - no threads yet
                start_new_session=True,
            )
        self._pid_file.write_text(str(self._process.pid))
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self.has_ended() or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-400:]
                raise Unavailable("store.unreachable", f"{self._program} did not get ready: {tail}", where=self._socket)
            time.sleep(0.01)

    def _write_users(self) -> None:
        allowed = " ".join(f"+{command}" for command in COMMANDS)
        lines = (
            # No client can log in as this user, and it must be allowed everything: the append-only file is loaded in
            # its name, and commands that it may not run are skipped without an error (seen with 7.0).
            "user default off resetpass allchannels allkeys +@all",
            f"user {USER} on #{_digest(self._password)} resetchannels resetkeys ~{PREFIX}* -@all {allowed}",
            f"user {ADMIN} on #{_digest(self._admin)} allchannels allkeys +@all",
        )
        _write_private(self._admin_file, self._admin)
        _write_private(self._acl_file, "\n".join(lines) + "\n")

    def _arguments(self) -> list[str]:
        options = {
            "port": "0", "unixsocket": self._socket, "unixsocketperm": "600", "dir": str(self._folder), "save": "",
            "appendonly": "yes", "appendfsync": self._fsync, "maxmemory-policy": "noeviction", "daemonize": "no",
            "protected-mode": "yes", "logfile": "", "aof-load-truncated": "yes", "proto-max-bulk-len": "64mb",
            "aclfile": str(self._acl_file),
        }  # fmt: skip
        if major_version(self._program) >= 7:  # an older one refuses to start with a name that it does not know
            options |= {"enable-debug-command": "no", "enable-module-command": "no"}
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _wait_for_the_last_one(self) -> None:
        """A server that an earlier service left dies with it; two must not write one append-only file."""
        if not self._pid_file.exists() or self.has_ended():
            return
        text = self._pid_file.read_text().strip()
        command = Path(f"/proc/{text}/cmdline")
        deadline = time.monotonic() + 5.0
        while text.isdigit() and _is_server(command):
            if time.monotonic() > deadline:
                raise Unavailable("store.unreachable", f"an earlier server (pid {text}) still runs", where=self._socket)
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(self._socket)
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def sync(self) -> None:
        """Flush the append-only file (everysec; called once a second, on any thread)."""
        files = [*self._folder.glob("appendonlydir/*.incr.aof"), *self._folder.glob("appendonly.aof")]
        for path in files if self._every_second else ():
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # it was rewritten meanwhile, which flushes
                continue
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)

    def has_ended(self) -> bool:
        """Whether the server that was started has ended."""
        return self._process is not None and self._process.poll() is not None

    def stop(self) -> None:
        """End it; what it holds is on disk."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._pid_file.unlink(missing_ok=True)


@functools.cache
def major_version(program: str) -> int:
    """Of a redis-server or valkey-server (which began at 7.2); 0 where it cannot be read."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"\bv=(\d+)\.", done.stdout)
    return int(found[1]) if found else 0


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _is_server(command: Path) -> bool:
    try:
        title = command.read_bytes()
    except OSError:
        return False
    return b"redis" in title or b"valkey" in title


def _die_with_parent() -> Callable[[], None]:
    library = ctypes.CDLL(None)  # loaded before the fork: nothing is allocated after it
    parent = os.getpid()

    def ask() -> None:
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
