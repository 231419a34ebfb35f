"""Durable checkpoints of the learner: a folder per step, complete or invisible.

A checkpoint
`step_000020/` holds one shard file per rank (weights, optimizer, generator states), `state.json` (step, ledger of the
buffer, digests, configuration) and `manifest.json` (size and BLAKE2b of every other file). Guarantees:
1. it is written under a hidden name, synced, and renamed last: a crash at any point leaves the earlier ones untouched;
2. `newest` checks every byte against the manifest, skips what is damaged and says why;
3. the last `keep` stay, and the best (`learners.checkpoints.retention`); others and left-overs of crashes are
   removed, and only
   after a new one is durable;
4. no pickle: safetensors and JSON;
5. a full disk is `disk.full` on every rank alike: the hidden folder goes, the earlier checkpoints stay.
The folder must be on a file system that all ranks see.
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
SPARE_BYTES = 1 << 20  # left free beside a checkpoint: logs and the index need room as well
_NAME = re.compile(r"step_(\d{6,})")


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a learner needs beside its tensors. `ledger` is the buffer's own JSON; `config` the resolved TOML."""

    step: int
    ledger: str
    digests: dict[int, str] = {}  # version -> digest of the weights as they were published
    ranks: int = 1
    config: str = ""
    coefficients: Coefficients | None = None  # of the step after it
    critic_warm: bool = False  # the critic's warm-up has ended before its last step


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and BLAKE2b-256 of one file."""

    bytes: int
    blake2b: str


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step_{step:06d}"


def steps_in(root: Path) -> list[int]:
    """Steps that have a folder, newest first; whether they are usable is another question."""
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
    """Write the checkpoint of `step` (`state` is needed on rank 0). Collective; durable when it returns.

    `backend` writes this rank's part: itself, or a snapshot of it. `ranking`: by which the best stay. `fence` is asked
    on rank 0 right before the checkpoint becomes visible, and raises where another learner took over.
    Raises `disk.full` on every rank where one of them could not write; earlier checkpoints are as they were.
    """
    target = step_folder(root, step)
    temporary = root / f".{target.name}.tmp"

    def agree(error: str) -> None:
        """Rank 0 says whether it worked; where it did not, every rank raises the same."""
        said = gang.share(error.encode()).decode()
        if said:
            if gang.lead:
                fence()  # its owner may have removed the folder below this process
                shutil.rmtree(temporary, ignore_errors=True)  # its bytes are needed more than its content
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
        clean(root, step=step, keep=keep, ranking=ranking)
    return target


def _attempt(work: Callable[[], None]) -> str:
    """Run it; what the file system said against it."""
    try:
        work()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def _begin(root: Path, temporary: Path) -> None:
    """An empty hidden folder, where there is room for a checkpoint as large as the last one."""
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
    """Bytes of the files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _complete(
    temporary: Path, target: Path, state: State, entries: dict[str, FileEntry], fence: Callable[[], None]
) -> None:
    """State and manifest, then the rename that makes the checkpoint exist."""
    failpoint("learner.checkpoint_state")
    write_atomic(temporary / STATE, msgspec.json.encode(state))
    entries[STATE] = _entry(temporary / STATE)
    failpoint("learner.checkpoint_manifest")
    write_atomic(temporary / MANIFEST, msgspec.json.encode(entries, order="sorted"))
    failpoint("learner.checkpoint_rename")
    fence()
    if target.exists():  # the same step again after a restart, or a damaged one
        shutil.rmtree(target)
    os.replace(temporary, target)
    failpoint("learner.checkpoint_renamed")
    _sync(target.parent)


def newest(root: Path, *, say: Callable[[str], None] = print) -> tuple[State, Path] | None:
    """The newest checkpoint whose every byte agrees with its manifest; None where there is none at all.

    Raises `learner.checkpoint` where there are some and all are damaged: starting afresh would lose the run silently.
    """
    problems = []
    for step in steps_in(root):
        folder = step_folder(root, step)
        why = find_problem(folder)
        if not why:
            return msgspec.json.decode((folder / STATE).read_bytes(), type=State), folder
        problems.append(f"{folder.name}: {why}")
        say(f"checkpoint {folder.name} is not used: {why}")
    if problems:
        raise AsyncRLError("learner.checkpoint", "; ".join(problems), where=str(root))
    return None


def read_state(folder: Path) -> State:
    """The state of one checkpoint."""
    return msgspec.json.decode((folder / STATE).read_bytes(), type=State)


def find_problem(folder: Path) -> str:
    """What is wrong with a checkpoint; the empty string where it is whole."""
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
    """Keep the newest `keep` up to the step just written, and the best. Later ones were found damaged when this run was
    restored. No checkpoint may be under way."""
    known = steps_in(root)
    kept = retention.select(known, newest=step, keep=keep, ranking=ranking)
    if ranking is not None:
        with contextlib.suppress(OSError):  # a full disk: it is written again with the next checkpoint
            retention.write(root, kept, ranking)
    else:
        (root / retention.BEST).unlink(missing_ok=True)
    for number in known:
        if number not in kept:
            shutil.rmtree(step_folder(root, number), ignore_errors=True)
    for path in root.glob(".step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
