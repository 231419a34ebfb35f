"""`[environment]` and `[environment.agent]`: what happens between a prompt and a finished sample.

Example: `name = "tools"`, `tools = ["calculator"]`, `max_turns = 4`: the model calls a calculator up to three times and
answers.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from asyncrl.config.sections.base import Count, Positive, Seconds, Section

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
