"""Training with given experts on two ranks: in plain FSDP2, and with the experts split over the ranks.

`ranks` runs `run_all` on two ranks, `test_routing_ranks.py` on one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backend_contract as contract
import numpy as np
import ranks
from msgspec.structs import replace

from learners.batch.assembly import _minibatch
from learners.batch.micro_batches import Minibatch, Sample
from learners.gang.gang import Gang
from learners.step.update import train_step

REPLAY = "learner.router_replay=true"
LAYOUTS = {
    "shard": "learner.ranks=2",
    "expert": "learner.ranks=2;learner.parallel.expert=2",
    "checkpointing": "learner.ranks=2;learner.gradient_checkpointing=true",
}


MEGATRON = {
    f"megatron_{name}": f"learner.backend=megatron;learner.ranks=2;{layout}"
    for name, layout in {
        "expert": "learner.parallel.expert=2",
        "tensor": "learner.parallel.tensor=2;learner.megatron.sequence_parallel=true",
        "pipeline": "learner.parallel.pipeline=2;learner.gradient_checkpointing=true",
    }.items()
}


def samples(count: int, seed: int) -> list[Sample]:
    """Most with experts that no router would choose together, some without any."""
    rng = np.random.default_rng(seed)
    made = contract.samples(count, seed)
    return [
        replace(
            one,
            experts=rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (one.tokens.size - 1, 2, 1)), axis=2)[..., :2],
        )
        if one.number % 5
        else one
        for one in made
    ]


def cut(count: int, seed: int, config: Any, gang: Gang, *, replay: bool) -> list[Minibatch]:
    made = samples(count, seed) if replay else contract.samples(count, seed)
    limit = config.learner.micro_batch_tokens
    return [_minibatch(made, ranks=gang.shares, max_tokens=limit, packing=True)[gang.topology.share]]


def steps(model: Path, gang: Gang, extra: str, *, replay: bool = True) -> dict[str, Any]:
    """Metrics of three steps and the weights after them."""
    config = contract.make_config(model, extra=extra)
    backend = contract.make_backend(config, gang)
    backend.self_check()
    metrics = []
    for step in range(1, 4):
        share = cut(14, step, config, gang, replay=replay)
        metrics.append(train_step(share, backend=backend, gang=gang, config=config.learner, step=step).metrics)
    return {"metrics": metrics, "weights": contract.digest(backend)[0]}


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by layout; of one rank with and without replay."""
    del out
    moe = model / ranks.MOE
    if gang.size == 1:
        return {"replay": steps(moe, gang, REPLAY), "own": steps(moe, gang, REPLAY, replay=False)}
    layouts = LAYOUTS | (MEGATRON if ranks.HAS_MEGATRON else {})
    return {name: steps(moe, ranks.in_layout(gang, layout), f"{layout};{REPLAY}") for name, layout in layouts.items()}
