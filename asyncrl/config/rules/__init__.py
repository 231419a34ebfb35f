"""Rules: contradictions between settings, and notes. Each rule states its arithmetic and the key to change."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.config.locations import parse_dotted


class Conflict(NamedTuple):
    """A mistake: code, message, path of the key, and a remedy (empty: that of the code)."""

    code: str
    message: str
    path: tuple[str, ...]
    remedy: str = ""


def conflict(key: str, message: str, *, code: str = "config.conflict") -> Conflict:
    """A mistake at a dotted key."""
    return Conflict(code, message, parse_dotted(key))
