"""What trains beside the policy, and training on rows as they are, where rows or matrices are split over two ranks.

`ranks` runs `run_all` on two ranks in both layouts, `test_split_ranks.py` on one without any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import critic_cases
import process_cases
import ranks
import supervised_cases

from learners.gang import Gang

LAYOUTS = ("sequence", "tensor")
CASES = ("critic", "process", "sft", "dpo", "reward_model")


def case(model: Path, gang: Gang, name: str, layout: str) -> dict[str, Any]:
    """Three steps of it."""
    if name == "critic":
        return critic_cases.case(model, gang, extra=layout)
    if name == "process":
        return process_cases.case(model, gang, extra=layout)
    return supervised_cases.case(model, gang, name, layout)


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by layout and case; with one rank those of no layout."""
    if gang.size == 1:
        return {name: case(model, gang, name, "") for name in CASES}
    found = {}
    for split in LAYOUTS:
        layout = f"learner.ranks=2;learner.parallel.{split}=2"
        same = ranks.in_layout(gang, layout)
        found |= {f"{split} {name}": case(model, same, name, layout) for name in CASES}
    return found
