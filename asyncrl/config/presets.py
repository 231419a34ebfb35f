"""Presets: small TOML files with the settings of a published algorithm.

A file names one (`preset = "dapo"` under `[learner.algorithm]`), or the command line does (`--preset dapo`).
Guarantees:
1. a preset holds only settings of the configuration, so its file shows everything that it sets. Its table `[recipe]`
   sets nothing: it names the paper, the paper's values that depend on model and data, and differences from the paper;
2. settings of the user's file override a preset that the file names; a preset of the command line overrides the file;
   `--set` overrides both;
3. if the user chooses another advantage, loss or correction than the preset, the preset's options for it are left out;
4. so are the options of the file if `--set` replaces its choice and sets no options;
5. a preset asks for at most as many updates per batch as the batch has groups.

Example: `preset = "dapo"` and `clip_high = 0.3` in a file: DAPO with 0.3.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.sections.buffer import BufferConfig
from asyncrl.errors import ConfigError, near_miss

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "presets"
KEY = "learner.algorithm.preset"
KINDS = ("advantage", "loss", "correction")

Tree = dict[str, Any]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[recipe]` of a preset: where it is from. None: the paper does not state the value."""

    paper: str = ""  # arXiv numbers
    equation: str = ""  # place of the mechanism in the paper
    acts: str = ""  # metric of the learner that shows the mechanism acting
    equals: tuple[str, ...] = ()  # presets whose update differs by a factor alone
    lr: float | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    group_size: int | None = None  # responses of a prompt
    batch_groups: int | None = None  # prompts of a batch
    differs: tuple[str, ...] = ()  # from the paper, with the reason


def names() -> list[str]:
    """Names of the presets in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_preset(name: str) -> Tree:
    """The settings of a preset, by name or as the path of a .toml. Raises `config.preset`."""
    return _read_preset(name)[0]


def load_recipe(name: str) -> Recipe:
    """Where a preset is from, and what its paper recommends. Raises `config.preset`."""
    return _read_preset(name)[1]


def read_title(name: str) -> str:
    """The first line of a preset: what it is."""
    return read_text(name).splitlines()[0].removeprefix("# ")


def read_text(name: str) -> str:
    """The file of a preset, by name or as the path of a .toml. Raises `config.preset`."""
    path = _find_file(name)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        if name.endswith(".toml"):
            raise ConfigError("config.preset", error.strerror or str(error), where=str(path)) from None
        near, hint = near_miss(name, names())
        said = f"no preset {name!r}: one of {', '.join(names())}{hint}"
        raise ConfigError("config.preset", said, suggestion=near) from None


def _find_file(name: str) -> Path:
    return Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"


def _read_preset(name: str) -> tuple[Tree, Recipe]:
    where = str(_find_file(name))
    try:
        tree = tomllib.loads(read_text(name))
        return tree, msgspec.convert(tree.pop("recipe", {}), Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError("config.preset", f"[recipe]: {error}", where=where) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config.preset", str(error), where=where) from None


def apply_preset(tree: Tree, overrides: Mapping[str, Any]) -> tuple[Tree, Tree]:
    """The tree with its preset applied, and the preset's own settings (for error messages); both empty without a
    preset.

    `overrides`: dotted key -> value of the command line; only `learner.algorithm.*` and `buffer.batch_groups` are used.
    """
    ordered, named = overrides.get(KEY), _algorithm(tree).get("preset")
    name = named if ordered is None else ordered
    if not isinstance(name, str) or not name:
        return tree, {}
    chosen = {kind: overrides[key] for kind in KINDS if (key := f"learner.algorithm.{kind}") in overrides}
    if ordered is None:
        chosen = {kind: _algorithm(tree)[kind] for kind in KINDS if kind in _algorithm(tree)} | chosen
    preset = _drop_other_choices(load_preset(name), chosen)
    _limit_updates(preset, tree, overrides)
    if ordered is None:
        return merge_trees(preset, tree), preset
    # options of the file for another choice than the preset's do not fit the preset's
    mine = {kind: _algorithm(preset)[kind] for kind in KINDS if kind in _algorithm(preset)}
    return merge_trees(_drop_other_choices(tree, mine), preset), preset


def _limit_updates(preset: Tree, tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Reduce the preset's updates per batch to the groups that a batch of the user's has."""
    groups = BufferConfig().batch_groups
    for found in (preset, tree):
        buffer = found.get("buffer")
        groups = buffer.get("batch_groups", groups) if isinstance(buffer, dict) else groups
    groups = overrides.get("buffer.batch_groups", groups)
    section = _algorithm(preset)
    if isinstance(groups, int) and 0 < groups < section.get("minibatches", 1):
        section["minibatches"] = groups


def merge_trees(under: Tree, over: Tree) -> Tree:
    """Merge two trees table by table; `over` wins."""
    result = copy.deepcopy(under)
    for key, value in over.items():
        old = result.get(key)
        result[key] = (
            merge_trees(old, value) if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
        )
    return result


def _algorithm(tree: Mapping[str, Any]) -> Tree:
    learner = tree.get("learner")
    found = learner.get("algorithm") if isinstance(learner, dict) else None
    return found if isinstance(found, dict) else {}


def _drop_other_choices(tree: Tree, chosen: Mapping[str, Any]) -> Tree:
    """Remove choices, and their options, that differ from the chosen ones."""
    result = copy.deepcopy(tree)
    section = _algorithm(result)
    for kind, value in chosen.items():
        if section.get(kind, value) != value:
            section.pop(kind, None)
            section.pop(f"{kind}_options", None)
    return result


def drop_options(tree: Tree, overrides: Mapping[str, Any]) -> list[str]:
    """Remove options of a choice that the command line replaces, unless it sets some itself; a note for each table."""
    section, notes = _algorithm(tree), list[str]()
    for kind in KINDS:
        key = f"learner.algorithm.{kind}"
        old, new = section.get(kind), overrides.get(key)
        same = old is None or new is None or old == new or {str(old), str(new)} == {"auto", "tis"}
        if same or any(f"{name}.".startswith(f"{key}_options.") for name in overrides):
            continue
        if options := section.pop(f"{kind}_options", None):
            notes.append(f"{key}_options = {options} is left out: it is of {old}, and --set chooses {new}")
    return notes
