"""Checks of several policies in one file (`[policies]`): each as a run of its own, then their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config import Config, load_all
from asyncrl.config.policies import KEY, TABLE
from asyncrl.config.rules.policies import find_collisions
from asyncrl.errors import AsyncRLError, error_for
from asyncrl.runtime.run_dir import RunDir


def merge_errors(
    found: Mapping[str, Sequence[AsyncRLError]], configs: Mapping[str, Config] | None = None
) -> list[AsyncRLError]:
    """The errors by policy as one list: each once, with the policies that have it, and addresses of two `configs`."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    first: dict[tuple[str, str, str], AsyncRLError] = {}
    for name, errors in found.items():
        for error in errors:
            key = (error.code, error.where, error.message)
            first.setdefault(key, error)
            owners.setdefault(key, []).append(name)
    merged = [
        error_for(
            error.code,
            error.message
            if error.message.startswith(f"{TABLE}.")
            else f"policy {', '.join(owners[key])}: {error.message}",
            where=error.where,
            remedy=error.remedy,
            suggestion=error.suggestion,
        )
        for key, error in first.items()
    ]
    shared = find_collisions(configs or {})
    return [*merged, *(error_for(one.code, one.message, where=".".join(one.path[:1])) for one in shared)]


def load_others(paths: Path | Sequence[Path], overrides: Sequence[str], config: Config) -> dict[str, Config]:
    """The configurations of the other policies, from the same files or from the folders of their runs; those that can
    be loaded.
    """
    left = [override for override in overrides if override.partition("=")[0].strip() != KEY]
    found: dict[str, Config] = {}
    for name, folder in config.run.other_policies.items():
        read = load_all(paths, [*left, f"{KEY}={name}"])
        if read.config is None or read.config.run.policy != name or read.config.run_dir == config.run_dir:
            read = load_all(RunDir(Path(folder)).config)
        if read.config is not None:
            found[name] = read.config
    return found
