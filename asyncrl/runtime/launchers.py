"""Which launchers of a run are alive on this host: each holds a lock file in the run folder while it works."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from asyncrl.runtime.run_dir import RunDir

LAUNCHER_PREFIX = "launcher-"  # locks that living launchers hold: launcher-TARGET-HOST-PID.lock


def launcher_mark(target: str) -> str:
    """The lock that this launcher holds while it works. Its host belongs to it: in containers all pids are alike."""
    return f"{LAUNCHER_PREFIX}{target}-{socket.gethostname()}-{os.getpid()}"


def launchers(run: RunDir) -> list[tuple[str, int]]:
    """(target, pid) of the living launchers on this host. A pid may be somebody else's by now; a held lock cannot."""
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
    """Who holds a launcher's lock, empty where nobody can say; None where it was left behind. Nothing is written."""
    try:
        with path.open() as file:
            holder = file.read().strip()
            if holder:  # else it is being taken just now: only its holder writes
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
    except BlockingIOError:
        return holder
    except (OSError, UnicodeDecodeError):
        return ""
    return ""
