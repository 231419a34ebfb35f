"""What trains beside the policy, and training on rows as they are, where rows, matrices or experts are split over two
ranks, or weights are held twice.

`ranks` runs `run_all` on two ranks in all layouts, `test_split_ranks.py` on one without any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import critic_cases
import process_cases
import ranks
import supervised_cases

from learners.gang.gang import Gang

CASES = ("critic", "process", "sft", "dpo", "reward_model")
#: What is run in a layout, and with which model.
LAYOUTS = {
    "sequence": (CASES, ""),
    "tensor": (CASES, ""),
    "replicate": (("critic", "process", "dpo"), ""),
    "expert": (("critic", "process"), ranks.MOE),
}

LONG = (
    "sequence critic", "sequence sft", "sequence reward_model", "tensor process", "tensor dpo", "tensor reward_model",
    "replicate process", "replicate dpo", "expert critic",
)  # fmt: skip


def case(model: Path, gang: Gang, name: str, layout: str) -> dict[str, Any]:
    """Three steps of it."""
    if name == "critic":
        return critic_cases.case(model, gang, extra=layout)
    if name == "process":
        return process_cases.case(model, gang, extra=layout)
    return supervised_cases.case(model, gang, name, layout)


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by layout and case; with one rank those of no layout, by model and case."""
    if gang.size == 1:
        wanted = {
            (folder, name)
            for split, (names, folder) in LAYOUTS.items()
            for name in names
            if ranks.chosen([f"{split} {name}"], LONG)
        }
        return {f"{folder} {name}": case(model / folder, gang, name, "") for folder, name in sorted(wanted)}
    found = {}
    for split, (names, folder) in LAYOUTS.items():
        layout = f"learner.ranks=2;learner.parallel.{split}=2"
        same = ranks.in_layout(gang, layout)
        found |= {
            f"{split} {name}": case(model / folder, same, name, layout)
            for name in names
            if ranks.chosen([f"{split} {name}"], LONG)
        }
    return found
