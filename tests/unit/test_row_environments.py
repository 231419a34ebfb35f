"""Environments by row: settings, choice by `agent_name`, counters, limits of samples."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from env_lab import config_of, tokenizer_in
from msgspec.structs import replace

from asyncrl.config import Config, parse
from asyncrl.config.sections.environment import agent_name
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.process_plan.plan import inherited_names
from buffers.service.producer_requests import sample_limits
from producers.data.prompts import BadPrompt
from producers.data.tokenizer import Tokenizer
from producers.environments import contract_test
from producers.environments.by_row import Environments
from producers.environments.conversation import Counts
from producers.environments.single_turn import SingleTurn

MORE = """
env = ["A_KEY"]
[[row_environment]]
agent_name = "calculate"
name = "tools"
tools = ["calculator"]
max_turns = 3
env = ["A_KEY", "B_KEY"]
[[row_environment]]
agent_name = "talk"
name = "chat"
max_turns = 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_in(folder)


def mixed(folder: Path, text: str = MORE) -> Config:
    return config_of(folder, text)


def test_a_row_names_its_environment(folder: Path, tokenizer: Tokenizer) -> None:
    environments = Environments(mixed(folder), tokenizer)
    chosen = {name: environments.find({"agent_name": name}) for name in ("calculate", "talk", "", None)}
    assert [len(chosen[name].tools) for name in ("calculate", "talk")] == [1, 0]
    assert isinstance(chosen[""], SingleTurn) and chosen[""] is chosen[None] is environments.find({"prompt": "2+2="})
    with pytest.raises(BadPrompt, match=r"agent_name: 'walk' is the agent_name of no .*: calculate, talk"):
        environments.find({"agent_name": "walk"})
    assert isinstance(Environments(config_of(folder), tokenizer).find({"agent_name": "walk"}), SingleTurn)


def test_counters_are_sums_of_all(folder: Path, tokenizer: Tokenizer) -> None:
    environments = Environments(mixed(folder), tokenizer)
    for name in ("calculate", "talk"):
        counts = environments.find({"agent_name": name}).counts
        counts.turns += 2
    assert environments.counts() == {**dict.fromkeys(Counts.__struct_fields__, 0), "turns": 4}
    assert Environments(config_of(folder), tokenizer).counts() == {}


def test_the_buffer_accepts_what_any_of_them_sends(folder: Path) -> None:
    limits = sample_limits(mixed(folder), 300, guest=True)
    assert (limits.sequences, limits.prompt_tokens, limits.scores) == (5, 500, False)
    own = mixed(folder, '[[row_environment]]\nagent_name = "g"\nname = "mine:Guess"\n')
    assert sample_limits(own, 300, guest=True).scores
    assert sample_limits(config_of(folder), 300, guest=True).sequences == 1


def test_producers_inherit_the_variables_of_all(folder: Path) -> None:
    assert inherited_names("producer", mixed(folder)) == ("A_KEY", "B_KEY")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('agent_name = ""\nname = "chat"\n', "agent_name = '': it is a text that no other"),
        ('agent_name = "a"\nname = "tools"\n', "without row_environment[0].tools"),
        ('agent_name = "a"\ntools = ["calculator"]\n', "row_environment[0].tools: name another"),
        ('name = "chat"\n', "row_environment[0].agent_name is required"),
        ('agent_name = "a"\n[[row_environment]]\nagent_name = "a"\n', "agent_name = 'a': it is a text that no"),
        (
            'agent_name = "a"\nname = "agent"\nagent = {command = ["x"], port = 9}\n'
            '[[row_environment]]\nagent_name = "b"\nname = "agent"\nagent = {command = ["x"], port = 9}\n',
            "two environments have an endpoint at port 9",
        ),
    ],
)
def test_wrong_settings_are_said(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        mixed(folder, f"[[row_environment]]\n{text}")
    [error] = caught.value.errors
    assert said in error.message and error.where.startswith("<toml>:")


def test_an_environment_that_cannot_be_built_names_its_table(folder: Path, tokenizer: Tokenizer) -> None:
    config = mixed(folder, '[[row_environment]]\nagent_name = "a"\nname = "nothing:here"\n')
    with pytest.raises(ConfigError) as caught:
        Environments(config, tokenizer)
    assert caught.value.where.startswith("row_environment[0].name")


def test_rows_without_a_name_need_a_reward(folder: Path) -> None:
    text = (
        '[model]\npath = "m"\n[data]\npath = "rows.jsonl"\n[[row_environment]]\nagent_name = "a"\nname = "mine:Game"\n'
    )
    with pytest.raises(ConfigErrors, match=r"no \[\[reward\]\]"):
        parse(text)
    parse(f'{text}\n[environment]\nname = "mine:Other"\n')


def test_a_test_plays_the_environment_with_a_name(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": name, "agent_name": name}) + "\n" for name in ("", "talk")))
    base = mixed(folder)
    base = replace(base, data=replace(base.data, path=str(rows)))
    config = contract_test.config_for("talk", args={}, base=base)
    assert (config.environment.name, config.row_environment, agent_name(config.environment)) == ("chat", (), "talk")
    assert contract_test._first_row(config, base)["prompt"] == "talk"
    with pytest.raises(ConfigError, match="no row has the agent_name 'calculate'"):
        contract_test._first_row(contract_test.config_for("calculate", args={}, base=base), base)
    assert contract_test.config_for("", args={}, base=base).environment is base.environment


def test_all_of_them_open_and_close(folder: Path, tokenizer: Tokenizer) -> None:
    environments = Environments(mixed(folder), tokenizer)

    async def life() -> None:
        await environments.open()
        await environments.close()

    asyncio.run(asyncio.wait_for(life(), 60))
