"""Translates the settings of a run of verl, TRL, prime-rl, OpenRLHF, AReaL or slime, from its files.

Guarantees:
1. nothing is run: see `reading`;
2. every setting is either translated or reported in a note, with a reason if it is known;
3. plain names come from `translations.toml`; values that depend on several settings are computed by the module of the
   trainer. A setting whose value has another type here is reported.

Example: `data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=32` -> `buffer.batch_groups = 128`,
`learner.algorithm.minibatches = 4`.
"""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config import Config
from asyncrl.config.sections.algorithm_catalogue import entry, option_types
from asyncrl.config.suggestions import known_trainers, reason_left_out, section_type, translation_table
from asyncrl.configure.translate import areal, openrlhf, prime_rl, slime, trl, verl
from asyncrl.configure.translate.given import Given, Values
from asyncrl.configure.translate.reading import read_settings
from asyncrl.errors import ConfigError

TRAINERS: dict[str, Callable[[Given], None]] = {
    "verl": verl.take,
    "trl": trl.take,
    "prime-rl": prime_rl.take,
    "openrlhf": openrlhf.take,
    "areal": areal.take,
    "slime": slime.take,
}
UNKNOWN = "a variable that the file does not set"
#: Values that mean "not set", in addition to None and -1.
UNSET: tuple[Any, ...] = ("", [], {}, "???")

#: The clip of the other trainers where a run sets none.
CLIP = 0.2


class Translation(NamedTuple):
    """The other trainer, our settings with values, and notes about the rest."""

    trainer: str
    settings: Values
    notes: list[str]


def translate(path: Path) -> Translation:
    """Translate a file. Raises `config.file` if it cannot be read or has no known settings."""
    given, notes = read_settings(path)
    trainer = detect_trainer(given)
    if not trainer and any(note.startswith(("reward_funcs", "train_dataset")) for note in notes):
        trainer = "trl"  # a trainer whose settings come from a command line
    if not trainer:
        raise ConfigError(
            "config.file",
            f"no settings of {', '.join(known_trainers())} are in it",
            where=str(path),
            remedy="give the launch script, the Python file, the YAML or the TOML of such a run",
        )
    settings, more = translate_settings(trainer, given)
    return Translation(trainer, settings, notes + more)


def detect_trainer(given: Mapping[str, Any]) -> str:
    """The trainer that knows most of the names; empty if none knows any."""
    known = {}
    for name in known_trainers():
        table = translation_table()[name]
        names = {*table["settings"], *table.get("older", {})}
        # first by what is translated: `nothing` only tells apart trainers that share flags
        known[name] = sum(key in names for key in given) and sum(
            key in names or key in table["nothing"] for key in given
        )
    best = max(known, key=lambda name: known[name])
    return best if known[best] else ""


def translate_settings(trainer: str, theirs: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Our settings, and notes about the rest."""
    names = translation_table()[trainer]["settings"]
    given = Given(trainer, theirs)
    TRAINERS[trainer](given)
    for key, value in given.left.items():
        if value is None or value in UNSET or (isinstance(value, int | float) and value == -1):
            continue
        if key not in names:
            given.note(key, value, reason_left_out(given.called[key], trainer) or "not translated")
        elif names[key] in given.settings:
            if convert_value(names[key], value) != given.settings[names[key]]:
                given.note(key, value, f"{names[key]} = {given.settings[names[key]]!r} is already set by another name")
        else:
            ours = convert_value(names[key], value)
            if ours != value and "$" in str(value):
                given.notes.append(
                    f"{given.called[key]} = {value!r}: the variable is not set here; {ours!r} is written"
                )
            if fits(names[key], ours):
                given.settings[names[key]] = ours
            else:
                given.note(key, value, UNKNOWN if "$" in str(value) else f"no value of {names[key]}")
    wrong = [key for key, value in given.settings.items() if not fits(key, value)]
    given.notes += [f"{key} = {given.settings.pop(key)!r}: no value of this setting, or {UNKNOWN}" for key in wrong]
    _derive_settings(given.settings, given.notes)
    return given.settings, given.notes


def _derive_settings(settings: Values, notes: list[str]) -> None:
    """Settings that follow from several others, for any trainer."""
    if settings.get("data.epochs") and settings.get("learner.steps"):
        epochs = settings.pop("data.epochs")  # if both are set, the steps count, as in the other trainers
        notes.append(f"data.epochs = {epochs}: learner.steps counts")
    _set_loss_options(settings, notes)
    if "learner.algorithm.clip_low" in settings:
        settings.setdefault("learner.algorithm.clip_high", settings["learner.algorithm.clip_low"])
    if settings.get("learner.algorithm.advantage") == "remax":
        settings["sampling.greedy_baseline"] = True
    _set_ranks(settings)
    if "learner.algorithm.kl.where" not in settings:
        for key in [key for key in settings if key.startswith("learner.algorithm.kl.")]:
            notes.append(f"{key} = {settings.pop(key)!r}: no KL divergence is used")


def _set_loss_options(settings: Values, notes: list[str]) -> None:
    """Give the loss only options that it has, its clip included: `clip_low` and `clip_high` are of the PPO losses."""
    table, loss = "learner.algorithm.loss_options", settings.get("learner.algorithm.loss", "")
    found, known = entry("loss", loss), option_types()["loss"].get(loss)
    if found is None or known is None:
        return
    options: Values = settings.pop(table, {})
    if not found.clip:
        low = settings.get("learner.algorithm.clip_low", CLIP)
        clips = {"clip_low": low, "clip_high": settings.get("learner.algorithm.clip_high", low)}
        for name, clip in clips.items():
            value = settings.pop(f"learner.algorithm.{name}", None)
            if name in known:
                options.setdefault(name, clip)
            elif value is not None:
                notes.append(f"learner.algorithm.{name} = {value!r}: the loss {loss} has no clip")
    for name in sorted(set(options) - set(known)):
        notes.append(f"{table}.{name} = {options.pop(name)!r}: the loss {loss} has no such option")
    if options:
        settings[table] = options


def _set_ranks(settings: Values) -> None:
    """The least number of ranks that the parts of the model need, if the given one does not do."""
    parts = ("tensor", "expert", "pipeline", "sequence")
    found = [settings.get(f"learner.parallel.{part}", 1) for part in parts]
    tensor, expert, pipeline, sequence = (size if isinstance(size, int) and size > 0 else 1 for size in found)
    if settings.get("learner.backend") == "megatron":
        least = pipeline * math.lcm(tensor, expert)
    else:
        least = tensor * sequence * expert
    if settings.get("learner.ranks", 1) % least:
        settings["learner.ranks"] = least


def convert_value(key: str, value: Any) -> Any:
    """The value in the type of our setting."""
    if key.endswith((".path", ".dir")):  # a variable that the script does not set: the rest of the path
        return ", ".join(re.sub(r"^\$[^/]*/", "", str(one)) for one in (value if isinstance(value, list) else [value]))
    if key == "learner.lora.target_modules" and isinstance(value, str):
        return [] if value == "all-linear" else [value]
    if isinstance(value, str):
        return translation_table()["values"].get(key, {}).get(value, value)
    if key == "learner.gradient_checkpointing":
        return bool(value)
    return value


@functools.cache
def _type_of(key: str) -> Any:
    hint: Any = Config
    for part in key.split("."):
        hint = typing.get_type_hints(section_type(hint), include_extras=True)[part]
    return hint


def fits(key: str, value: Any) -> bool:
    """Whether the value has the type of our setting."""
    try:
        msgspec.convert(value, _type_of(key))
    except msgspec.ValidationError:
        return False
    return "$" not in str(value)
