"""Assigns the accelerators of a host to the processes of `asyncrl launch`. Pure, except `find_devices`.

A rank of the learner takes the device with its number (the learner sees all devices, since its ranks communicate). A
producer, evaluator, or worker of a judge or teacher with a model of its own sees only its own devices, by the
environment variable of the device type, so processes of its engine keep to them as well. Guarantees:
1. devices are shared only if there are too few; a note reports it;
2. an engine of several devices (tensor or pipeline parallel) gets that many neighbours, and shares none of them;
3. with `cluster.devices = "turns"` engines have the devices of the learner's ranks, from the first one on;
4. explicit settings win: `"cpu"` and `"cuda:1"` are left unchanged, a named device counts as taken, and numbers are
   relative to the devices that a scheduler made visible (`CUDA_VISIBLE_DEVICES`);
5. torch is not imported: devices are files of the host.

Example: 4 devices, 2 ranks, 3 producers: ranks 0 and 1, producers 2, 3 and 2 again. With
`producers.engine_args.tensor_parallel_size = 2` one producer has devices 2 and 3, and a second one is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.judges import list_judges
from asyncrl.config.sections.producers import devices_each
from asyncrl.runtime.device import TABLE, device_nodes, rocm_devices

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.config.judges import Judge

Conflict = tuple[str, str, tuple[str, ...]]
Numbers = tuple[int, ...]  # of the devices of one process
ROCM = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # the first one that is set counts


class Devices(NamedTuple):
    """The devices of a host that this process may use: their type, their names in the variable that selects them, and
    that variable (empty: the type's own).
    """

    kind: str = "cpu"
    ids: tuple[str, ...] = ()
    variable: str = ""

    @property
    def visible_env(self) -> str:
        return self.variable or TABLE[self.kind].visible_env


class Placed(NamedTuple):
    """Device numbers of the learner's ranks; of each producer, evaluator, and worker of judges (`process_plan.plan`
    has their order) of this launcher.
    """

    learner: Numbers = ()
    producers: tuple[Numbers, ...] = ()
    evaluators: tuple[Numbers, ...] = ()
    judges: tuple[Numbers, ...] = ()

    def numbers_for(self, role: str) -> tuple[Numbers, ...]:
        """Those of a role whose processes have devices of their own."""
        own = {"producer": self.producers, "evaluator": self.evaluators, "reward": self.judges}
        return own.get(role, ())

    @property
    def shared(self) -> bool:
        """Whether two processes share a device."""
        several = (*self.producers, *self.evaluators, *self.judges)
        taken = [*self.learner, *(number for numbers in several for number in numbers)]
        return len(set(taken)) < len(taken)


def find_devices(
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path = Path("/dev"),
    rocm: Path = Path("/sys/class/kfd/kfd/topology/nodes"),
) -> Devices:
    """The accelerators of this host; those in its environment variable, if it is set."""
    env = os.environ if environment is None else environment
    for kind, here in device_nodes(folder).items():
        if here:
            return _visible(kind, len(here), TABLE[kind].visible_env, env)
    if count := rocm_devices(folder, rocm):  # torch calls them cuda
        return _visible("cuda", count, next((name for name in ROCM if name in env), ROCM[0]), env)
    return Devices()


def _visible(kind: str, count: int, variable: str, env: Mapping[str, str]) -> Devices:
    given = env.get(variable)
    if given is None:
        return Devices(kind, tuple(map(str, range(count))), variable)
    ids: list[str] = []
    for word in filter(None, (word.strip() for word in given.split(","))):
        if word == "-1":  # this one and all behind it are hidden
            break
        ids.append(word)
    return Devices(kind, tuple(ids), variable)


def assign_devices(
    config: Config, roles: Sequence[str], devices: Devices, *, judges: Sequence[str] | None = None
) -> Placed:
    """Assign devices. Empty without an accelerator; of named devices alone with `cluster.devices = "share"`. `judges`:
    of reward workers; None: all of them.
    """
    count, share = len(devices.ids), config.cluster.devices == "share"
    if not count:
        return Placed()
    learner: Numbers = ()
    if "learner" in roles and not share:
        ranks = config.learner.ranks if _given_out(config.learner.device, devices) else 0
        learner = tuple(rank % count for rank in range(ranks)) or _find_named(config.learner.device, devices)
    wanted = _list_settings(config, roles, judges)
    named = {number for setting, _ in wanted for number in _find_named(setting, devices)}
    turns = config.cluster.devices == "turns"
    taken = named if turns else {*learner, *named}
    free = [number for number in range(count) if number not in taken] or list(range(count))
    place, given = 0, []
    for setting, each in wanted:
        numbers = _find_named(setting, devices) if each else ()
        if each and not share and _given_out(setting, devices):
            place = 0 if place + each > len(free) else place
            numbers = tuple(free[place : place + each])
            place += each
        given.append(numbers)
    producers = config.producers.count if "producer" in roles else 0
    evaluators = producers + (config.evaluation.evaluator_count if "evaluator" in roles else 0)
    parts = (given[:producers], given[producers:evaluators], given[evaluators:])
    return Placed(learner, *(tuple(part) if any(part) else () for part in parts))


def _list_settings(config: Config, roles: Sequence[str], judges: Sequence[str] | None) -> list[tuple[str, int]]:
    """The `device` setting of each process, and how many it uses: producers, evaluators, workers of judges."""
    own = config.producers
    engines = own.count if "producer" in roles else 0
    engines += config.evaluation.evaluator_count if "evaluator" in roles else 0
    found = [(own.device, devices_each(own.engine, own.engine_args))] * engines
    for judge in list_judges(config) if "reward" in roles else ():
        if judges is None or judge.name in judges:
            found += [(judge.table.device, _judge_devices(judge))] * judge.count
    return found


def _judge_devices(judge: Judge) -> int:
    table = judge.table
    return {"classifier": 1, "generative": devices_each(table.engine, {})}.get(table.kind, 0)


def _given_out(setting: str, devices: Devices) -> bool:
    return setting in ("auto", devices.kind)


def _find_named(setting: str, devices: Devices) -> Numbers:
    """The device that a setting such as `cuda:1` names, if this process sees it."""
    kind, _, number = setting.partition(":")
    named = kind == devices.kind and number.isdigit() and int(number) < len(devices.ids)
    return (int(number),) if named else ()


def device_environment(number: int, given: Sequence[Numbers], devices: Devices) -> dict[str, str]:
    """Environment variables of process `number` of a role that was `given` these devices."""
    if number >= len(given) or not given[number]:
        return {}
    return {devices.visible_env: ",".join(devices.ids[one] for one in given[number])}


def keeps_number(setting: str, engine: str) -> bool:
    """Whether a process finds a device such as `cuda:1` itself, among all that it sees. vLLM would take the first."""
    return ":" in setting and engine != "vllm"


def problems(config: Config, roles: Sequence[str], devices: Devices) -> Iterator[Conflict]:
    """Too few devices for the configuration."""
    found_ = assign_devices(config, roles, devices)
    count, own, turns = len(devices.ids), config.producers, config.cluster.devices == "turns"
    each = devices_each(own.engine, own.engine_args)
    engines = [numbers for numbers in (*found_.producers, *found_.evaluators) if numbers]
    if found_.learner and config.learner.ranks > count:
        yield (
            "config.conflict",
            f"learner.ranks = {config.learner.ranks}, and this host has {count} {devices.kind} "
            "devices: every rank needs one",
            ("learner", "ranks"),
        )
    elif each > 1 and engines and _overlap(each, engines, found_, turns=turns):
        yield (
            "config.conflict",
            f"{len(engines)} engines of {each} devices each (producers.engine_args: tensor_parallel_size * "
            f"pipeline_parallel_size), {len(found_.learner)} ranks, {sum(map(len, found_.judges))} workers of judges "
            f"with a model on {count} {devices.kind} devices",
            ("producers", "engine_args"),
        )
    elif config.cluster.devices == "own" and found_.shared:
        yield (
            "config.conflict",
            f"cluster.devices = 'own': {len(found_.learner)} ranks and {len(found_.producers)} "
            f"producers{' and evaluators' * bool(found_.evaluators)}{' and judges' * bool(found_.judges)} on "
            f"{count} {devices.kind} devices",
            ("cluster", "devices"),
        )
    if turns and (judges := [number for numbers in found_.judges for number in numbers]):
        yield (
            "config.conflict",
            f"cluster.devices = 'turns': judges with a model on {devices.kind} {judges[0]} take no turns: set their "
            "device to 'cpu'",
            ("cluster", "devices"),
        )
    if each > 1 and own.count > 1 and count and "producer" in roles and config.cluster.devices == "share":
        yield (
            "config.conflict",
            f"cluster.devices = 'share': {own.count} engines of {each} devices each would all take the first {each}",
            ("cluster", "devices"),
        )


def _overlap(each: int, engines: Sequence[Numbers], placed: Placed, *, turns: bool) -> bool:
    """Whether an engine of several devices lacks one, or shares one with any other process, without `turns`."""
    mine = [number for numbers in engines for number in numbers]
    others = {*(() if turns else placed.learner), *(number for numbers in placed.judges for number in numbers)}
    return len(set(mine)) < len(mine) or not others.isdisjoint(mine) or any(len(one) < each for one in engines)


def format_assignment(placed_: Placed, devices: Devices) -> str:
    """`learner: cuda 0, 1; producers: cuda 2, 3`, in the numbers of the host; `2+3` are of one process. Empty without
    devices.
    """

    def label(numbers: Numbers) -> str:
        return "+".join(devices.ids[number] for number in numbers) or "none"

    parts = [f"learner: {devices.kind} {', '.join(map(label, zip(placed_.learner)))}"] if placed_.learner else []
    for name in ("producers", "evaluators", "judges"):
        if each := getattr(placed_, name):
            parts.append(f"{name}: {devices.kind} {', '.join(map(label, each))}")
    return "; ".join(parts)
