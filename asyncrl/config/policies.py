"""`[policies.NAME]`: several policies in one file, each a run of its own.

A file with `[policies]` stands for one configuration per policy: the rest of the file, with the tables of
`[policies.NAME]` on top. Guarantees:
1. the result is an ordinary configuration: its run has the folder `run.dir/NAME`, and `run.other_policies` says where
   the runs of the others are;
2. `--set KEY=VALUE` is for every policy, `--set policies.NAME.KEY=VALUE` for one;
3. an error names the line in `[policies.NAME]` if the value stands there.

Example: `[policies.second.buffer] max_staleness = 2` sets `buffer.max_staleness` of the policy `second` alone.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.locations import Places
from asyncrl.config.presets import merge_trees
from asyncrl.config.sections.run import RunConfig
from asyncrl.errors import ConfigError, ConfigErrors, near_miss

TABLE = "policies"
KEY = "run.policy"
NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
OWN = (KEY, "run.other_policies")  # settings that follow from the name


def policy_names(paths: Path | Sequence[Path], overrides: Iterable[str] = ()) -> list[str]:
    """The policies of the files in their order; none without `[policies]`, or if `--policy` chooses one. Files that
    cannot be read have none: loading them reports that.
    """
    if any(override.partition("=")[0].strip() == KEY for override in overrides):
        return []
    names: dict[str, None] = {}
    for path in [paths] if isinstance(paths, Path) else paths:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get(TABLE)
        except (OSError, ValueError):
            return []
        names |= dict.fromkeys(table) if isinstance(table, dict) else {}
    return list(names)


def choose_policy(
    tree: dict[str, Any], places: Places, overrides: Sequence[str]
) -> tuple[dict[str, Any], Sequence[str]]:
    """The settings and overrides of the policy that `run.policy` names; both as they are without `[policies]`.

    Raises:
        ConfigErrors: a table is wrong, or no policy or an unknown one is named.
    """
    if TABLE not in tree:
        return tree, overrides
    tree = dict(tree)
    tables = tree.pop(TABLE)
    _check_tables(tables, places)
    name = _choose(tree, tables, places, overrides)
    mine, left = f"{TABLE}.{name}.", list[str]()
    for override in overrides:
        if not override.startswith(f"{TABLE}."):
            left.append(override)
        elif override.startswith(mine):
            left.append(override.removeprefix(mine))
        elif override.split(".")[1] not in tables:
            raise ConfigErrors(
                [ConfigError("config.unknown_key", f"{override}: {_name_policies(tables)}", where="--set")]
            )
    tree = merge_trees(tree, tables[name])
    places.prefer(mine)
    return _name_runs(tree, tables, name, left)


def _check_tables(tables: Any, places: Places) -> None:
    found: list[Any] = []
    if not isinstance(tables, Mapping) or not tables:
        found.append(ConfigError("config.type", "it holds a table for each policy", where=places.where((TABLE,))))
    for name, table in tables.items() if isinstance(tables, Mapping) else ():
        where = places.where((TABLE, name))
        if not isinstance(table, Mapping):
            found.append(ConfigError("config.type", f"{TABLE}.{name} is a table of sections", where=where))
        elif not NAME.fullmatch(name):
            what = f"{name!r} is no name of a policy: letters, digits and _"
            found.append(ConfigError("config.type", what, where=where))
        elif isinstance(run := table.get("run", {}), Mapping) and "dir" in run:
            what = f"{TABLE}.{name}.run.dir: the folder of a policy is run.dir/{name}"
            found.append(ConfigError("config.conflict", what, where=places.where((TABLE, name, "run", "dir"))))
    if found:
        raise ConfigErrors(found)


def _choose(tree: Mapping[str, Any], tables: Mapping[str, Any], places: Places, overrides: Sequence[str]) -> str:
    run = tree.get("run")
    chosen = [override.partition("=")[2].strip() for override in overrides if override.partition("=")[0].strip() == KEY]
    name = chosen[-1].strip("\"'") if chosen else str(run.get("policy") or "") if isinstance(run, Mapping) else ""
    if not name:
        raise ConfigErrors([choice_error(list(tables), where=places.where((TABLE,)))])
    if name not in tables:
        near, hint = near_miss(name, tables)
        where = f"--set {KEY}" if chosen else places.where(("run", "policy"))
        raise ConfigErrors(
            [ConfigError("usage", f"{name!r}: {_name_policies(tables)}{hint}", where=where, suggestion=near)]
        )
    return name


def choice_error(names: Sequence[str], *, where: str) -> ConfigError:
    """The error of a command that works on one policy and was given several."""
    what = f"there are several policies: {', '.join(names)}; this command works on one"
    return ConfigError("usage", what, where=where, remedy=f"add --policy {names[0]}")


def _name_policies(tables: Iterable[str]) -> str:
    return f"the policies are {', '.join(tables)}"


def _name_runs(
    tree: dict[str, Any], names: Iterable[str], name: str, overrides: Sequence[str]
) -> tuple[dict[str, Any], Sequence[str]]:
    """Add the policy to the run's name and folder, and the folders of the others."""
    run = tree.setdefault("run", {})
    if not isinstance(run, dict):  # the reader reports it
        return tree, overrides
    given = {key: str(run.get(key, getattr(RunConfig(), key))) for key in ("dir", "name")}
    left = list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        if (own := key.strip().removeprefix("run.")) in given and key.strip().startswith("run."):
            given[own] = value.strip().strip("\"'")
        elif key.strip() not in OWN:
            left.append(override)
    root = Path(os.path.expanduser(given["dir"])).resolve()
    run |= {"policy": name, "name": f"{given['name']}-{name}", "dir": str(root / name)}
    run["other_policies"] = {other: str(root / other) for other in names if other != name}
    return tree, left
