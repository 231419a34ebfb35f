"""Durable checkpoints of the learner: a folder per step, complete or invisible.

A checkpoint `step_000020/` holds one shard file per rank (weights, optimizer, generator states), `state.json` (step,
ledger of the buffer, digests, configuration) and `manifest.json` (size and BLAKE2b of every other file). All ranks must
see the folder.

Guarantees:
1. it is written under a hidden name, synced, and renamed last: a crash leaves earlier checkpoints untouched;
2. `newest` checks every byte against the manifest, skips damaged checkpoints and reports them;
3. the last `keep` stay, and the best (`learners.checkpoints.retention`). Others are removed only after a new one is
   durable;
4. no pickle: safetensors and JSON;
5. a full disk raises `disk.full` on every rank: the hidden folder is removed, earlier checkpoints stay.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.run_dir import write_atomic
from learners.backends.base import Snapshot
from learners.checkpoints import retention
from learners.gang.gang import Gang
from learners.step.coefficients import Coefficients

MANIFEST = "manifest.json"
STATE = "state.json"
SPARE_BYTES = 1 << 20  # left free after a checkpoint, for logs and the index
_NAME = re.compile(r"step_(\d{6,})")


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a learner without tensors. `ledger` is the buffer's own JSON; `config` the resolved TOML."""

    step: int
    ledger: str
    digests: dict[int, str] = {}  # version -> digest of the published weights
    ranks: int = 1
    config: str = ""
    coefficients: Coefficients | None = None  # of the next step
    critic_warm: bool = False  # the critic's warm-up ended early


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    blake2b: str


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def steps_in(root: Path) -> list[int]:
    """Return the steps that have a folder, newest first; the checkpoints may be damaged."""
    found = [_NAME.fullmatch(path.name) for path in root.iterdir()] if root.exists() else []
    return sorted((int(match[1]) for match in found if match), reverse=True)


def save(
    root: Path,
    state: State | None,
    *,
    step: int,
    backend: Snapshot,
    gang: Gang,
    keep: int,
    fence: Callable[[], None] = lambda: None,
    ranking: retention.Ranking | None = None,
) -> Path:
    """Write the checkpoint of `step` (`state` is needed on rank 0). Collective; durable on return.

    `backend` writes this rank's part: itself, or a snapshot of it. `ranking` selects the best. `fence` runs on rank 0
    right before the checkpoint becomes visible and before older ones go, and raises if another learner took over.

    Raises:
        AsyncRLError: `disk.full` on every rank if one could not write; earlier checkpoints are unchanged.
    """
    target = step_folder(root, step)
    temporary = root / f".{target.name}.tmp"

    def agree(error: str) -> None:
        """Share rank 0's error; every rank raises it."""
        said = gang.share(error.encode()).decode()
        if said:
            if gang.lead:
                fence()  # another learner may own the folder now
                shutil.rmtree(temporary, ignore_errors=True)  # free its space
            raise AsyncRLError("disk.full", f"checkpoint of step {step}: {said}", where=str(root))

    if gang.lead:
        fence()
    agree(_attempt(lambda: _begin(root, temporary)) if gang.lead else "")
    mine: dict[str, FileEntry] = {}
    error = _attempt(lambda: mine.update(_shard(temporary, backend)))
    entries: dict[str, FileEntry] = {}
    errors = []
    for text in gang.gather(msgspec.json.encode((error, mine))):
        other, files = msgspec.json.decode(text, type=tuple[str, dict[str, FileEntry]])
        entries.update(files)
        errors.append(other)
    agree(next(filter(None, errors), ""))
    if gang.lead:
        assert state is not None
        whole = state
        error = _attempt(lambda: _complete(temporary, target, whole, entries, fence))
    agree(error)
    if gang.lead:
        fence()  # the folder was synced since: a successor may have written later checkpoints, which are not to go
        clean(root, step=step, keep=keep, ranking=ranking)
    return target


def _attempt(work: Callable[[], None]) -> str:
    """Run `work` and return the error of the file system; empty if it succeeded."""
    try:
        work()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def _begin(root: Path, temporary: Path) -> None:
    """Create an empty hidden folder, if there is room for a checkpoint as large as the last one."""
    shutil.rmtree(temporary, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    needed = next((folder_size(step_folder(root, known)) for known in steps_in(root)), 0)
    free = shutil.disk_usage(root).free
    if free < needed + SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"{free} bytes are free, the last checkpoint has {needed}")
    temporary.mkdir()
    failpoint("learner.checkpoint_begin")


def _shard(temporary: Path, backend: Snapshot) -> dict[str, FileEntry]:
    """Write and sync this rank's tensors."""
    path = backend.save(temporary)
    failpoint("learner.checkpoint_shard")
    found = {path.name: _entry(path)}
    _sync(path)
    return found


def folder_size(folder: Path) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _complete(
    temporary: Path, target: Path, state: State, entries: dict[str, FileEntry], fence: Callable[[], None]
) -> None:
    """Write state and manifest, then rename: the checkpoint becomes visible."""
    failpoint("learner.checkpoint_state")
    write_atomic(temporary / STATE, msgspec.json.encode(state))
    entries[STATE] = _entry(temporary / STATE)
    failpoint("learner.checkpoint_manifest")
    write_atomic(temporary / MANIFEST, msgspec.json.encode(entries, order="sorted"))
    failpoint("learner.checkpoint_rename")
    fence()
    if target.exists():  # the same step after a restart, or a damaged checkpoint
        shutil.rmtree(target)
    os.replace(temporary, target)
    failpoint("learner.checkpoint_renamed")
    _sync(target.parent)


def newest(root: Path, *, say: Callable[[str], None] = print) -> tuple[State, Path] | None:
    """Return the newest undamaged checkpoint; None if there is no checkpoint.

    Raises:
        AsyncRLError: `learner.checkpoint`: all are damaged. Starting from zero would lose the run silently.
    """
    problems = []
    for step in steps_in(root):
        folder = step_folder(root, step)
        why = find_problem(folder)
        if not why:
            return msgspec.json.decode((folder / STATE).read_bytes(), type=State), folder
        problems.append(f"{folder.name}: {why}")
        say(f"checkpoint {folder.name} is skipped: {why}")
    if problems:
        raise AsyncRLError("learner.checkpoint", "; ".join(problems), where=str(root))
    return None


def read_state(folder: Path) -> State:
    return msgspec.json.decode((folder / STATE).read_bytes(), type=State)


def find_problem(folder: Path) -> str:
    """Return what is wrong with a checkpoint; empty if it is complete."""
    try:
        entries = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict[str, FileEntry])
        for name, entry in entries.items():
            if Path(name).name != name:
                return f"{name}: not a plain file name"
            if _entry(folder / name) != entry:
                return f"{name}: size or digest differs from the manifest"
        msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except (OSError, *UNREADABLE) as error:
        return str(error)
    return ""


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
    return FileEntry(path.stat().st_size, digest.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean(root: Path, *, step: int, keep: int, ranking: retention.Ranking | None = None) -> None:
    """Keep the newest `keep` up to the step just written, and the best. No checkpoint may be in progress. Later steps
    were found damaged when the run was restored.
    """
    known = steps_in(root)
    kept = retention.select(known, newest=step, keep=keep, ranking=ranking)
    if ranking is not None:
        with contextlib.suppress(OSError):  # a full disk: the next checkpoint writes it again
            retention.write(root, kept, ranking)
    else:
        (root / retention.BEST).unlink(missing_ok=True)
    for number in known:
        if number not in kept:
            shutil.rmtree(step_folder(root, number), ignore_errors=True)
    for path in root.glob(".step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
