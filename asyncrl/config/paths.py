"""Paths in a configuration: `~`, and files that lie next to the TOML file instead of in the folder of the shell.

Guarantees:
1. `~` is the home folder in every setting of `READ` and `WRITTEN`;
2. a relative path that is read counts from the working folder; one that is not there, and is in the folder of the file
   that names it, is that one. What is written (`run.dir`) counts from the working folder alone;
3. parts of the user, `file.py:name`, are paths that are read, in every setting.

Example: /a/my.toml with `data.path = "rows.jsonl"`, read in /b: /b/rows.jsonl if it exists, else /a/rows.jsonl if that
exists, else an error that names both.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.locations import Places, format_path

#: Settings that name files or folders that are read.
READ = (
    "model.path",
    "data.path",
    "evaluation.path",
    "learner.critic.model",
    "learner.process_reward.model",
    "learner.process_reward.reference",
    "judge.model",
    "judge.api_key_file",
    "teacher.model",
    "teacher.api_key_file",
    "sandbox.paths",
    "trackers.prometheus_key_file",
    "trackers.prometheus_cert_file",
)
#: Settings that name files or folders that are written, or that may not exist yet.
WRITTEN = ("run.dir", "network.key_file", "weightsync.disk_dir", "producers.python", "cluster.folder")
SEVERAL = ("data.path", "evaluation.path")  # parts between commas
_PART = re.compile(r"[^:]+\.py:[\w.]+")  # a part of the user
_LINE = re.compile(r"(.+):\d+")


def settle_paths(tree: dict[str, Any], places: Places) -> dict[str, Any]:
    """The tree of settings, with the paths as they are opened."""
    settled: dict[str, Any] = _settle(tree, (), places)
    return settled


def find_candidates(text: str, place: str) -> list[Path]:
    """Where a path that is read is looked for. `place`: `FILE:LINE` of its setting."""
    path = Path(_expand(text))
    file = _LINE.fullmatch(place)
    found = [Path.cwd() / path, *([Path(file[1]).resolve().parent / path] if file and not path.is_absolute() else [])]
    return list(dict.fromkeys(found))


def name_candidates(text: str, place: str) -> str:
    """`tried /b/rows.jsonl and /a/rows.jsonl`."""
    return f"tried {' and '.join(map(str, find_candidates(text, place)))}"


def _settle(value: Any, path: tuple[str, ...], places: Places) -> Any:
    if isinstance(value, Mapping):
        return {key: _settle(one, (*path, key), places) for key, one in value.items()}
    name = re.sub(r"\[\d+\]", "", format_path(path))
    if isinstance(value, list | tuple):
        inner = [
            _settle_text(one, name, path, places)
            if isinstance(one, str)
            else _settle(one, (*path, f"[{number}]"), places)
            for number, one in enumerate(value)
        ]
        return type(value)(inner)
    return _settle_text(value, name, path, places) if isinstance(value, str) else value


def _settle_text(text: str, name: str, path: tuple[str, ...], places: Places) -> str:
    if name in WRITTEN:
        return _expand(text)
    if name in READ:
        parts = text.split(",") if name in SEVERAL else [text]
        found = [_find(part.strip(), places.where(path)) for part in parts]
        return text if found == [part.strip() for part in parts] else ",".join(found)
    if _PART.fullmatch(text):
        file, _, function = text.rpartition(":")
        return f"{_find(file, places.where(path))}:{function}"
    return text


def _find(path: str, place: str) -> str:
    """The path as it is opened."""
    if not path:
        return path
    here, *others = find_candidates(path, place)
    for other in others:
        if not _exists(here) and _exists(other):
            return str(other)
    return _expand(path)


def _exists(path: Path) -> bool:
    return path.exists() or any(_matches(path))


def _matches(path: Path) -> Iterator[str]:
    return glob.iglob(str(path), recursive=True) if glob.has_magic(str(path)) else iter(())


def _expand(text: str) -> str:
    return os.path.expanduser(text) if text.startswith("~") else text
