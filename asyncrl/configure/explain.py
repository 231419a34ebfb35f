"""`asyncrl explain NAME`: the meaning of an error code, a metric or a setting.

Guarantees:
1. every code of `asyncrl.errors` has a text: cause, example, remedy (a test names missing ones);
2. every setting has its type, range, default and meaning, every metric its unit and its role;
3. another name is `usage`, with the nearest ones.
"""

from __future__ import annotations

import difflib
import functools
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.config import Config, all_keys
from asyncrl.config.json_schema import describe
from asyncrl.config.suggestions import list_keys, list_sections, synonyms
from asyncrl.errors import CATALOGUE, FINAL_EXIT_CODES, ConfigError
from asyncrl.metrics import CATALOGUE as METRICS
from asyncrl.metrics import OPEN

TEXTS = Path(__file__).parent / "error_texts.toml"
WIDTH = 100


class ErrorText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The longer text of a code."""

    cause: str
    example: str
    do: str


@functools.cache
def error_texts() -> Mapping[str, ErrorText]:
    return msgspec.convert(tomllib.loads(TEXTS.read_text(encoding="utf-8")), dict[str, ErrorText])


def explain_command(name: str) -> int:
    """Print what the name means; without one, all codes."""
    print(explain(name) if name else codes())
    return 0


def codes() -> str:
    """All error codes with their titles."""
    width = max(map(len, CATALOGUE))
    lines = [f"  {code:<{width}}  {info.title}" for code, info in CATALOGUE.items()]
    return "\n".join(["Error codes; names of settings and metrics can be explained too:", *lines])


def explain(name: str) -> str:
    """The text for a code, a setting or a metric. Raises `usage` for other names."""
    name = name.strip().removeprefix("error[").rstrip("]:")
    found = [text for look in (_error, _setting, _section, _metric) if (text := look(name))]
    if not found:
        near = difflib.get_close_matches(name, _names(), n=4, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(
            "usage",
            f"{name!r} is no error code, setting, section or metric{hint}",
            where="explain",
            remedy="asyncrl explain lists the codes; docs/configuration.md and docs/metrics.md the rest",
            suggestion=near[0] if near else "",
        )
    return "\n\n".join(found)


def _names() -> list[str]:
    return [*CATALOGUE, *all_keys(), *list_sections(Config), *METRICS]


def _error(code: str) -> str:
    info = CATALOGUE.get(code)
    if info is None:
        return ""
    lines = [f"{code}: {info.title} (exit code {info.exit_code}, {ending(info.exit_code)})"]
    text = error_texts().get(code)
    if text is None:  # of a plugin
        return "\n".join([*lines, f"  what to do: {info.remedy}"])
    lines += ["", _wrap(text.cause), "", "For example", f"  {text.example}", "", "What to do", _wrap(text.do)]
    return "\n".join(lines)


def ending(exit_code: int) -> str:
    """How a supervisor reacts to an exit code."""
    return "final: it is not started again" if exit_code in FINAL_EXIT_CODES else "restarted within a budget"


def _wrap(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _setting(key: str) -> str:
    if key not in list_keys(Config):
        return ""
    setting = describe(Config, key)
    lines = [f"{key} = {setting.default or 'required'}    ({setting.kind})", _wrap(setting.meaning)]
    others = sorted(theirs for theirs, ours in synonyms("settings").items() if ours == key)
    if others:
        lines.append(f"  elsewhere called: {', '.join(others)}")
    return "\n".join(lines)


def _section(name: str) -> str:
    name = name.strip("[]")
    if name not in list_sections(Config):
        return ""
    keys = [key for key in list_keys(Config) if key.rpartition(".")[0] == name]
    shown = [(key.rpartition(".")[2], describe(Config, key)) for key in keys]
    cells = [(f"{key} = {one.default or 'required'}", one.meaning) for key, one in shown]
    width = min(max((len(cell) for cell, _ in cells), default=0), WIDTH // 2)
    return "\n".join([f"[{name}]", *(f"  {cell:<{width}}  {meaning}".rstrip() for cell, meaning in cells)])


def _metric(name: str) -> str:
    metric = METRICS.get(name)
    if metric is not None:
        return f"{name} [{metric.unit}], written by {metric.role}\n{_wrap(metric.meaning)}"
    family = next((one for one in OPEN if name.startswith(one)), "")
    return f"{name}: of the family {family}*, see docs/metrics.md" if family else ""
