"""The trackers that the contract suite runs on, and how what they were told is read back.

With the packages themselves where they are installed (`make test-trackers`), else with stand-ins of them.
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STANDINS = Path(__file__).parent / "standins"
Told = dict[tuple[str, int], float]  # (name, step) -> the last value


class Rig(NamedTuple):
    """`told` reads the real one's files; None: they are looked at for the names alone."""

    name: str
    told: Callable[[Path], Told] | None
    secret: str  # variable


def _mlflow(folder: Path) -> Told:
    with sqlite3.connect(folder / "mlflow.db") as db:
        rows = db.execute("select key, step, value from metrics order by timestamp, rowid").fetchall()
    return {(key, step): value for key, step, value in rows}


def _trackio(folder: Path) -> Told:
    [path] = folder.glob("*.db")
    with sqlite3.connect(path) as db:
        rows = db.execute("select step, metrics from metrics order by id").fetchall()
    return {(name, step): value for step, text in rows for name, value in json.loads(text).items()}


RIGS = [
    Rig("wandb", None, "WANDB_API_KEY"),
    Rig("mlflow", _mlflow, "MLFLOW_TRACKING_TOKEN"),
    Rig("swanlab", None, "SWANLAB_API_KEY"),
    Rig("trackio", _trackio, "HF_TOKEN"),
]


def is_real(name: str) -> bool:
    """The package itself is installed (asked before stand-ins are put on the path)."""
    return importlib.util.find_spec(name) is not None


def standin_lines(folder: Path) -> list[dict[str, object]]:
    path = folder / "standin.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def standin_told(folder: Path) -> Told:
    told: Told = {}
    for line in standin_lines(folder):
        for name, value in dict(line.get("values") or {}).items():  # type: ignore[call-overload]
            told[name, int(str(line["step"]))] = value
    return told
