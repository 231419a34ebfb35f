"""Checkpoints that one rank writes, for the layouts of `ranks` that load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_contract as contract

from learners.gang.gang import Gang


def run_all(model: Path, gang: Gang, out: Path, *, layout: str = "") -> dict[str, Any]:
    return {"resume": contract.resume(model, gang, out / "checkpoint", layout)}
