"""`asyncrl diff A B`: the differences of two configurations by their values.

Guarantees:
1. defaults, presets and derived settings are resolved first: two ways to write the same values are equal;
2. A and B are TOML files or run folders (their `config.toml`); files that they name are not read;
3. the exit code is 0 without a difference, 1 with one, 2 if a configuration cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config import Config, ModelConfig, all_keys, load, redact
from asyncrl.config.loading import derive_settings
from asyncrl.config.suggestions import value_at
from asyncrl.runtime.run_dir import RunDir, format_json


class Difference(NamedTuple):
    """One setting: its dotted key and both values; `default` tells which of them is the default."""

    key: str
    left: Any
    right: Any

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]


def read(path: Path) -> Config:
    """The configuration of a file or of a run, without passwords. Raises `run.missing`, or ConfigErrors."""
    return redact(load(RunDir(path).require().config if path.is_dir() else path))


def differences(left: Config, right: Config) -> Iterator[Difference]:
    """Differences of all settings, in the order of the configuration; lists of tables are compared item by item."""
    lists = [name for name in Config.__struct_fields__ if isinstance(getattr(left, name), tuple)]
    for key in all_keys():
        if key.partition(".")[0] not in lists:
            one, other = value_at(left, key), value_at(right, key)
            if one != other:
                yield Difference(key, one, other)
    for name in lists:
        yield from _list_differences(name, getattr(left, name), getattr(right, name))


def _list_differences(name: str, left: Sequence[Any], right: Sequence[Any]) -> Iterator[Difference]:
    for index in range(max(len(left), len(right))):
        pair = [msgspec.to_builtins(side[index]) if index < len(side) else {} for side in (left, right)]
        for key in dict.fromkeys([*pair[0], *pair[1]]):
            if pair[0].get(key) != pair[1].get(key):
                yield Difference(f"{name}[{index}].{key}", pair[0].get(key), pair[1].get(key))


def format_differences(found: list[Difference], default: Config | None) -> str:
    """Grouped by section: `key  left -> right`."""
    lines = []
    width = max((len(one.key.rpartition(".")[2]) for one in found), default=0)
    for section, group in groupby(found, key=lambda one: one.section):
        lines.append(f"[{section}]")
        for one in group:
            leaf = one.key.rpartition(".")[2]
            left, right = (_format_value(value, one, default) for value in (one.left, one.right))
            lines.append(f"  {leaf:<{width}}  {left} -> {right}")
    return "\n".join(lines)


def _format_value(value: Any, one: Difference, default: Config | None) -> str:
    if value is None:
        return "-"
    text = msgspec.json.encode(value).decode()
    plain = default is not None and "[" not in one.key and value_at(default, one.key) == value
    return f"{text} (default)" if plain else text


def diff_command(left: Path, right: Path, *, as_json: bool = False) -> int:
    """Print the differences; 1 if there are any."""
    one, other = read(left), read(right)
    found = list(differences(one, other))
    if as_json:
        print(format_json([each._asdict() for each in found]))
    elif found:
        print(f"{left} -> {right}: {len(found)} setting{'s' * (len(found) != 1)} differ{'s' * (len(found) == 1)}")
        print(format_differences(found, derive_settings(Config(model=ModelConfig(path=one.model.path)))))
    else:
        print(f"{left} and {right} come to the same")
    return 1 if found else 0
