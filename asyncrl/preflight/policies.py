"""Checks of several policies in one file (`[policies]`): each as a run of its own, then their addresses and devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.config import Config, load_all
from asyncrl.config.mode import present_roles
from asyncrl.config.policies import KEY, TABLE
from asyncrl.config.rules.policies import find_collisions
from asyncrl.errors import AsyncRLError, error_for
from asyncrl.process_plan.device_assignment import Devices, assign_devices, find_devices
from asyncrl.process_plan.plan import TARGETS
from asyncrl.runtime.run_dir import RunDir


def merge_errors(
    found: Mapping[str, Sequence[AsyncRLError]], configs: Mapping[str, Config] | None = None
) -> list[AsyncRLError]:
    """The errors by policy as one list: each once, with the policies that have it; then addresses and devices of two
    `configs`.
    """
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
    taken = find_shared_devices(configs or {}, find_devices())
    return [*merged, *taken, *(error_for(one.code, one.message, where=".".join(one.path[:1])) for one in shared)]


def find_shared_devices(configs: Mapping[str, Config], devices: Devices) -> Iterator[AsyncRLError]:
    """Devices of two policies that one of them wants for itself (`cluster.devices = "own"`): the launcher of each
    policy assigns those of the host from the first one on, and knows nothing of the others.
    """
    used: dict[str, set[int]] = {}
    for name, config in configs.items():
        placed = assign_devices(config, present_roles(TARGETS["all"], config), devices)
        engines = (*placed.producers, *placed.evaluators, *placed.judges)
        used[name] = {*placed.learner, *(number for numbers in engines for number in numbers)}
        if config.cluster.devices == "share" and devices.ids:
            used[name].add(0)  # torch's first one, where no device is named
    for first, second in itertools.combinations(configs, 2):
        owners = [name for name in (first, second) if configs[name].cluster.devices == "own"]
        if owners and (both := used[first] & used[second]):
            numbers = ", ".join(devices.ids[number] for number in sorted(both))
            what = f"policies {first} and {second} would both use {devices.kind} {numbers}"
            yield error_for(
                "config.conflict",
                f"{TABLE}.{owners[0]}.cluster.devices = 'own', and {what}",
                where=TABLE,
                remedy=f"set cluster.devices = 'auto', name devices (learner.device, producers.device), or start each "
                f"policy with `--policy NAME` and devices of its own in {devices.visible_env}",
            )


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
