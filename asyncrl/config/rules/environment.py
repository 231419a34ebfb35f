"""Rules of `[environment]` and `[environment.agent]`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.config.mode import streams
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections.environment import AGENT
from asyncrl.config.tree import Config


def problems(config: Config) -> Iterator[Conflict]:
    environment = config.environment
    yield from _agent_problems(config)
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
    if ":" in environment.name and not re.fullmatch(r"[\w.]+:[\w.]+", environment.name):
        yield conflict(
            "environment.name",
            f"environment.name = {environment.name!r} is not 'module:name'",
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
    if config.producers.checkpoint_tokens:
        yield conflict(
            "producers.checkpoint_tokens",
            f"producers.checkpoint_tokens sends single answers in pieces; with environment.name = {environment.name!r} "
            "set it to 0",
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
    if agent.function and not re.fullmatch(r"[\w.]+:[\w.]+", agent.function):
        yield conflict(
            f"{path}.function",
            f"environment.agent.function = {agent.function!r} is not 'module:name'",
            code="config.environment",
        )
    if agent.function and agent.sessions > 1:
        yield conflict(f"{path}.sessions", "environment.agent.sessions is for agent.command")
    if agent.port and config.producers.count > 1:
        yield conflict(
            f"{path}.port",
            f"environment.agent.port = {agent.port} and producers.count = {config.producers.count}: every producer has "
            "an endpoint of its own, set port = 0",
        )
