"""Names that other trainers (verl, TRL, prime-rl, OpenRLHF) give to our settings: `translations.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@functools.cache
def translation_table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "translations.toml").read_text(encoding="utf-8"))


@functools.cache
def known_trainers() -> tuple[str, ...]:
    """Trainers with known settings."""
    return tuple(name for name in translation_table() if name != "values")


def our_name(key: str) -> str:
    """Our name of another trainer's full name, such as `trainer.optim.lr`; empty if it is unknown."""
    return next((found for name in known_trainers() if (found := translation_table()[name]["settings"].get(key))), "")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a tree and their values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
