"""The modes on rows: `ranks` runs these cases on two ranks, `test_supervised_ranks.py` on one as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ranks import HAS_MEGATRON, chosen, in_layout, settings

from asyncrl import config as configuration
from asyncrl.plugins import find
from learners.backends.base import Backend
from learners.batch.micro_batches import Sample
from learners.gang.gang import Gang
from learners.step.supervised import train_step, update

STEPS = 3
CASES = {
    "sft": ("sft", ""),
    "sft_small_rows": ("sft", "learner.micro_batch_tokens=64"),
    "sft_padded": ("sft", "learner.packing=false"),
    "dpo": ("dpo", ""),
    "dpo_small_rows": ("dpo", "learner.micro_batch_tokens=64"),
    "dpo_padded": ("dpo", "learner.packing=false"),
    "ipo": ("dpo", "learner.preference.loss=ipo;learner.preference.length_average=true"),
    "kto": ("kto", ""),
    "kto_small_rows": ("kto", "learner.micro_batch_tokens=64"),
    "kto_padded": ("kto", "learner.packing=false"),
    "renewed": ("dpo", "learner.preference.iteration=2"),
    "renewed_offload": ("dpo", "learner.preference.iteration=2;learner.reference_offload=true"),
    "reward_model": ("reward_model", "learner.preference.center_coeff=0.1"),
    "reward_model_small_rows": ("reward_model", "learner.preference.center_coeff=0.1;learner.micro_batch_tokens=64"),
}
#: With the backend megatron on two ranks: the case of fsdp2 that gives the same.
MEGATRON = {
    f"{name}_{split}": (name, f"{CASES[name][1]};learner.backend=megatron;learner.ranks=2;learner.parallel.{split}=2")
    for name, split in (("sft", "tensor"), ("dpo", "pipeline"), ("kto", "tensor"))
}
SAME = {
    "sft": ("sft_small_rows", "sft_padded"),
    "dpo": ("dpo_small_rows", "dpo_padded"),
    "kto": ("kto_small_rows", "kto_padded"),
    "renewed": ("renewed_offload",),
    "reward_model": ("reward_model_small_rows",),
}
LONG = ("dpo_small_rows", "dpo_padded", "kto_small_rows", "kto_padded", "reward_model_small_rows")


def make_config(model: Path, mode: str, extra: str = "") -> configuration.Config:
    return settings(
        model,
        f"""
data.max_prompt_tokens = 8
producers.engine = "dataset"
sampling.group_size = {1 if mode in ("sft", "kto") else 2}
learner.mode = "{mode}"
""",
        extra,
    )


def units(count: int, seed: int, size: int) -> list[list[Sample]]:
    """Groups of one or two answers of different lengths; the second sample's first token is not trained."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt = rng.integers(3, 20, int(rng.integers(1, 8)))
        unit = []
        for index in range(size):
            response = rng.integers(3, 20, int(rng.integers(2, 14)))
            mask = np.ones(response.size, np.uint8)
            mask[0] = index == 0
            tokens = np.concatenate((prompt, response)).astype(np.int32)
            margin = 0.25 * (index == 0)
            place, zeros = size * number + index, np.zeros(response.size, "f4")
            unit.append(Sample(tokens, prompt.size, zeros, mask, margin, place, right=number % 2 == 0))
        made.append(unit)
    return made


def case(model: Path, gang: Gang, mode: str, extra: str, count: int = 11) -> dict[str, Any]:
    """Three steps: metrics of each and the weights after them."""
    config = make_config(model, mode, extra)
    backend: Backend = find("asyncrl.backends", config.learner.backend)(config, gang)
    backend.self_check()
    metrics = []
    for step in range(1, STEPS + 1):
        rows = units(count, step, config.sampling.group_size)
        share = [part[gang.topology.share] for part in update(rows, config.learner, ranks=gang.shares)]
        result = train_step(share, backend=backend, gang=gang, config=config.learner, step=step)
        metrics.append(result.metrics)
    weights = {name: np.array(data).view(np.float32).tolist() for name, data in backend.iter_hf_weights()}
    return {"metrics": metrics, "weights": weights}


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by case. Nothing is written to `out`."""
    names = chosen(CASES, LONG)
    found = {name: case(model, gang, mode, extra) for name, (mode, extra) in CASES.items() if name in names}
    if HAS_MEGATRON and gang.size == 2:
        for name, (mode, extra) in MEGATRON.items():
            found[name] = case(model, in_layout(gang, extra.lstrip(";")), CASES[mode][0], extra.lstrip(";"))
    return found | {"few": case(model, gang, "dpo", "", count=1)}  # fewer pairs than ranks
