"""`asyncrl fork`: a new run that starts from checkpoint K of another one.

The new folder gets the checkpoint, the resolved configuration with the new folder in it, and `fork.json`. Guarantees:
1. every byte of the checkpoint is compared with its manifest during the copy: a damaged checkpoint, or one that is
   removed meanwhile, makes no fork;
2. the folder is complete or absent: it has a hidden name until the end;
3. nothing is written into the parent, which may be running. The checkpoint's ledger lists the trained groups, so the
   fork trains none of them again; prompts that the parent had in progress at K are generated anew. The fork's history
   begins with its own first event; `asyncrl audit` finds the parent by fork.json.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config, dump, load, parse
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.preflight.weight_layout import refuse_other_layout
from asyncrl.runtime.run_dir import RunDir, format_json, write_atomic

FORK = "fork.json"
_NAME = re.compile(r"step_(\d{6,})")


class Fork(msgspec.Struct, frozen=True):
    """Content of `fork.json`. `parent` is an absolute path; `digest` that of the weights of version `step`."""

    parent: str
    step: int
    digest: str = ""
    checkpoint: str = ""  # BLAKE2b of the checkpoint's manifest
    parent_name: str = ""
    changed: tuple[str, ...] = ()  # --set of the fork
    t: float = 0.0


class _File(msgspec.Struct, frozen=True):
    bytes: int
    blake2b: str


def checkpoints_in(run: RunDir) -> dict[int, Path]:
    """Folders of checkpoints by step; they may be damaged."""
    paths = run.checkpoints.iterdir() if run.checkpoints.is_dir() else iter(())
    return {int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name))}


def fork_command(parent: Path, target: Path, *, step: int, overrides: Sequence[str] = ()) -> int:
    """Make the fork and print how to start it."""
    made = fork(parent, target, step=step, overrides=overrides)
    config = RunDir(target).config
    print(f"fork of {made.parent} at step {made.step}: {target.resolve()}")
    print(f"weights {made.digest or 'of an unknown digest'}; its next step is {made.step + 1}")
    print(f"start it: asyncrl launch all {config}")
    return 0


def fork(parent: Path, target: Path, *, step: int, overrides: Sequence[str] = ()) -> Fork:
    """A new run folder that goes on from the checkpoint of `step`."""
    run = RunDir(parent).require()
    config = _config(run, target, overrides)
    refuse_other_layout(load(run.config), config)
    known = checkpoints_in(run)
    if step not in known:
        steps = ", ".join(map(str, sorted(known))) or "none"
        raise ConfigError(
            "fork.step", f"no checkpoint of step {step} is kept; there are: {steps}", where=str(run.checkpoints)
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("usage", "it exists and is not empty: name a new folder", where=str(target))
    temporary = target.resolve().with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        folder = temporary / "checkpoints" / known[step].name
        folder.mkdir(parents=True, mode=0o700)
        temporary.chmod(0o700)
        checkpoint = copy_checkpoint(known[step], folder)
        made = Fork(
            parent=str(run.root),
            step=step,
            digest=_digest_of(folder, step),
            checkpoint=checkpoint,
            parent_name=load(run.config).run.name,
            changed=tuple(overrides),
            t=time.time(),
        )
        write_atomic(temporary / "config.toml", dump(config).encode())
        write_atomic(temporary / FORK, format_json(made).encode())
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def _config(run: RunDir, target: Path, overrides: Sequence[str]) -> Config:
    """The parent's configuration with the new folder and a new name."""
    root = target.resolve()
    if root == run.root or run.root in root.parents:
        raise ConfigError("usage", "a fork needs a folder outside of its parent", where=str(target))
    parent = load(run.config)
    name = f"{parent.run.name}-fork"
    own = {"run.dir": str(root), "run.name": name}
    named = {override.partition("=")[0].strip() for override in overrides}
    if "run.dir" in named:
        raise ConfigError("usage", "run.dir is the folder of the fork", where="--set")
    settings = [f"{key}={msgspec.json.encode(value).decode()}" for key, value in own.items() if key not in named]
    # Written again: the file of an earlier version holds derived numbers, which would not follow the overrides.
    return parse(dump(parent), file=str(run.config), overrides=[*settings, *overrides])


def copy_checkpoint(source: Path, target: Path) -> str:
    """Copy its files, each compared with the manifest; the digest of the manifest."""
    try:
        manifest = (source / "manifest.json").read_bytes()
        entries = msgspec.json.decode(manifest, type=dict[str, _File])
        for name, entry in entries.items():
            if Path(name).name != name:
                raise AsyncRLError("learner.checkpoint", f"{name}: not a plain file name", where=str(source))
            if _copy(source / name, target / name) != entry:
                what = f"{name}: size or digest differs from the manifest"
                raise AsyncRLError("learner.checkpoint", what, where=str(source))
        write_atomic(target / "manifest.json", manifest)
    except FileNotFoundError as error:
        raise AsyncRLError("learner.checkpoint", f"{error.filename} is gone", where=str(source)) from None
    except UNREADABLE as error:
        raise AsyncRLError("learner.checkpoint", f"manifest.json: {error}", where=str(source)) from None
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()


def _copy(source: Path, target: Path) -> _File:
    digest, size = hashlib.blake2b(digest_size=32), 0
    with source.open("rb") as old, target.open("xb") as new:
        while piece := old.read(1 << 20):
            digest.update(piece)
            new.write(piece)
            size += len(piece)
        new.flush()
        os.fsync(new.fileno())
    return _File(size, digest.hexdigest())


def _digest_of(folder: Path, step: int) -> str:
    """The published digest of the checkpoint's weights."""
    state: dict[str, Any] = msgspec.json.decode((folder / "state.json").read_bytes())
    return str(state.get("digests", {}).get(str(step), ""))
