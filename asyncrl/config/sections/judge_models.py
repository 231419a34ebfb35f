"""Judges that are models: what of a `[[judge]]` contradicts itself, and which folders and files it names.

Part of `asyncrl.config` (`problems`) and of `asyncrl.preflight.check` (`check_models`, which looks at files). A
reward of such a
judge has no function: the model's score is the reward. A failing judge never gives 0.

Example: `[[judge]]` with `name = "grader"`, `kind = "url"`, `url = "http://127.0.0.1:8000/v1"`, `model = "big"`,
`prompt = "Grade from 0 to 10.\\n{prompt}\\n{response}"`, and `[[reward]]` with `judge = "grader"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from asyncrl.errors import AsyncRLError, ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.config.sections.judge import JudgeConfig

Problem = tuple[str, str]  # key of the table, what is wrong with it


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
    kinds = {table.name: table for table in config.judge}
    for index, table in enumerate(config.judge):
        for key, message in problems_of(table):
            yield "config.conflict", f"judge.{key}: {message}", ("judge", f"[{index}]", key)
    for index, reward in enumerate(config.reward):
        judge = kinds.get(reward.judge)
        path = ("reward", f"[{index}]", "function")
        if judge is not None and judge.is_model and reward.function:
            yield (
                "config.conflict",
                f"judge {judge.name!r} is a model (kind = {judge.kind!r}): its score is the "
                "reward, leave reward.function out",
                path,
            )
        if not reward.function and (judge is None or not judge.is_model):
            yield ("config.missing", "reward.function is required: only a reward whose judge is a model has none", path)


def problems_of(table: JudgeConfig) -> Iterator[Problem]:
    """What contradicts itself in one judge."""
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
    if "response" not in fields_of(table.prompt):
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


FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def fields_of(template: str) -> tuple[str, ...]:
    """The names in braces; other braces, such as those of JSON, are text.

    >>> fields_of('{prompt} and {response}, as {"score": 3}')
    ('prompt', 'response')
    """
    return tuple(FIELD.findall(template))


def check_models(config: Config) -> Iterator[AsyncRLError]:
    """The folders and key files that judges name are there."""
    for table in config.judge:
        where = f"judge {table.name!r}"
        if table.kind in ("classifier", "generative"):
            folder = Path(table.model)
            if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
                yield ConfigError("config.model", f"{table.model!r} has no config.json or no weights", where=where)
        if table.api_key_file and not Path(table.api_key_file).is_file():
            yield ConfigError("config.file", f"api_key_file {table.api_key_file!r} is missing", where=where)
