"""Adapters in the place of all weights: `ranks` runs these cases on two ranks and on four, `test_lora_ranks.py` on one.

They are the contract's own with a rank of 3, which no number of ranks divides. Steps are larger than the contract's: B
starts at 0, so that the first step moves nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_contract as contract
import numpy as np
import ranks

from learners.gang.gang import Gang
from learners.step.update import train_step

RANK = "learner.lora.rank=3;learner.optim.lr=1e-2"
CASES = {
    "plain": "",
    "small_rows": "learner.micro_batch_tokens=40",
    "checkpointing": "learner.gradient_checkpointing=true",
    "offload": "learner.cpu_offload=true",
    "sequence": "",  # rows split over the ranks
    "rslora": 'learner.lora.rslora=true;learner.lora.target_modules=["q_proj", "down_proj"]',
}
LONG = ("small_rows", "checkpointing")
KL = "kl.where=loss;kl.coeff=0.5"


def extra(*parts: str) -> str:
    return ";".join(part for part in (RANK, *parts) if part)


def published(model: Path, gang: Gang, layout: str = "") -> dict[str, Any]:
    """What leaves after three steps: adapters, the base under them, and both as one."""
    config = contract.make_config(model, extra=extra(layout))
    backend = contract.make_backend(config, gang)
    for step in (1, 2, 3):
        share = contract.cut(14, step, config, gang)
        train_step(share, backend=backend, gang=gang, config=config.learner, step=step)
    adapters = backend.adapters
    assert adapters is not None

    def numbers(weights: Any) -> dict[str, list[float]]:
        return {name: np.array(data).view(np.float32).tolist() for name, data in weights}

    return {
        "adapter": numbers(adapters.iter_weights()),
        "base": numbers(adapters.iter_base()),
        "merged": numbers(backend.iter_hf_weights()),
        "specs": [[name, dtype, list(shape)] for name, dtype, shape in adapters.specs()],
    }


def run_all(model: Path, gang: Gang, out: Path, *, layout: str = "") -> dict[str, Any]:
    """Results by case; a checkpoint and an export under `out`. With a layout the most telling ones alone."""
    found: dict[str, Any] = {}
    for name in ranks.chosen(CASES, LONG):
        if layout and name != "plain":
            continue
        settings = CASES[name]
        split = f"learner.ranks={gang.size};learner.parallel.sequence={gang.size}" if name == "sequence" else ""
        same = ranks.in_layout(gang, split) if split else gang
        found[name] = contract.case(model, same, extra=extra(layout, split, settings))
    found["resume"] = contract.resume(model, gang, out / "checkpoint", extra(layout))
    found["published"] = published(model, gang, layout)
    if not layout:
        found["kl"] = contract.through_a_trial(model, gang, KL, extra() + ";")
        found["half"] = contract.half_precision(model, gang, extra())
        found["forward"] = contract.forward(model, gang, extra())
    return found
