"""Rules of `[environment]` and `[environment.agent]`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.config.mode import streams
from asyncrl.config.rules import Conflict
from asyncrl.config.sections.environment import AGENT
from asyncrl.config.tree import Config


def problems(config: Config) -> Iterator[Conflict]:
    environment = config.environment
    yield from _agent_problems(config)
    if environment.is_single_turn:
        for key in ("args", "tools"):
            if getattr(environment, key):
                yield (
                    "config.conflict",
                    f"environment.name = 'single_turn' does not look at environment.{key}: name another environment",
                    ("environment", key),
                )
        return
    if streams(config):
        yield (
            "config.conflict",
            "producers.engine = 'dataset' generates nothing: it has no environment",
            ("environment", "name"),
        )
    if ":" in environment.name and not re.fullmatch(r"[\w.]+:[\w.]+", environment.name):
        yield (
            "config.environment",
            f"environment.name = {environment.name!r} is not 'module:name'",
            ("environment", "name"),
        )
    if environment.name == "tools" and not environment.tools:
        yield ("config.environment", "environment.name = 'tools' without environment.tools", ("environment", "tools"))
    repeated = sorted({name for name in environment.tools if environment.tools.count(name) > 1})
    if repeated:
        yield ("config.environment", f"environment.tools names {', '.join(repeated)} twice", ("environment", "tools"))
    unused = sorted(set(environment.tool_args) - {name.partition(":")[0] for name in environment.tools})
    if unused:
        yield (
            "config.environment",
            f"environment.tool_args.{unused[0]}: no tool of that name in environment.tools",
            ("environment", "tool_args"),
        )
    if config.producers.checkpoint_tokens:
        yield (
            "config.conflict",
            "producers.checkpoint_tokens sends single answers in pieces; with "
            f"environment.name = {environment.name!r} set it to 0",
            ("producers", "checkpoint_tokens"),
        )


def _agent_problems(config: Config) -> Iterator[Conflict]:
    agent, path = config.environment.agent, ("environment", "agent")
    if config.environment.name != AGENT:
        if agent.command or agent.function:
            yield "config.conflict", "environment.agent is set and environment.name is not 'agent'", path
        return
    if bool(agent.command) == bool(agent.function):
        yield "config.environment", "set exactly one of environment.agent.command and environment.agent.function", path
    if agent.function and not re.fullmatch(r"[\w.]+:[\w.]+", agent.function):
        yield (
            "config.environment",
            f"environment.agent.function = {agent.function!r} is not 'module:name'",
            (*path, "function"),
        )
    if agent.function and agent.sessions > 1:
        yield "config.conflict", "environment.agent.sessions is for agent.command", (*path, "sessions")
    if agent.port and config.producers.count > 1:
        yield (
            "config.conflict",
            f"environment.agent.port = {agent.port} and producers.count = "
            f"{config.producers.count}: every producer has an endpoint of its own, set port = 0",
            (*path, "port"),
        )
