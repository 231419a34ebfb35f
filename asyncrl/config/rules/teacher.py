"""Rules of `[[teacher]]` and `[learner.distillation]`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.rules.judge import NAME
from asyncrl.config.sections.reward import SHOWN_DEFAULT

if TYPE_CHECKING:
    from asyncrl.config.sections.teacher import TeacherConfig
    from asyncrl.config.tree import Config


def problems(config: Config) -> Iterator[Conflict]:
    if not config.teacher:
        return
    yield from _table_problems(config)
    yield from _overlaps(config)
    yield from _run_problems(config)
    yield from _loss_problems(config)


def _table_problems(config: Config) -> Iterator[Conflict]:
    taken = [SHOWN_DEFAULT, *(judge.name for judge in config.judge)]
    for index, table in enumerate(config.teacher):
        if not re.fullmatch(NAME, table.name) or table.name in taken:
            what = "it begins with a letter, has letters, digits and _ alone, and no judge or other teacher has it"
            yield conflict(f"teacher[{index}].name", f"teacher.name = {table.name!r}: {what}")
        taken.append(table.name)
        for key, what in _server_problems(table):
            yield conflict(f"teacher[{index}].{key}", f"teacher.{key}: {what}")
        if table.url and config.sampling.temperature != 1:
            what = f"a server gives log-probs at temperature 1, sampling.temperature is {config.sampling.temperature:g}"
            yield conflict(f"teacher[{index}].url", what)
        if table.url and table.api == "openai" and config.learner.distillation.loss == "jsd":
            what = "the interface names no token ids: learner.distillation.loss = 'jsd' needs api = 'vllm' or 'sglang'"
            yield conflict(f"teacher[{index}].api", what)


def _server_problems(table: TeacherConfig) -> Iterator[tuple[str, str]]:
    parsed = urlparse(table.url)
    if table.url and not (parsed.scheme in ("http", "https") and parsed.hostname):
        yield "url", f"{table.url!r} is not http:// or https://"
    elif parsed.username or parsed.password:
        yield "url", "a secret in the address would stand in logs: use api_key_env or api_key_file"
    if not table.url and (table.api_key_env or table.api_key_file):
        yield "url", "api_key_* are for a server"
    if table.api_key_env and table.api_key_file:
        yield "api_key_env", "set at most one of api_key_env and api_key_file"


def _overlaps(config: Config) -> Iterator[Conflict]:
    """Two teachers of one row."""
    for index, table in enumerate(config.teacher):
        for other in config.teacher[:index]:
            shared = set(table.data_sources) & set(other.data_sources)
            if shared or not (table.data_sources and other.data_sources):
                rows = f"rows of {', '.join(sorted(shared))}" if shared else "the same rows"
                what = f"teachers {other.name!r} and {table.name!r} both teach {rows}: a row has one teacher"
                yield conflict(f"teacher[{index}].data_sources", what)


def _run_problems(config: Config) -> Iterator[Conflict]:
    if config.learner.mode != "rl":
        yield conflict(
            "teacher", f"teachers read samples of the policy: learner.mode = {config.learner.mode!r} has none"
        )
    if config.sampling.wants_support:
        what = f"{config.sampling.cut} cuts what the policy draws from, and a teacher tells log-probs of all tokens"
        yield conflict("teacher", f"{what}: sample without a cut")
    if config.reward:
        return
    if several := [one.name for one in config.environments if not one.is_single_turn]:
        what = f"environment.name = {several[0]!r} without a [[reward]] scores its samples itself"
        yield conflict("teacher", f"{what}; teachers read samples that wait for a score: add a [[reward]]")
    if config.evaluation.enabled:
        what = (
            "an evaluation measures a reward, and without [[reward]] there is none: add one, with weight = 0 if need be"
        )
        yield conflict("evaluation", what)
    for name in config.buffer.filters:
        if name in ("zero_variance", "accuracy_band"):
            what = f"without [[reward]] all rewards are 0, and buffer.filters = {name!r} drops every group"
            yield conflict("buffer.filters", what)


def _loss_problems(config: Config) -> Iterator[Conflict]:
    learner = config.learner
    if learner.distillation.loss != "jsd":
        return
    if learner.backend != "fsdp2":
        what = f"learner.backend = {learner.backend!r} gives log-probs of sampled tokens alone"
        yield conflict("learner.distillation.loss", f"{what}: loss = 'reverse_kl', or backend = 'fsdp2'")
    for name in ("tensor", "sequence"):
        if getattr(learner.parallel, name) > 1:
            what = f"with learner.parallel.{name} > 1 the learner has log-probs of sampled tokens alone"
            yield conflict("learner.distillation.loss", f"{what}: loss = 'reverse_kl'")
