"""Result of a probe. Only the standard library: every probe's process imports it."""

from __future__ import annotations

from typing import NamedTuple

OK, WARN, MISSING, WRONG = "ok", "warn", "missing", "wrong"


class Found(NamedTuple):
    """One finding: state, observation, and remedy (empty if none is needed)."""

    state: str  # ok, warn (works, and may surprise), missing (optional), wrong (must be fixed)
    says: str
    remedy: str = ""
