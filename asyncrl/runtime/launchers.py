"""The living launchers of a run on this host: each holds a lock file in the run folder while it works."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from asyncrl.runtime.run_dir import RunDir

LAUNCHER_PREFIX = "launcher-"  # lock files of launchers: launcher-TARGET-HOST-PID.lock


def launcher_mark(target: str) -> str:
    """The name of this launcher's lock. It includes the host, because launchers in containers have the same pid."""
    return f"{LAUNCHER_PREFIX}{target}-{socket.gethostname()}-{os.getpid()}"


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
