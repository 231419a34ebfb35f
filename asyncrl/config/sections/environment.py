"""`[environment]`, `[environment.agent]`, `[[row_environment]]`: what happens between a prompt and a finished sample.

Example: `name = "tools"`, `tools = ["calculator"]`, `max_turns = 4`: the model calls a calculator up to three times and
answers.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from asyncrl.config.sections.base import Count, Positive, Seconds, Section

AGENT = "agent"


class AgentConfig(Section, frozen=True):
    """`[environment.agent]`: the program that plays a session."""

    command: tuple[str, ...] = ()  # a program and its arguments
    function: str = ""  # or 'module:name': async def agent(endpoint, row) in the producer
    reasoning: Literal["keep", "cut"] = "keep"  # cut: later requests do not see the reasoning of earlier answers
    sessions: Positive = 1  # sessions of one process, one after the other: rows and answers are lines of JSON
    max_processes: Positive = 32  # simultaneous sessions of one producer
    model: str = "policy"  # model name that the endpoint reports
    port: Count = 0  # port of the endpoint on 127.0.0.1; 0: a free one
    grace_s: Seconds = 5.0  # time to end after SIGTERM


SINGLE_TURN = "single_turn"
NEMO_GYM, REQUESTS = "nemo_gym", "responses_create_params"  # the environment, and the column of its rows' prompts
UNSCORED = ("chat", "tools")  # environments of several turns that leave the reward to reward workers


class EnvironmentConfig(Section, frozen=True):
    """`[environment]`: several turns, tools, custom environments."""

    name: str = SINGLE_TURN  # chat, tools, agent, gymnasium, openenv, nemo_gym, verifiers, a plugin, 'module:name'
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment
    max_turns: Positive = 8  # most turns of the model; then the sample ends
    tools: tuple[str, ...] = ()  # calculator, python, shell, search, browser, mcp:NAME, 'file.py:name', or a .json file
    tool_args: dict[str, Any] = field(default_factory=dict)  # tool -> its settings (search, browser, python, mcp)
    parser: str = "hermes"  # calls: hermes, qwen3, json, 'vllm:NAME', 'sglang:NAME', 'file.py:name', or an entry point
    reasoning_parser: str = ""  # 'vllm:NAME' or 'sglang:NAME': takes the reasoning out of what agents and tools see
    max_parallel_calls: Positive = 4  # calls of one turn; further ones are answered with an error
    max_tool_response_tokens: Count = 512  # truncate longer results of a tool; 0: never
    truncation: Literal["left", "middle", "right"] = "middle"  # part of a long result to leave out
    template: Literal["strict", "tail"] = "strict"  # tail: accept chat templates that render earlier turns differently
    step_timeout_s: Seconds = 60.0  # time limit of one step or tool call
    episode_timeout_s: Seconds = 600.0  # time limit of one sample
    env: tuple[str, ...] = ()  # environment variables that producers, agents and MCP servers get in addition
    agent: AgentConfig = field(default_factory=AgentConfig)

    @property
    def is_single_turn(self) -> bool:
        """Whether a sample is one answer to its prompt."""
        return self.name == SINGLE_TURN

    @property
    def scores(self) -> bool:
        """Whether the environment may reward its samples; else only reward workers do."""
        return self.name not in (SINGLE_TURN, *UNSCORED)


class RowEnvironmentConfig(EnvironmentConfig, frozen=True, kw_only=True):
    """`[[row_environment]]`: an environment of the rows that name it; all others use `[environment]`."""

    agent_name: str  # it plays the rows with this text in the column agent_name


PARSING_ENGINES = ("vllm", "sglang")  # packages with parsers of turns


def engine_parser(name: str) -> tuple[str, str]:
    """The package and its parser, of `vllm:NAME` or `sglang:NAME`; empty for any other parser."""
    package, _, parser = name.partition(":")
    return (package, parser) if package in PARSING_ENGINES else ("", "")


def agent_name(environment: EnvironmentConfig) -> str:
    """The name by which rows choose it; empty: `[environment]`."""
    return environment.agent_name if isinstance(environment, RowEnvironmentConfig) else ""
