"""The environments of a run: that of `[environment]`, and those that rows name in their column `agent_name`.

Guarantees: a row always has the same environment, in training and in evaluations; one that names an unknown environment
is a `BadPrompt`; an error in the settings of a `[[row_environment]]` names its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec.structs import asdict

from asyncrl.config import Config
from asyncrl.config.sections.environment import EnvironmentConfig
from asyncrl.errors import ConfigError
from producers.data.prompts import BadPrompt
from producers.data.tokenizer import Tokenizer
from producers.environments.multi_turn import Turns, make_environment
from producers.environments.other_policy import OtherPolicy
from producers.rollout.rollout import Environment

UNKNOWN = "agent_name: "  # begins the reason of a row that names an unknown environment


class Environments:
    """One environment for each of `config.environments`. Raises `config.environment`."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self.each: list[tuple[EnvironmentConfig, Environment]] = []
        for setting in config.environments:
            with errors_at(config, setting):
                self.each.append((setting, make_environment(config.replace_environment(setting), tokenizer)))

    def find(self, row: Mapping[str, Any]) -> Environment:
        """The environment of a row. Raises `BadPrompt`."""
        wanted = require_environment(self._config, row)
        return next(environment for setting, environment in self.each if setting is wanted)

    def meet(self, others: Mapping[str, OtherPolicy]) -> None:
        """Samples may talk to these other policies."""
        for _, environment in self.each:
            if isinstance(environment, Turns):
                environment.others = others

    async def open(self) -> None:
        for setting, environment in self.each:
            with errors_at(self._config, setting):
                await environment.open()

    async def close(self) -> None:
        for _, environment in self.each:
            await environment.close()

    def counts(self) -> dict[str, int]:
        """Sums of the environments' counters, for the heartbeat."""
        found: dict[str, int] = {}
        for _, environment in self.each:
            for name, value in ({} if environment.counts is None else asdict(environment.counts)).items():
                found[name] = found.get(name, 0) + value
        return found


def require_environment(config: Config, row: Mapping[str, Any]) -> EnvironmentConfig:
    """The settings of a row's environment. Raises `BadPrompt` if the row names an unknown one."""
    found = config.environment_for(row)
    if found is None:
        known = ", ".join(one.agent_name for one in config.row_environment)
        raise BadPrompt(f"{UNKNOWN}{row['agent_name']!r} is the agent_name of no [[row_environment]]: {known}")
    return found


def table_of(config: Config, setting: EnvironmentConfig) -> str:
    """The table of an environment: `environment` or `row_environment[0]`."""
    named = [index for index, one in enumerate(config.row_environment) if one is setting]
    return f"row_environment[{named[0]}]" if named else "environment"


@contextmanager
def errors_at(config: Config, setting: EnvironmentConfig) -> Iterator[None]:
    """Name the table of this environment in the place of an error."""
    try:
        yield
    except ConfigError as error:
        if setting is config.environment or not error.where.startswith("environment."):
            raise
        where = f"{table_of(config, setting)}.{error.where.removeprefix('environment.')}"
        raise ConfigError(error.code, error.message, where=where, remedy=error.remedy) from error
