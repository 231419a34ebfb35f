"""What a probe says. Standard library alone: every probe's process imports it."""

from __future__ import annotations

from typing import NamedTuple

OK, WARN, MISSING, WRONG = "ok", "warn", "missing", "wrong"


class Found(NamedTuple):
    """One finding: its state, what was seen, and what to do about it (empty where nothing is to do)."""

    state: str  # ok, warn (works, and may surprise), missing (optional, not there), wrong (it must be mended)
    says: str
    remedy: str = ""
