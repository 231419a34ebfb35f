"""`asyncrl diff A B`: where two configurations differ, by what they come to, not by how they are written.

Guarantees:
1. defaults, presets and derived settings are resolved before: two ways to write the same are no difference;
2. A and B are TOML files or run folders (their `config.toml`); nothing that they name is looked at;
3. the exit code is 0 without a difference, 1 with one, 2 where one cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config import Config, ModelConfig, all_keys, load, redacted
from asyncrl.config.loading import with_derived
from asyncrl.runtime.run_dir import RunDir


class Difference(NamedTuple):
    """One setting: its dotted key and both values; `default` says which of them nobody set otherwise."""

    key: str
    left: Any
    right: Any

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]


def read(path: Path) -> Config:
    """The configuration of a file or of a run, without passwords. Raises `run.missing`, or ConfigErrors."""
    return redacted(load(RunDir(path).require().config if path.is_dir() else path))


def differences(left: Config, right: Config) -> Iterator[Difference]:
    """Of all settings, in the order of the configuration; of rewards and other lists of tables one by one."""
    lists = [name for name in Config.__struct_fields__ if isinstance(getattr(left, name), tuple)]
    for key in all_keys():
        if key.partition(".")[0] not in lists:
            one, other = value_of(left, key), value_of(right, key)
            if one != other:
                yield Difference(key, one, other)
    for name in lists:
        yield from _of_lists(name, getattr(left, name), getattr(right, name))


def _of_lists(name: str, left: Sequence[Any], right: Sequence[Any]) -> Iterator[Difference]:
    for index in range(max(len(left), len(right))):
        pair = [msgspec.to_builtins(side[index]) if index < len(side) else {} for side in (left, right)]
        for key in dict.fromkeys([*pair[0], *pair[1]]):
            if pair[0].get(key) != pair[1].get(key):
                yield Difference(f"{name}[{index}].{key}", pair[0].get(key), pair[1].get(key))


def value_of(config: Config, dotted: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def text_of(found: list[Difference], default: Config | None) -> str:
    """Grouped by section: `key  left -> right`."""
    lines = []
    width = max((len(one.key.rpartition(".")[2]) for one in found), default=0)
    for section, group in groupby(found, key=lambda one: one.section):
        lines.append(f"[{section}]")
        for one in group:
            leaf = one.key.rpartition(".")[2]
            lines.append(f"  {leaf:<{width}}  {_shown(one.left, one, default)} -> {_shown(one.right, one, default)}")
    return "\n".join(lines)


def _shown(value: Any, one: Difference, default: Config | None) -> str:
    if value is None:
        return "-"
    text = msgspec.json.encode(value).decode()
    plain = default is not None and "[" not in one.key and value_of(default, one.key) == value
    return f"{text} (default)" if plain else text


def diff_command(left: Path, right: Path, *, as_json: bool = False) -> int:
    """Print the differences; 1 where there are any."""
    one, other = read(left), read(right)
    found = list(differences(one, other))
    if as_json:
        told = [{"key": each.key, "left": each.left, "right": each.right} for each in found]
        print(json.dumps(msgspec.to_builtins(told), indent=2))
    elif found:
        print(f"{left} -> {right}: {len(found)} setting{'s' * (len(found) != 1)} differ{'s' * (len(found) == 1)}")
        print(text_of(found, with_derived(Config(model=ModelConfig(path=one.model.path)))))
    else:
        print(f"{left} and {right} come to the same")
    return 1 if found else 0
