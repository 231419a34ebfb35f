"""The chapter on the set-up: configuration against its defaults, processes, versions."""

from __future__ import annotations

from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from asyncrl.config import Config, all_keys
from asyncrl.config.json_schema import field_default
from asyncrl.config.suggestions import value_at
from asyncrl.report.data import RunData
from asyncrl.report.html import card, clock, table
from asyncrl.report.svg import short

PACKAGES = (
    "asyncrl",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "msgspec",
    "pyzmq",
    "redis",
    "vllm",
    "sglang",
    "megatron-core",
    "peft",
)


def configuration(data: RunData) -> str:
    """Every setting; changed ones are marked."""
    if data.config is None:
        return card("Configuration", '<p class="none">config.toml cannot be read</p>')
    default = Config(model=type(data.config.model)(path=""))
    rows: list[tuple[str, ...]] = []
    same: list[tuple[str, ...]] = []
    for key in plain_keys():
        value, usual = value_at(data.config, key), value_at(default, key)
        row = (escape(key), escape(repr(value)), escape(repr(usual)))
        (same if value == usual else rows).append(row)
    rows += [(escape(name), escape(words), "-") for name, words in list_repeated(data.config).items()]
    changed = table(("changed setting", "value", "default"), rows, classes=("changed", "changed", "usual"))
    rest = table(("setting", "value (default)"), [row[:2] for row in same])
    return card(
        "Configuration",
        f"{changed}<details><summary>{len(same)} settings have their default</summary>{rest}</details>",
        wide=True,
    )


def plain_keys() -> list[str]:
    """Every setting outside of sections that may repeat (rewards, judges)."""
    several = tuple(f"{item.name}." for item in msgspec.structs.fields(Config) if item.default == ())
    return [key for key in all_keys() if "." in key and not key.startswith(several)]


def list_repeated(config: Config) -> dict[str, str]:
    """Sections that may repeat: `reward[0]` and its changed settings."""
    found = {}
    for item in msgspec.structs.fields(Config):
        if item.default != ():
            continue
        for number, one in enumerate(getattr(config, item.name)):
            values = [(field, getattr(one, field.name)) for field in msgspec.structs.fields(one)]
            changed = [(field, value) for field, value in values if field.required or value != field_default(field)]
            found[f"{item.name}[{number}]"] = ", ".join(f"{field.name} = {value!r}" for field, value in changed)
    return found


def processes(data: RunData) -> str:
    """Every process that worked for the run."""
    last = {name: lines[-1] for name, lines in data.roles.items()}
    rows = []
    for line in data.processes:
        beat = last.get(str(line.get("name")), {})
        same = beat.get("pid") == line.get("pid")
        what = ", ".join(
            f"{key.replace('_', ' ')} {short(float(beat[key]))}"
            for key in ("generated_tokens", "scored_samples", "swaps")
            if same and key in beat
        )
        rows.append(
            (
                escape(str(line.get("role"))),
                escape(str(line.get("name"))),
                escape(str(line.get("pid"))),
                escape(str(line.get("host"))),
                clock(line.get("t")),
                escape(what),
            )
        )
    return card(
        "Processes",
        table(
            ("role", "name", "pid", "host", "started", "did"),
            rows,
            classes=("short", "short", "short number", "short", "short"),
        ),
    )


def versions(data: RunData) -> str:
    """Python, packages and the machine."""
    import platform

    rows = [("python", platform.python_version()), ("system", platform.platform())]
    for name in PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            continue
    rows.append(("run folder", str(Path(data.run.root))))
    return card(
        "Versions",
        table(("what", "version"), [(escape(a), escape(b)) for a, b in rows], classes=("short",)),
        note="of the environment that wrote this report",
    )
