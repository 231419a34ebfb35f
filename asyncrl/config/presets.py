"""Named presets: small TOML files with the settings that make up a published algorithm.

A file names one (`preset = "dapo"` under `[learner.algorithm]`), or the command does
(`--preset dapo`). Guarantees:
1. a preset holds nothing but settings of the configuration: everything it sets can be read in its file;
2. settings of the user's file win over a preset that the file names; a preset given on the command line wins over the
   file; `--set` wins over both;
3. where the user chooses another advantage, loss or correction than the preset, its options for that one are left out.

Example: `preset = "dapo"` and `clip_high = 0.3` in a file: DAPO with 0.3.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "presets"
KEY = "learner.algorithm.preset"
KINDS = ("advantage", "loss", "correction")

Tree = dict[str, Any]


def names() -> list[str]:
    """The presets that ship."""
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
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        said = f"no preset {name!r}: one of {', '.join(names())}{hint}"
        raise ConfigError("config.preset", said, suggestion=near[0] if near else "") from None


def apply_preset(tree: Tree, overrides: Mapping[str, Any]) -> tuple[Tree, Tree]:
    """The tree with its preset, and the preset's own part of it (for error messages); both empty of it without one.

    `overrides`: dotted key -> value of the command line; only `learner.algorithm.*` is looked at.
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
    # What the file says for another choice than the preset's does not fit the preset's.
    mine = {kind: _algorithm(preset)[kind] for kind in KINDS if kind in _algorithm(preset)}
    return merge_trees(_drop_other_choices(tree, mine), preset), preset


def merge_trees(under: Tree, over: Tree) -> Tree:
    """Both, table by table; `over` wins."""
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
    """The tree without its choices, and their options, where another one was chosen."""
    result = copy.deepcopy(tree)
    section = _algorithm(result)
    for kind, value in chosen.items():
        if section.get(kind, value) != value:
            section.pop(kind, None)
            section.pop(f"{kind}_options", None)
    return result
