"""`[environment]`: what happens between a prompt and a finished sample.

Part of `asyncrl.config`. `problems` lists what contradicts the rest of the file.

Example: `name = "tools"`, `tools = ["calculator"]`, `max_turns = 4`: the model calls a calculator up to three times and
answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from msgspec import field

from asyncrl.config.sections import agent as agent_config
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.config.sections.base import Count, Positive, Seconds, Section
from asyncrl.config.sections.mode import streams

if TYPE_CHECKING:
    from asyncrl.config import Config

SINGLE_TURN = "single_turn"


class EnvironmentConfig(Section, frozen=True):
    """`[environment]`: several turns, tools, environments of one's own."""

    name: str = SINGLE_TURN  # single_turn, chat, tools, agent, gymnasium, verifiers, 'module:name', or an entry point
    args: dict[str, Any] = field(default_factory=dict)  # handed to the environment as keyword arguments
    max_turns: Positive = 8  # of the model; then the sample ends
    tools: tuple[str, ...] = ()  # calculator, python, search, mcp:NAME, 'module:function', or a .json with schemas
    tool_args: dict[str, Any] = field(default_factory=dict)  # by tool: settings of search, python and mcp servers
    parser: str = "hermes"  # how calls are written: hermes, qwen3, json, 'module:function', or an entry point's name
    max_parallel_calls: Positive = 4  # of one turn; others are answered by an error
    max_tool_response_tokens: Count = 512  # longer answers of a tool are cut; 0: never
    truncation: Literal["left", "middle", "right"] = "middle"  # which part of a long answer is left out
    template: Literal["strict", "tail"] = "strict"  # tail: a chat template may show earlier answers otherwise than said
    step_timeout_s: Seconds = 60.0  # of one step or tool call
    episode_timeout_s: Seconds = 600.0  # of one sample
    agent: AgentConfig = field(default_factory=AgentConfig)

    @property
    def is_single_turn(self) -> bool:
        """Whether a sample is one answer to its prompt."""
        return self.name == SINGLE_TURN


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
    environment = config.environment
    yield from agent_config.problems(config)
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
