"""Rules of `[sandbox]`, `[trackers]`, `[cluster]` and `[environment]`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.locations import parse_dotted
from asyncrl.config.mode import sends_adapters, streams
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections.environment import AGENT, NEMO_GYM, REQUESTS, engine_parser
from asyncrl.config.sections.producers import devices_each
from asyncrl.config.sections.tracker import ONLINE, tracker_label
from asyncrl.config.tree import Config
from asyncrl.plugins import is_place


def problems(config: Config) -> Iterator[Conflict]:
    yield from _sandbox_problems(config)
    yield from _tracker_problems(config)
    yield from _cluster_problems(config)
    yield from _direct_problems(config)
    yield from _quantised_problems(config)
    yield from _turns_problems(config)
    yield from _each_environment(config, "environment")
    for index, one in enumerate(config.row_environment):
        if not one.agent_name or one.agent_name in [other.agent_name for other in config.row_environment[:index]]:
            what = "it is a text that no other [[row_environment]] has"
            yield conflict(
                f"row_environment[{index}].agent_name", f"row_environment.agent_name = {one.agent_name!r}: {what}"
            )
        yield from _each_environment(config.replace_environment(one), f"row_environment[{index}]")
    ports = [one.agent.port for one in config.environments if one.name == AGENT and one.agent.port]
    if len(set(ports)) < len(ports):
        yield conflict("row_environment", f"two environments have an endpoint at port {ports[0]}: set agent.port = 0")


def _each_environment(config: Config, path: str) -> Iterator[Conflict]:
    """The problems of `config.environment`, at its own path."""
    for problem in (*_environment_problems(config), *_agent_problems(config)):
        message = problem.message.replace("environment.", f"{path}.")
        own = problem.path[0] == "environment"
        yield problem._replace(message=message, path=(*parse_dotted(path), *problem.path[1:]) if own else problem.path)


def _direct_problems(config: Config) -> Iterator[Conflict]:
    """What cannot use `weightsync.transport = "direct"`."""
    sync, learner, engine = config.weightsync, config.learner, config.producers.engine
    if sync.transport != "direct" or streams(config):
        return
    direct = "weightsync.transport = 'direct'"
    if engine in ("vllm_http", "sglang"):
        what = f"{direct}: servers of engine {engine!r} take no part in the learner's group"
        yield conflict("weightsync.transport", f"{what}: use engine hf or vllm, or another transport")
    elif not sync.in_place:
        what = f"{direct} writes into the weights in use, so generation pauses from the first byte on"
        yield conflict("weightsync.transport", f"{what}: set weightsync.in_place = true")
    if learner.backend != "fsdp2":
        what = f"{direct}: back-end {learner.backend!r} publishes through host memory"
        yield conflict("weightsync.transport", f"{what}: use fsdp2, or another transport")
    if sync.encoding != "full":
        what = f"{direct} carries whole weights, and weightsync.encoding = {sync.encoding!r}"
        yield conflict("weightsync.encoding", f"{what}: set it to 'full'")
    if sends_adapters(config):
        yield conflict("learner.lora.publish", f"{direct} carries no adapters: set learner.lora.publish = 'merged'")
    if learner.preference.iteration:
        what = f"{direct}: engines that miss a version get it before the next step alone"
        yield conflict("weightsync.transport", f"{what}, and learner.preference.iteration keeps it for several")


def _quantised_problems(config: Config) -> Iterator[Conflict]:
    """What cannot use `weightsync.dtype = "int8"` or `"fp8"`."""
    sync = config.weightsync
    if not sync.quantised or streams(config):
        return
    quantised = f"weightsync.dtype = {sync.dtype!r}"
    if sync.transport == "direct":
        what = f"{quantised}: transport 'direct' writes what is sent into the weights in use"
        yield conflict("weightsync.dtype", f"{what}, which hold no codes: use another transport, or dtype 'auto'")
    if sends_adapters(config):
        what = f"{quantised} sends whole weights: the base of adapters would be another policy than the learner's"
        yield conflict("learner.lora.publish", f"{what}: set learner.lora.publish = 'merged'")


def _turns_problems(config: Config) -> Iterator[Conflict]:
    """What cannot use `cluster.devices = "turns"`."""
    if config.cluster.devices != "turns" or streams(config):
        return
    turns, sync, engine = "cluster.devices = 'turns'", config.weightsync, config.producers.engine
    if engine in ("vllm_http", "sglang"):
        what = f"{turns}: a server of engine {engine!r} keeps its device"
        yield conflict("cluster.devices", f"{what}: use engine hf or vllm")
    if engine == "hf" and not sync.in_place:
        what = f"{turns}: a sleeping engine has no room for a second copy of the weights"
        yield conflict("weightsync.in_place", f"{what}: set weightsync.in_place = true")
    if sync.transport in ("direct", "collective"):
        what = f"{turns}: with transport {sync.transport!r} learner and engines use their devices at the same time"
        yield conflict("weightsync.transport", f"{what}: use local, stream or disk")
    if config.learner.backend != "fsdp2":
        what = f"{turns}: back-end {config.learner.backend!r} keeps its states on the device"
        yield conflict("learner.backend", f"{what}: use fsdp2")
    if config.cluster.learner_hosts > 1:
        yield conflict("cluster.learner_hosts", f"{turns} is for one host, and learner_hosts > 1")


def _sandbox_problems(config: Config) -> Iterator[Conflict]:
    sandbox = config.sandbox
    if sandbox.kind not in ("bubblewrap", "none") and not sandbox.kind.startswith(("http://", "https://")):
        yield conflict(
            "sandbox.kind",
            f"sandbox.kind = {sandbox.kind!r} is not bubblewrap, none or an http address",
            code="config.type",
        )
    for path in sandbox.paths:
        if not Path(path).is_absolute():
            yield conflict("sandbox.paths", f"sandbox.paths: {path!r} is not an absolute path", code="config.type")
    own = {judge.name: judge.timeout_s for judge in config.judge}
    for index, reward in enumerate(config.reward):
        limit_s = own.get(reward.judge) or config.reward_workers.timeout_s
        asked = reward.args.get("timeout_s")
        program_s = asked if isinstance(asked, int | float) else sandbox.timeout_s
        if reward.function == "builtin:code" and program_s >= limit_s:
            message = (
                f"a program may take {program_s:g} s and its call {limit_s:g} s: an endless program would be a failed "
                "reward and no 0; lower sandbox.timeout_s or raise reward_workers.timeout_s"
            )
            yield conflict(f"reward[{index}]", message)


SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


def _tracker_problems(config: Config) -> Iterator[Conflict]:
    trackers = config.trackers
    if len({tracker_label(name) for name in trackers.use}) < len(trackers.use):
        yield conflict("trackers.use", f"trackers.use names one twice: {', '.join(trackers.use)}")
    for name in trackers.use:
        if not (is_place(name) or re.fullmatch(r"[\w-]+", name)) or name in ("tensorboard", "prometheus"):
            other = {"tensorboard": "log.tensorboard", "prometheus": "trackers.prometheus_port"}.get(name)
            what = f"{name} is not one of trackers.use" + (f": set {other}" if other else "")
            yield conflict("trackers.use", what, code="config.type")
    for key in ("prometheus_host", "prometheus_key_file", "prometheus_cert_file"):
        if getattr(trackers, key) not in ("", "127.0.0.1") and not trackers.prometheus_port:
            yield conflict(f"trackers.{key}", f"trackers.{key} is set and trackers.prometheus_port = 0")
    for key in ("key_file", "options"):
        for name in getattr(trackers, key):
            if name not in trackers.use:
                yield conflict(f"trackers.{key}", f"trackers.{key} names {name!r}, which is not in trackers.use")
    for name, options in trackers.options.items():
        for dotted in _secrets(options, name):
            variable = ONLINE.get(name, ("", "its variable"))[1]
            yield conflict(
                "trackers.options",
                f"trackers.options.{dotted} looks like a secret, and this file is written to the run folder: set "
                f"{variable} or trackers.key_file",
            )


def _secrets(options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value, f"{prefix}.{key}")
        elif SECRET.search(key):
            yield f"{prefix}.{key}"


NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")  # valid in DNS: names of services and hosts


def _cluster_problems(config: Config) -> Iterator[Conflict]:
    cluster = config.cluster
    if cluster.name and not NAME.fullmatch(cluster.name):
        yield conflict(
            "cluster.name",
            f"cluster.name = {cluster.name!r}: lower-case letters, digits and '-', at most 40",
            code="config.type",
        )
    for key in ("partition", "account", "time_limit", "namespace", "image", "memory", "claim", "gpu_option"):
        value = getattr(cluster, key)
        if not re.fullmatch(r"[\w.:/@+,=-]*", value):
            yield conflict(
                f"cluster.{key}",
                f"cluster.{key} = {value!r} has characters that do not belong there",
                code="config.type",
            )
    for option in cluster.options:
        if not option.startswith("-") or "\n" in option:
            yield conflict("cluster.options", f"cluster.options: {option!r} is no option of sbatch", code="config.type")
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]?", cluster.memory):
        yield conflict(
            "cluster.memory",
            f"cluster.memory = {cluster.memory!r}: a number with K, M, G or T",
            code="config.type",
        )
    if cluster.learner_gpus and cluster.learner_gpus < config.learner.ranks:
        yield conflict(
            "cluster.learner_gpus",
            f"cluster.learner_gpus = {cluster.learner_gpus} is below learner.ranks = {config.learner.ranks}: every "
            "rank has one",
        )
    uses_any = devices_each(config.producers.engine, config.producers.engine_args)
    if uses_any and cluster.producer_gpus and cluster.producer_gpus < config.producers.count:
        yield conflict(
            "cluster.producer_gpus",
            f"cluster.producer_gpus = {cluster.producer_gpus} is below producers.count = {config.producers.count}: "
            "every producer has one",
        )


def _environment_problems(config: Config) -> Iterator[Conflict]:
    environment = config.environment
    if environment.is_single_turn:
        for key in ("args", "tools"):
            if getattr(environment, key):
                yield conflict(
                    f"environment.{key}",
                    f"environment.name = 'single_turn' does not look at environment.{key}: name another environment",
                )
        return
    if streams(config):
        yield conflict("environment.name", "producers.engine = 'dataset' generates nothing: it has no environment")
    if ":" in environment.name and not is_place(environment.name):
        yield conflict(
            "environment.name",
            f"environment.name = {environment.name!r} is not 'module:name' or 'file.py:name'",
            code="config.environment",
        )
    if environment.name == NEMO_GYM and config.data.prompt_key != REQUESTS:
        yield conflict(
            "data.prompt_key",
            f"environment.name = {NEMO_GYM!r} plays rows of NeMo-Gym: set data.prompt_key = {REQUESTS!r}",
            code="config.environment",
        )
    if environment.name == "tools" and not environment.tools:
        yield conflict(
            "environment.tools",
            "environment.name = 'tools' without environment.tools",
            code="config.environment",
        )
    repeated = sorted({name for name in environment.tools if environment.tools.count(name) > 1})
    if repeated:
        yield conflict(
            "environment.tools",
            f"environment.tools names {', '.join(repeated)} twice",
            code="config.environment",
        )
    unused = sorted(set(environment.tool_args) - {name.partition(":")[0] for name in environment.tools})
    if unused:
        yield conflict(
            "environment.tool_args",
            f"environment.tool_args.{unused[0]}: no tool of that name in environment.tools",
            code="config.environment",
        )
    package, also = engine_parser(environment.parser)[0], engine_parser(environment.reasoning_parser)[0]
    if environment.reasoning_parser and (not also or package not in ("", also)):
        wanted = f"'{package}:NAME'" if package else "'vllm:NAME' or 'sglang:NAME'"
        yield conflict(
            "environment.reasoning_parser",
            f"environment.reasoning_parser = {environment.reasoning_parser!r} is not {wanted}",
            code="config.environment",
        )
    if config.producers.checkpoint_tokens and config.learner.router_replay:
        yield conflict(
            "producers.checkpoint_tokens",
            "producers.checkpoint_tokens keeps turns without the experts that learner.router_replay needs: with "
            f"environment.name = {environment.name!r} set one of them to 0 or false",
        )


def _agent_problems(config: Config) -> Iterator[Conflict]:
    agent, path = config.environment.agent, "environment.agent"
    if config.environment.name != AGENT:
        if agent.command or agent.function:
            yield conflict(path, "environment.agent is set and environment.name is not 'agent'")
        return
    if bool(agent.command) == bool(agent.function):
        yield conflict(
            path,
            "set exactly one of environment.agent.command and environment.agent.function",
            code="config.environment",
        )
    if agent.function and not is_place(agent.function):
        yield conflict(
            f"{path}.function",
            f"environment.agent.function = {agent.function!r} is not 'module:name' or 'file.py:name'",
            code="config.environment",
        )
    if agent.reasoning == "cut" and not config.environment.reasoning_parser:
        yield conflict(f"{path}.reasoning", f"{path}.reasoning = 'cut' needs environment.reasoning_parser")
    if agent.function and agent.sessions > 1:
        yield conflict(f"{path}.sessions", "environment.agent.sessions is for agent.command")
    if agent.port and config.producers.count > 1:
        yield conflict(
            f"{path}.port",
            f"environment.agent.port = {agent.port} and producers.count = {config.producers.count}: every producer has "
            "an endpoint of its own, set port = 0",
        )
