"""Writes docs/matrix.md from the table of the tests (tests/distributed/matrix.py) and what `asyncrl check` refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import find_conflicts, parse
from asyncrl.config.capabilities import UNUSED as UNUSED_BY
from asyncrl.config.capabilities import find_refusals
from asyncrl.config.features import FEATURES
from asyncrl.config.model_facts import count_experts
from asyncrl.config.rules.learner import model_problems
from asyncrl.errors import ConfigError

TABLE = Path(__file__).parents[1] / "tests" / "distributed" / "matrix.py"
BASE = ("model.path=m", "data.path=d.jsonl", 'reward=[{function = "x:y"}]')
NEEDS = "needs a device"
UNUSED = "no effect"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8}
TOP = """# What runs where

Generated from `tests/distributed/matrix.py`.

- **run**: a test on CPUs compares this layout with one process, or with the library itself.
  `tests/distributed/test_matrix.py` looks up that each of these tests exists.
- **refused**: by `asyncrl check`, for the reason of that number.
- **needs a device**: the kernel has no code for a CPU.
- **-**: not refused, and not run here.

Layouts have 2 ranks, or 4 if two things are split; "shares" are ranks that train other rows, "context" splits rows over
more ranks than there are heads of K/V. Accelerators have hardly been tried ([what ran](gpus.md)).
"""
CHECKPOINTS = """
## Checkpoints

The reader has the writer's weights and optimizer states bit by bit, and its next step is that of a run that did not
stop, to 1e-5 (`tests/distributed/test_backend_contract.py`). One rank of either back-end also reads what each reader of
this table writes.

| reader | writers |
| --- | --- |
"""


def load_table() -> Any:
    spec = importlib.util.spec_from_file_location("matrix", TABLE)
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


def find_refusal(backend: str, settings: tuple[str, ...], model: Mapping[str, Any]) -> str:
    """Why `asyncrl check` refuses these settings; empty if it does not."""
    try:
        config = parse("", overrides=[*BASE, f"learner.backend={backend}", *settings])
    except ConfigError as error:
        return error.message
    for error in find_conflicts(config):
        return error.message
    for problem in model_problems(config, model):
        return problem.message
    for device in ("cuda", "cpu"):
        for refusal in find_refusals(config, model, role="learner", device=device):
            return refusal.message if device == "cuda" else NEEDS
    unused = any(FEATURES[name].asks(config, model) for name in UNUSED_BY.get(backend, ()))
    return UNUSED if unused else ""


def settings_of(table: Any, backend: str, layout: str, model: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of a layout, with what a mixture of experts needs there."""
    split = backend == "megatron" and "tensor" in layout and count_experts(model)
    return (*table.LAYOUTS[layout], *["learner.megatron.sequence_parallel=true"] * bool(split))


class Reasons:
    """Reasons of a table, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, why: str) -> int:
        return self._numbers.setdefault(why, len(self._numbers) + 1)

    def lines(self) -> list[str]:
        return [f"{number}. {why}" for why, number in self._numbers.items()]


def table_of(table: Any, backend: str, rows: Mapping[str, Any], layouts: list[str]) -> list[str]:
    """Rows by layout, and the reasons."""
    reasons = Reasons()
    lines = ["", f"| | {' | '.join(layouts)} |", f"|{' --- |' * (len(layouts) + 1)}"]
    for name, row in rows.items():
        cells = []
        for layout in layouts:
            model = row.model or (EXPERTS if "expert" in layout else {})
            settings = (*settings_of(table, backend, layout, model), *row.settings)
            why = find_refusal(backend, settings, model)
            if layout in getattr(row, backend):
                assert not why, f"{backend} refuses what a test runs: {name}, {layout}: {why}"
                cells.append("run")
            elif why:
                cells.append(why if why in (NEEDS, UNUSED) else f"refused ({reasons.number(why)})")
            else:
                cells.append("-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", *reasons.lines()]


def make_page() -> str:
    table = load_table()
    parts = [TOP.strip()]
    for backend in table.JOBS:
        models = {layout: EXPERTS if "expert" in layout else {} for layout in table.LAYOUTS}
        refused = {
            layout: find_refusal(backend, settings_of(table, backend, layout, model), model)
            for layout, model in models.items()
        }
        layouts = [layout for layout, why in refused.items() if not why]
        parts += ["", f"## Back-end {backend}"]
        for title, rows in (("Families", table.FAMILIES), ("Features", table.FEATURES)):
            parts += ["", f"### {title} ({backend})", *table_of(table, backend, rows, layouts)]
        parts += ["", f"### Refused layouts ({backend})", ""]
        parts += [f"- {layout}: {why}" for layout, why in refused.items() if why]
    parts += ["", CHECKPOINTS.strip()]
    for reader, writers in table.CHECKPOINTS.items():
        parts.append(f"| {table.name_of(reader)} | {'; '.join(table.name_of(writer) for writer in writers)} |")
    return "\n".join(parts) + "\n"
