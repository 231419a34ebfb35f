"""Rules of `[[judge]]` and of the rewards that name one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections.reward import SHOWN_DEFAULT, template_fields
from asyncrl.config.tree import Config
from asyncrl.errors import near_miss

if TYPE_CHECKING:
    from asyncrl.config.sections.reward import JudgeConfig
    from asyncrl.config.tree import Config


NAME = r"[A-Za-z][A-Za-z0-9_]{0,31}"


def problems(config: Config) -> Iterator[Conflict]:
    yield from _name_problems(config)
    yield from _model_problems(config)


def _name_problems(config: Config) -> Iterator[Conflict]:
    names = [table.name for table in config.judge]
    for index, table in enumerate(config.judge):
        path = f"judge[{index}].name"
        if not re.fullmatch(NAME, table.name) or table.name == SHOWN_DEFAULT:
            yield conflict(
                path,
                f"judge.name = {table.name!r}: it begins with a letter, has letters, digits and _ alone, and is not "
                f"{SHOWN_DEFAULT!r}",
            )
        if table.name in names[:index]:
            yield conflict(path, f"judge.name = {table.name!r} is there twice")
        if not any(reward.judge == table.name for reward in config.reward):
            yield conflict(path, f"judge {table.name!r} has no reward: no [[reward]] says judge = {table.name!r}")
    for index, reward in enumerate(config.reward):
        if reward.judge and reward.judge not in names:
            hint = near_miss(reward.judge, names)[1] or f"; add [[judge]] with name = {reward.judge!r}"
            yield conflict(f"reward[{index}].judge", f"reward.judge = {reward.judge!r} is no [[judge]]{hint}")


Problem = tuple[str, str]  # key of the table, problem


def _model_problems(config: Config) -> Iterator[Conflict]:
    kinds = {table.name: table for table in config.judge}
    for index, table in enumerate(config.judge):
        for key, message in table_problems(table):
            yield conflict(f"judge[{index}].{key}", f"judge.{key}: {message}")
    for index, reward in enumerate(config.reward):
        judge = kinds.get(reward.judge)
        path = f"reward[{index}].function"
        if judge is not None and judge.is_model and reward.function:
            yield conflict(
                path,
                f"judge {judge.name!r} is a model (kind = {judge.kind!r}): its score is the reward, leave "
                "reward.function out",
            )
        if not reward.function and (judge is None or not judge.is_model):
            yield conflict(
                path,
                "reward.function is required: only a reward whose judge is a model has none",
                code="config.missing",
            )


def table_problems(table: JudgeConfig) -> Iterator[Problem]:
    """Settings of one judge that contradict each other."""
    if not table.is_model:
        if table.model or table.url or table.prompt:
            yield "kind", f"it is {table.kind!r}: model, url and prompt are for classifier, generative or url"
        return
    if not table.model:
        yield "model", "a folder is needed" if table.kind != "url" else "the server's name of the model is needed"
    parsed = urlparse(table.url)
    if table.kind == "url" and not (parsed.scheme in ("http", "https") and parsed.hostname):
        yield "url", f"{table.url!r} is not http:// or https://"
    elif parsed.username or parsed.password:
        yield "url", "a secret in the address would stand in logs: use api_key_env or api_key_file"
    if table.kind != "url" and (table.url or table.api_key_env or table.api_key_file):
        yield "url", f"url and api_key_* are for kind = 'url', this is {table.kind!r}"
    if table.api_key_env and table.api_key_file:
        yield "api_key_env", "set at most one of api_key_env and api_key_file"
    if table.kind == "classifier":
        return
    if table.kind == "generative" and table.answer == "yes_no" and table.engine != "hf":
        yield (
            "answer",
            f"yes_no reads probabilities, which engine {table.engine!r} does not give: engine = 'hf', or a url",
        )
    yield from _answer_problems(table)


def _answer_problems(table: JudgeConfig) -> Iterator[Problem]:
    if "response" not in template_fields(table.prompt):
        yield "prompt", "it needs {response}; {prompt}, {ground_truth} and names of columns may stand there too"
    try:
        groups = re.compile(table.pattern).groups
    except re.error as error:
        yield "pattern", f"no regular expression: {error}"
    else:
        if not groups:
            yield "pattern", "it needs a group, which holds the number"
    if table.range and (len(table.range) != 2 or table.range[0] >= table.range[1]):
        yield "range", f"[lowest, highest] is wanted, not {list(table.range)}"
    if not (table.yes and table.no) or set(table.yes) & set(table.no):
        yield "yes", "yes and no need words, and none in common"
