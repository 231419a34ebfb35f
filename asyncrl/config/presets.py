"""Presets: small TOML files with the settings of a published algorithm.

A file names one (`preset = "dapo"` under `[learner.algorithm]`), or the command line does (`--preset dapo`).
Guarantees:
1. a preset holds only settings of the configuration, so its file shows everything that it sets;
2. settings of the user's file override a preset that the file names; a preset of the command line overrides the file;
   `--set` overrides both;
3. if the user chooses another advantage, loss or correction than the preset, the preset's options for it are left out.

Example: `preset = "dapo"` and `clip_high = 0.3` in a file: DAPO with 0.3.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, near_miss

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "presets"
KEY = "learner.algorithm.preset"
KINDS = ("advantage", "loss", "correction")

Tree = dict[str, Any]


def names() -> list[str]:
    """Names of the presets in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_preset(name: str) -> Tree:
    """The settings of a preset, by name or as the path of a .toml. Raises `config.preset`."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config.preset", str(error), where=str(path)) from None
    except OSError as error:
        if name.endswith(".toml"):
            raise ConfigError("config.preset", error.strerror or str(error), where=str(path)) from None
        near, hint = near_miss(name, names())
        said = f"no preset {name!r}: one of {', '.join(names())}{hint}"
        raise ConfigError("config.preset", said, suggestion=near) from None


def apply_preset(tree: Tree, overrides: Mapping[str, Any]) -> tuple[Tree, Tree]:
    """The tree with its preset applied, and the preset's own settings (for error messages); both empty without a
    preset.

    `overrides`: dotted key -> value of the command line; only `learner.algorithm.*` is used.
    """
    ordered, named = overrides.get(KEY), _algorithm(tree).get("preset")
    name = named if ordered is None else ordered
    if not isinstance(name, str) or not name:
        return tree, {}
    chosen = {kind: overrides[key] for kind in KINDS if (key := f"learner.algorithm.{kind}") in overrides}
    if ordered is None:
        chosen = {kind: _algorithm(tree)[kind] for kind in KINDS if kind in _algorithm(tree)} | chosen
    preset = _drop_other_choices(load_preset(name), chosen)
    if ordered is None:
        return merge_trees(preset, tree), preset
    # options of the file for another choice than the preset's do not fit the preset's
    mine = {kind: _algorithm(preset)[kind] for kind in KINDS if kind in _algorithm(preset)}
    return merge_trees(_drop_other_choices(tree, mine), preset), preset


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
