"""Names of the staging slots of weights in shared memory, and their removal after their publisher was killed.

A slot is called `asyncrl-UID-RUN-PID-NUMBER`; RUN is a digest of the run's scratch folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from asyncrl.runtime.host_facts import is_alive

PREFIX = "asyncrl-"
SHARED_MEMORY = Path("/dev/shm")


def slot_prefix(scratch: Path) -> str:
    """The beginning of the names of all slots of a run."""
    run = hashlib.blake2b(os.fsencode(scratch.resolve()), digest_size=6).hexdigest()
    return f"{PREFIX}{os.getuid()}-{run}-"


def remove_stale_slots(scratch: Path, folders: Iterable[Path] | None = None) -> None:
    """Remove the slots of a run whose publishers are dead. Default folders: shared memory and the scratch folder."""
    prefix = slot_prefix(scratch)
    for folder in folders if folders is not None else (SHARED_MEMORY, scratch):
        for path in folder.glob(f"{prefix}*"):
            pid = path.name.removeprefix(prefix).partition("-")[0]
            if pid == str(os.getpid()) or not pid.isdigit() or not is_alive(int(pid)):
                path.unlink(missing_ok=True)
