"""How a supervised set of processes ended."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True):
    """How a supervised set of processes ended. `failed` names the process whose end stopped the others."""

    code: int
    reason: str
    wall_s: float
    restarts: dict[str, int] = {}
    failed: str = ""
    last_lines: tuple[str, ...] = ()
    given_up: dict[str, int] = {}  # workers that the run continued without: their last exit code
    stopped: bool = False  # a signal came before the end
