"""`[environment.agent]`: a program of any kind that plays sessions through an OpenAI-compatible endpoint.

Part of `asyncrl.config.sections.environment`; in force with `[environment] name = "agent"`. `problems` lists
contradictions.

Example: `command = ["python", "my_agent.py"]`: every sample is a process of its own, with OPENAI_BASE_URL and
OPENAI_API_KEY in its environment and the row as JSON on its standard input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.sections.base import Count, Positive, Seconds, Section

if TYPE_CHECKING:
    from asyncrl.config import Config

AGENT = "agent"


class AgentConfig(Section, frozen=True):
    """`[environment.agent]`: what plays a session."""

    command: tuple[str, ...] = ()  # a program and its arguments
    function: str = ""  # or 'module:name': async def agent(endpoint, row) in the producer
    sessions: Positive = 1  # that one process plays, one after the other: then rows and answers are lines of JSON
    max_processes: Positive = 32  # sessions that one producer plays at once
    model: str = "policy"  # the name of the model, for agents that ask
    port: Count = 0  # of the endpoint on 127.0.0.1; 0: any free one
    grace_s: Seconds = 5.0  # for a process to end by itself after SIGTERM


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
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
