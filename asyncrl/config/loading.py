"""Reads, checks and writes the configuration.

Guarantees:
1. unknown keys, wrong types, bad values and contradictions are all reported at once, with file, line and a suggestion;
2. the resolved form (`dump`) reads back to the same value, except for passwords.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli_w

from asyncrl.config import reader as config_read
from asyncrl.config import redis_url as redis_secret
from asyncrl.config import suggestions as config_names
from asyncrl.config.locations import Places
from asyncrl.config.paths import settle_paths
from asyncrl.config.rules import (
    algorithm,
    capability,
    general,
    judge,
    learner,
    mode,
    policies,
    services,
    standby,
    teacher,
)
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.base import Section
from asyncrl.config.tree import Config
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError, ConfigErrors

RULES = (general, mode, capability, learner, algorithm, judge, teacher, services, standby, policies)


class Loaded(NamedTuple):
    """The configuration with its mistakes; `config` is None if the mistakes leave nothing to check."""

    config: Config | None
    errors: list[AsyncRLError]
    places: Places
    doubtful: frozenset[str] = frozenset()  # settings with an unknown value, because of a mistake
    notes: tuple[str, ...] = ()


def load(path: Path | Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Load a TOML file, or several from left to right, with `key=value` overrides on top.

    Raises:
        ConfigErrors: every mistake at once.
    """
    return _whole(load_all(path, overrides))


def load_all(path: Path | Sequence[Path], overrides: Sequence[str] = ()) -> Loaded:
    """Like `load`, but returns the mistakes, so that further checks can add theirs."""
    sources, errors = list[config_read.Source](), list[AsyncRLError]()
    for file in [path] if isinstance(path, Path) else path:
        try:
            sources.append(config_read.Source(str(file), file.read_text(encoding="utf-8")))
        except OSError as error:
            errors.append(ConfigError("config.file", f"{error.strerror or error}", where=str(file)))
        except UNREADABLE as error:
            errors.append(ConfigError("config.file", f"it is no UTF-8 text: {error}", where=str(file)))
    return Loaded(None, errors, Places()) if errors else _read(sources, overrides)


def parse(text: str, *, file: str = "<toml>", overrides: Sequence[str] = ()) -> Config:
    """Like `load`, from text."""
    return _whole(_read([config_read.Source(file, text)], overrides))


def _whole(loaded: Loaded) -> Config:
    if loaded.errors or loaded.config is None:
        raise ConfigErrors(loaded.errors)
    return loaded.config


def _read(sources: Sequence[config_read.Source], overrides: Sequence[str]) -> Loaded:
    try:
        tree, places, errors, doubtful, dropped = config_read.read(Config, sources, overrides)
    except ConfigErrors as error:
        return Loaded(None, error.errors, Places())
    try:
        config = derive_settings(msgspec.convert(settle_paths(tree, places), Config))
    except msgspec.ValidationError:
        if not errors:
            raise
        return Loaded(None, errors, places, doubtful)
    config, notes = _prefer_steps(config, places)
    if not doubtful & {"learner.mode", "producers.engine"}:  # most rules depend on them
        errors = errors + config_read.independent_errors(find_conflicts(config, places), doubtful)
    return Loaded(config, errors, places, doubtful, (*dropped, *notes))


def _prefer_steps(config: Config, places: Places) -> tuple[Config, tuple[str, ...]]:
    """`--set learner.steps` counts instead of the epochs of a file; and a note that says so."""
    epochs, given = config.data.epochs, places.overridden
    if not epochs or "learner.steps" not in given or "data.epochs" in given:
        return config, ()
    note = f"data.epochs = {epochs} does not count: --set learner.steps = {config.learner.steps} does"
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, epochs=0)), (note,)


def derive_settings(config: Config) -> Config:
    """Fill in settings that are derived from others if they are 0."""
    derived = algorithms.derive_algorithm(config.learner.algorithm, longest=config.sampling.max_new_tokens)
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, algorithm=derived))


def dump(config: Config) -> str:
    """The resolved configuration as TOML, without passwords; `parse` gives the rest back.

    Settings that are as derived are written as 0: they follow the others if those are changed later.
    """
    longest, algorithm = config.sampling.max_new_tokens, config.learner.algorithm
    plain = algorithms.undo_derivation(algorithm, longest=longest)
    learner = msgspec.structs.replace(config.learner, algorithm=plain)
    return tomli_w.dumps(msgspec.to_builtins(redact(msgspec.structs.replace(config, learner=learner))))


def redact(config: Config) -> Config:
    """The configuration with `***` instead of the password of Redis."""
    buffer = msgspec.structs.replace(config.buffer, redis_url=redis_secret.hide_password(config.buffer.redis_url))
    return msgspec.structs.replace(config, buffer=buffer)


def schema() -> dict[str, Any]:
    """JSON schema of the file for editors, with the meaning of every setting."""
    from asyncrl.config.json_schema import build_schema

    return build_schema(Config)


def all_keys(kind: type[Section] = Config, prefix: str = "") -> list[str]:
    """Every dotted key, in order."""
    return list(config_names.list_keys(kind, prefix))


def find_conflicts(config: Config, places: Places | None = None) -> Iterable[AsyncRLError]:
    """Settings that contradict each other, with the arithmetic."""
    where = places or Places()
    for rule in () if config.service.port else RULES:  # a training service has none of the settings that they compare
        for code, message, path, remedy in rule.problems(config):
            meant = re.search(r"did you mean '?([\w.]+)'?\?", message)
            suggestion = meant[1] if meant else ""
            yield ConfigError(code, message, where=where.where(path), remedy=remedy, suggestion=suggestion)
