"""Assigns the accelerators of a host to the processes of `asyncrl launch`. Pure, except `find_devices`.

A rank of the learner takes the device with its number (the learner sees all devices, since its ranks communicate). A
producer or evaluator sees only its own devices, by the environment variable of the device type, so processes of its
engine keep to it as well. Guarantees:
1. devices are shared only if there are too few; a note reports it;
2. explicit settings win: `producers.device = "cpu"` or `"cuda:1"` is left unchanged, and numbers are relative to the
   devices that a scheduler made visible (`CUDA_VISIBLE_DEVICES`);
3. torch is not imported: devices are files of the host.

Example: 4 devices, 2 ranks, 3 producers: ranks 0 and 1, producers 2, 3 and 2 again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.runtime.device import TABLE, device_nodes

if TYPE_CHECKING:
    from asyncrl.config import Config

Conflict = tuple[str, str, tuple[str, ...]]


class Devices(NamedTuple):
    """The devices of a host that this process may use: their type, and their names in that type's variable."""

    kind: str = "cpu"
    ids: tuple[str, ...] = ()


class Placed(NamedTuple):
    """Device numbers of the learner's ranks, and of each producer and evaluator of this launcher."""

    learner: tuple[int, ...] = ()
    producers: tuple[int, ...] = ()
    evaluators: tuple[int, ...] = ()

    def numbers_for(self, role: str) -> tuple[int, ...]:
        """Those of a role whose processes have one device each."""
        return {"producer": self.producers, "evaluator": self.evaluators}.get(role, ())

    @property
    def shared(self) -> bool:
        """Whether two processes share a device."""
        taken = [*self.learner, *self.producers, *self.evaluators]
        return len(set(taken)) < len(taken)


def find_devices(*, environment: Mapping[str, str] | None = None, folder: Path = Path("/dev")) -> Devices:
    """The accelerators of this host; those in its environment variable, if it is set."""
    env = os.environ if environment is None else environment
    for kind, here in device_nodes(folder).items():
        given = env.get(TABLE[kind].visible_env)
        if here and given is not None:
            return Devices(kind, tuple(word.strip() for word in given.split(",") if word.strip()))
        if here:
            return Devices(kind, tuple(str(number) for number in range(len(here))))
    return Devices()


def assign_devices(config: Config, roles: Sequence[str], devices: Devices) -> Placed:
    """Assign devices. Empty without an accelerator, or if devices are not assigned."""
    count = len(devices.ids)
    if not count or config.cluster.devices == "share":
        return Placed()
    ranks = config.learner.ranks if "learner" in roles and _given_out(config.learner.device, devices) else 0
    learner = tuple(rank % count for rank in range(ranks))
    if not _given_out(config.producers.device, devices):
        return Placed(learner)
    free = [number for number in range(count) if number not in learner] or list(range(count))
    producers = config.producers.count if "producer" in roles else 0
    evaluators = config.evaluation.evaluator_count if "evaluator" in roles else 0
    given = tuple(free[number % len(free)] for number in range(producers + evaluators))
    return Placed(learner, given[:producers], given[producers:])


def _given_out(setting: str, devices: Devices) -> bool:
    return setting in ("auto", devices.kind)


def device_environment(number: int, given: Sequence[int], devices: Devices) -> dict[str, str]:
    """Environment variables of process `number` of a role that was `given` these devices."""
    if number >= len(given):
        return {}
    return {TABLE[devices.kind].visible_env: devices.ids[given[number]]}


def problems(config: Config, roles: Sequence[str], devices: Devices) -> Iterator[Conflict]:
    """Too few devices for the configuration."""
    found_ = assign_devices(config, roles, devices)
    count = len(devices.ids)
    if found_.learner and config.learner.ranks > count:
        yield (
            "config.conflict",
            f"learner.ranks = {config.learner.ranks}, and this host has {count} {devices.kind} "
            "devices: every rank needs one",
            ("learner", "ranks"),
        )
    elif config.cluster.devices == "own" and found_.shared:
        yield (
            "config.conflict",
            f"cluster.devices = 'own': {len(found_.learner)} ranks and {len(found_.producers)} "
            f"producers{' and evaluators' * bool(found_.evaluators)} on {count} {devices.kind} devices",
            ("cluster", "devices"),
        )


def format_assignment(placed_: Placed, devices: Devices) -> str:
    """`learner: cuda 0, 1; producers: cuda 2, 3`, in the numbers of the host; empty without devices."""
    parts = [
        f"{name}: {devices.kind} {', '.join(devices.ids[number] for number in numbers)}"
        for name, numbers in zip(placed_._fields, placed_, strict=True)
        if numbers
    ]
    return "; ".join(parts)
