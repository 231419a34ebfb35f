"""`asyncrl export`: the weights of a checkpoint as a folder that transformers and vLLM load.

This module imports no torch: `export_command` checks the arguments, then replaces itself by `python -m
learners.checkpoints.export`. Guarantees:
1. a folder without a run, a run without a checkpoint, a target that is not empty and an invalid size are refused before
   anything starts;
2. exit code and signals are those of the exporter, which is the same process.

Example: `asyncrl export runs/my --dtype bfloat16 --max-shard-size 2GB`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.runs.fork import checkpoints_in
from asyncrl.runtime.run_dir import RunDir

MODULE = "learners.checkpoints.export"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

#: Replaces this process: program, words, environment.
Replace = Callable[[str, list[str], Mapping[str, str]], object]


def export_command(
    folder: Path, *, step: int | None, out: Path | None, dtype: str, max_shard_size: str, replace: Replace = os.execve
) -> int:
    from asyncrl.process_plan.interpreters import python_path
    from asyncrl.process_plan.plan import environment

    words = export_words(folder, step=step, out=out, dtype=dtype, max_shard_size=max_shard_size)
    threads = load(RunDir(folder).config).learner.torch_threads
    sys.stdout.flush()
    replace(sys.executable, words, {**os.environ, **environment(threads, python_path())})
    return 0


def export_words(folder: Path, *, step: int | None, out: Path | None, dtype: str, max_shard_size: str) -> list[str]:
    """The command of the exporter. Raises ConfigError for a run without checkpoints, a target, or a size."""
    run = RunDir(folder).require()
    parse_size(max_shard_size)
    if not checkpoints_in(run):
        raise no_checkpoint(run)
    words = [sys.executable, "-m", MODULE, str(folder), "--dtype", dtype, "--max-shard-size", max_shard_size]
    if out is not None:
        words += ["--out", str(refuse_target(out))]
    if step is not None:
        words += ["--step", str(step)]
    return words


def no_checkpoint(run: RunDir) -> ConfigError:
    """The error for a run without a checkpoint."""
    wait = "wait for learner.checkpoint_every steps, or end the run with `asyncrl stop`"
    return ConfigError("usage", "the run has no checkpoint", where=str(run.checkpoints), remedy=wait)


def refuse_target(target: Path) -> Path:
    """The target folder, which is new or empty.

    Raises:
        ConfigError: `usage`, if it is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("usage", "it exists and is not empty", where=str(target), remedy="name a new folder by --out")
    return target.absolute()


def parse_size(text: str) -> int:
    """Bytes of a size.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size("700")
    (5000000000, 1572864, 700)

    Raises:
        ConfigError: `usage`, for other texts, or 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found and found[2].upper() in _UNITS else 0
    if size < 1:
        raise ConfigError("usage", f"{text!r} is not a size", where="--max-shard-size", remedy="such as 5GB or 500MB")
    return size


def size_text(size: int) -> str:
    """A size as text.

    >>> size_text(988_100_000), size_text(640)
    ('988.1 MB', '640 B')
    """
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"
