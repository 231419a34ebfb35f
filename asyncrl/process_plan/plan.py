"""The processes of a run: a pure function from the configuration to commands.

Guarantees:
1. the same arguments and model folder give the same plan; nothing is started or written here;
2. services come first, the learner last: the order of the start;
3. commands hold no secrets: keys are passed as the path of their file;
4. observers (trackers) come last and belong to the learner: a target without a learner has none.

Example: two producers, one reward worker and one rank are 6 processes: buffer, weightsync, producer-0, producer-1,
reward-0, learner (with several ranks, torchrun around them). Workers of a `[[judge]]` slow are reward-slow-0 and so
on, those of a `[[teacher]]` big are teacher-big-0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.config import Config
from asyncrl.config.judges import Judge, find_judge, list_judges, parse_display_name
from asyncrl.config.sections.producers import SERVED
from asyncrl.config.sections.reward import DEFAULT
from asyncrl.config.sections.tracker import tracker_label
from asyncrl.errors import ConfigError
from asyncrl.net.addresses import LOOPBACK
from asyncrl.process_plan.device_assignment import (
    Devices,
    Placed,
    assign_devices,
    device_environment,
    keeps_number,
)
from asyncrl.process_plan.heavy_imports import heavy_imports
from asyncrl.process_plan.interpreters import ENGINE_TOKEN
from asyncrl.runtime.role import MAY_RENAME
from asyncrl.runtime.run_dir import endpoint

#: What `asyncrl launch TARGET` starts, in order.
TARGETS: dict[str, tuple[str, ...]] = {
    "all": ("buffer", "weightsync", "producer", "evaluator", "reward", "learner"),
    "services": ("buffer", "weightsync"),
    "buffer": ("buffer",),
    "weightsync": ("weightsync",),
    "producers": ("producer",),
    "evaluators": ("evaluator",),
    "rewards": ("reward",),
    "teachers": ("reward",),
    "learner": ("learner",),
}
NO_DEVICES = Devices()
SERVICES = frozenset({"buffer", "weightsync"})
ENGINES = frozenset({"producer", "evaluator"})  # roles that generate
WORKERS = ENGINES | {"reward"}  # roles that join a run and never lead it
MODULES = {
    "buffer": "buffers.main",
    "weightsync": "weightsync.main",
    "producer": "producers.main",
    "evaluator": "producers.evaluator",
    "reward": "producers.rewards.main",
    "learner": "learners.main",
}
#: What torchrun would set for a single rank: schedulers may have set other values for the launcher.
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
#: Processes that only observe: a run continues without them (`asyncrl.launcher.supervisor`).
ONLOOKER = "tracker"


@dataclass(frozen=True)
class ProcessPlan:
    """One process: command, environment, and restarts in ten minutes."""

    role: str
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # in addition to what it inherits from the launcher
    inherits: tuple[str, ...] | None = None  # all of the launcher's variables, or these and the harmless ones
    restarts: int = 0
    gang: bool = False  # started by torchrun: signals go to its workers, exit codes come from its report
    ready: str = ""  # address that a service answers at when it is ready
    judge: str = ""  # judge of a reward worker
    imports: tuple[str, ...] = ()  # modules that take it seconds: it may be forked from a process that has them


@dataclass(frozen=True)
class Joining:
    """How processes reach the services of a run on other hosts."""

    connect: str = ""  # address of the buffer; empty: from the configuration
    key: str = ""
    worker_keys: Mapping[str, str] = field(default_factory=dict)  # producer, reward -> its key; else `key`
    takeover: bool = False
    standby: bool = False  # the buffer waits until the serving one is gone
    node_rank: int = 0  # number of this host in a gang of several
    head: str = ""  # host:port of the gang's first host
    tag: str = ""  # makes names unique if another launcher works for the run
    judges: tuple[str, ...] | None = None  # only reward workers of these judges


def plan(
    config: Config,
    roles: Sequence[str],
    *,
    config_path: Path,
    joining: Joining | None = None,
    python: str = sys.executable,
    python_path: Sequence[str] = (),
    devices: Devices = NO_DEVICES,
) -> list[ProcessPlan]:
    """The processes of these roles, in the order of their start. `devices`: the accelerators of this host."""
    how = joining or Joining()
    places = assign_devices(config, roles, devices, judges=how.judges)
    plans = []
    for role in (role for role in TARGETS["all"] if role in roles):
        for number, (name, judge) in enumerate(_members(role, config, how)):
            own = _own_devices(role, number, config, judge=judge, places=places, devices=devices)
            own |= {MAY_RENAME: "1"} if role in WORKERS else {}
            own |= ONE_RANK if role == "learner" and not is_gang(role, config) else {}
            interpreter = config.producers.python if role in ENGINES and config.producers.python else python
            plans.append(
                ProcessPlan(
                    role=role,
                    name=name,
                    argv=_command(
                        interpreter, role, name, config=config, config_path=config_path, how=how, judge=judge
                    ),
                    env=environment(role_threads(role, config), python_path) | interfaces(config) | own,
                    restarts=role_restarts(role, config, judge=judge),
                    gang=is_gang(role, config),
                    ready=endpoint(config, role) if role in SERVICES and not how.standby else "",
                    judge=judge,
                    inherits=inherited_names(role, config, judge=judge),
                    imports=heavy_imports(role, config) if interpreter == python else (),
                )
            )
    if "learner" in roles:
        plans += onlookers(config, config_path=config_path, python=python, python_path=python_path)
    return plans


def _own_devices(
    role: str, number: int, config: Config, *, judge: str, places: Placed, devices: Devices
) -> dict[str, str]:
    """Environment variables with the devices of a process."""
    found = find_judge(config, judge) if role == "reward" else None
    table = config.producers if found is None else found.table
    if keeps_number(table.device, table.engine):
        return {}
    return device_environment(number, places.numbers_for(role), devices)


def onlookers(
    config: Config, *, config_path: Path, python: str = sys.executable, python_path: Sequence[str] = ()
) -> list[ProcessPlan]:
    """Online trackers and the Prometheus exporter, one process each."""
    modules = {f"tracker-{tracker_label(name)}": "learners.trackers.main" for name in config.trackers.use}
    if config.trackers.prometheus_port:
        modules["tracker-prometheus"] = "asyncrl.monitor.prometheus"
    return [
        ProcessPlan(
            role=ONLOOKER,
            name=name,
            argv=(python, "-m", module, "--config", str(config_path), "--name", name),
            env=environment(1, python_path),
            restarts=config.learner.restarts,
        )
        for name, module in modules.items()
    ]


def only_judges(config: Config, target: str, judge: str) -> tuple[str, ...] | None:
    """The judges whose workers a target starts; None: all, with the teachers. `judge`: display name of the only one.

    Raises:
        ConfigError: `usage`, `reward.judge`: the run has no such judge, or no teacher.
    """
    known = list_judges(config)
    if judge and target != "rewards":
        raise ConfigError("usage", f"--judge goes with the target rewards, not {target}", where="--judge")
    if target == "teachers":
        teachers = tuple(one.name for one in known if one.teacher is not None)
        if not teachers:
            raise ConfigError("usage", "the run has no teachers: there is no [[teacher]]", where="teachers")
        return teachers
    if not judge:
        return None
    if parse_display_name(judge) not in [one.name for one in known]:
        names = ", ".join(one.display_name for one in known) or "none"
        raise ConfigError("reward.judge", f"{judge!r}: this run has {names}", where="--judge")
    return (parse_display_name(judge),)


def process_names(role: str, config: Config, *, tag: str = "", judges: tuple[str, ...] | None = None) -> list[str]:
    """`producer-0`, `producer-1`, ...; a unique role has the name of the role."""
    return [name for name, _ in _members(role, config, Joining(tag=tag, judges=judges))]


def _members(role: str, config: Config, how: Joining) -> list[tuple[str, str]]:
    """The processes of a role: name, and the judge of a reward worker."""
    middle = f"-{how.tag}" if how.tag else ""
    if role in ENGINES:
        count = config.producers.count if role == "producer" else config.evaluation.evaluator_count
        return [(f"{role}{middle}-{number}", "") for number in range(count)]
    if role != "reward":
        return [(f"standby{middle}" if how.standby else role, "")]
    return [
        (f"{_kind(judge)}{middle}{'-' * bool(judge.name)}{judge.name}-{number}", judge.name)
        for judge in list_judges(config)
        if how.judges is None or judge.name in how.judges
        for number in range(judge.count)
    ]


def _kind(judge: Judge) -> str:
    return "teacher" if judge.teacher is not None else "reward"


def is_gang(role: str, config: Config) -> bool:
    """Whether torchrun starts the role. One rank needs none, and would begin to import torch after torchrun has."""
    return role == "learner" and (config.learner.ranks > 1 or config.cluster.learner_hosts > 1)


def role_threads(role: str, config: Config) -> int:
    """CPU threads of one process of the role."""
    generates = dict.fromkeys(ENGINES, config.producers.torch_threads)
    return {**generates, "learner": config.learner.torch_threads}.get(role, 1)


def role_restarts(role: str, config: Config, *, judge: str = DEFAULT) -> int:
    """Restarts in ten minutes: the role's own setting, or the judge's; services use the learner's.

    A gang of several hosts has none: all its hosts must restart together, which is the scheduler's task.
    """
    if role == "learner" and config.cluster.learner_hosts > 1:
        return 0
    if role == "reward" and (found := find_judge(config, judge)) is not None:
        return found.restarts
    own = {**dict.fromkeys(ENGINES, config.producers.restarts), "reward": config.reward_workers.restarts}
    return own.get(role, config.learner.restarts)


def inherited_names(role: str, config: Config, *, judge: str = DEFAULT) -> tuple[str, ...] | None:
    """Variables that a worker needs in addition to the harmless ones: it runs code of users, models and data sets.

    None for services, learner and trackers: they get all.
    """
    if role in ENGINES:
        served = config.producers.engine in SERVED
        return (*config.environment_variables, ENGINE_TOKEN) if served else config.environment_variables
    if role == "reward":
        found = find_judge(config, judge)
        return found.env if found is not None else ()
    return None


def environment(threads: int, python_path: Sequence[str]) -> dict[str, str]:
    """Variables of every role. Idle OpenMP workers must not spin: on a shared CPU that halves the speed."""
    env = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    env |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if python_path:
        env["PYTHONPATH"] = os.pathsep.join(python_path)
    return env


def _meeting(config: Config, how: Joining) -> list[str]:
    """Rendezvous of torchrun. A single host meets in torchrun's memory, so that nothing listens and the command can
    restart unchanged. Several hosts meet at the head by torchrun's static rendezvous, which stores no pickles, unlike
    the elastic one.
    """
    hosts = config.cluster.learner_hosts
    if hosts == 1:
        return ["learners.gang.local_gang"]
    host, _, port = how.head.rpartition(":")
    place = ["--nnodes", str(hosts), "--node-rank", str(how.node_rank), "--master-addr", host, "--master-port", port]
    return ["torch.distributed.run", "--rdzv-backend", "static", *place]


def interfaces(config: Config) -> dict[str, str]:
    """Interfaces of Gloo and NCCL: loopback, unless other hosts join a collective.

    Otherwise they use the address that the host's name resolves to, without authentication.
    """
    alone = config.weightsync.collective_host in LOOPBACK and config.cluster.learner_hosts == 1
    if not alone or not sys.platform.startswith("linux"):
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _command(
    python: str, role: str, name: str, *, config: Config, config_path: Path, how: Joining, judge: str
) -> tuple[str, ...]:
    words = [python, "-m", MODULES[role], "--config", str(config_path), "--name", name]
    words += ["--judge", judge] if judge else []
    if how.connect and role not in SERVICES:
        words += ["--connect", how.connect]
    key = how.worker_keys.get(role, how.key)
    if key:
        words += ["--key", key]
    words += ["--takeover"] if role == "learner" and how.takeover else []
    words += ["--standby"] if role == "buffer" and how.standby else []
    if not is_gang(role, config):
        return tuple(words)
    gang = [python, "-m", *_meeting(config, how), "--max-restarts", "0"]
    gang += ["--monitor-interval", "0.2", "--nproc-per-node", str(config.learner.ranks)]
    return (*gang, "--no-python", python, "-m", "asyncrl.launcher.parent_guard", "--parent", "0", "--", *words)


class Outcome(msgspec.Struct, frozen=True):
    """How a supervised set of processes ended. `failed` names the process whose end stopped the others."""

    code: int
    reason: str
    wall_s: float
    restarts: dict[str, int] = {}
    failed: str = ""
    last_lines: tuple[str, ...] = ()
    given_up: dict[str, int] = {}  # workers that the run continued without: their last exit code
    stopped: bool = False  # a signal came before the end
