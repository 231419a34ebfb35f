"""Layouts of fsdp2 that split in several ways, against one process: policy, critic and reference, with a temperature.

`ranks` runs `run_all` on one rank, which is the reference and writes checkpoints, then on two and on four, which load
them; `test_composed_ranks.py` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import backend_contract as contract
import critic_cases as cases
from ranks import EACH_KV, LONE_KV, MOE, chosen, in_layout

from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang

#: An epsilon above the noise of float32 gradients: AdamW would divide it by itself.
SETTINGS = (
    "sampling.temperature=0.7;learner.algorithm.kl.where=reward;learner.algorithm.kl.coeff=0.1;"
    "learner.optim.eps=1e-6;learner.critic.eps=1e-6;"
)
SAVED = 2  # the step after which a checkpoint is written


class Case(NamedTuple):
    """`split`: of `[learner.parallel]`; `model`: folder below that of the dense model, which has 2 heads of K/V."""

    split: str
    model: str = ""
    extra: str = ""


#: By the number of ranks.
CASES: dict[int, dict[str, Case]] = {
    2: {"one_head": Case("sequence=2", LONE_KV), "expert_sequence": Case("expert=2 sequence=2", MOE)},
    4: {
        "two_heads": Case("sequence=4"),
        "one_head": Case("sequence=4", LONE_KV),
        "padded": Case("sequence=4", extra="learner.packing=false"),
        "dense_mask": Case("sequence=4", extra="model.attn_implementation=sdpa"),
        "checkpointing": Case("sequence=4", extra="learner.gradient_checkpointing=true"),
        "expert_sequence": Case("expert=2 sequence=2", MOE),
        "expert_context": Case("expert=4 sequence=4", MOE),
        "expert_replicate": Case("expert=2 replicate=2", MOE),
        "tensor_sequence": Case("tensor=2 sequence=2"),
        "tensor_ulysses": Case("tensor=2 sequence=2", EACH_KV),
        "tensor_checkpointing": Case("tensor=2 sequence=2", extra="learner.gradient_checkpointing=true"),
    },
}
#: Of the long form: all but the chunks of queries and one case of tensors and of experts with split rows.
LONG = tuple(
    f"{count} {name}"
    for count, each in CASES.items()
    for name in each
    if (count, name) not in {(2, "expert_sequence"), (4, "two_heads"), (4, "tensor_sequence")}
)
DENSE = "dense"  # the folder of the dense model's checkpoint


def wanted(ranks: int) -> dict[str, Case]:
    """The cases that are trained."""
    return {name: case for name, case in CASES[ranks].items() if chosen([f"{ranks} {name}"], LONG)}


def run_all(model: Path, gang: Gang, out: Path, *, others: Mapping[str, Path] = MappingProxyType({})) -> dict[str, Any]:
    """Results by case; of one rank by the folder of its model."""
    if gang.size == 1:
        models = sorted({case.model for count in CASES for case in wanted(count).values()})
        return {name: trained(model / name, gang, "", out / "checkpoint" / (name or DENSE)) for name in models}
    found = {}
    for name, case in wanted(gang.size).items():
        layout = ";".join((f"learner.ranks={gang.size}", *(f"learner.parallel.{part}" for part in case.split.split())))
        settings = f"{layout};{case.extra}"
        found[name] = trained(
            model / case.model,
            in_layout(gang, layout),
            settings,
            out / name / "checkpoint",
            other=others["composed_cases"] / (case.model or DENSE),
        )
    return found


def open_run(model: Path, gang: Gang, settings: str) -> tuple[FSDP2Backend, Any]:
    """A new backend and its steps."""
    config = cases.make_config(model, SETTINGS + settings)
    backend = FSDP2Backend(config, gang)
    return backend, cases.make_trial(config, backend, gang, {})


def trained(model: Path, gang: Gang, settings: str, out: Path, *, other: Path | None = None) -> dict[str, Any]:
    """Three steps with a checkpoint between them; then the last one again from the checkpoint `other`."""
    backend, trial = open_run(model, gang, settings)
    backend.self_check()
    if gang.lead:
        out.mkdir(parents=True)
    gang.barrier()
    numbers = forward(backend, gang, settings, model)
    metrics, held = [], dict[str, Any]()
    for step in range(1, cases.STEPS + 1):
        metrics.append(stepped(trial, gang, step))
        if step == SAVED:
            backend.save(out)
            held = weights(backend)
    found = {"forward": numbers, "metrics": metrics, "saved": held, "weights": weights(backend), "folder": str(out)}
    return found | ({} if other is None else {"back": continued(backend, trial, gang, other)})


def forward(backend: FSDP2Backend, gang: Gang, settings: str, model: Path) -> dict[str, Any]:
    """Every number of a forward pass, by sample."""
    (part,) = contract.cut(14, 1, cases.make_config(model, settings), gang)
    numbers = backend.forward_numbers(part.micro, squares=True)
    return {
        name: contract.to_samples(part, [getattr(piece, name) for piece in numbers], gang)
        for name in ("logprobs", "entropy", "square_sums")
    }


def stepped(trial: Any, gang: Gang, step: int) -> dict[str, Any]:
    result = cases.train(trial, gang, cases.make_batch(step))
    assert not result.broken, result.broken
    metrics: dict[str, Any] = result.metrics
    return metrics


def continued(backend: FSDP2Backend, trial: Any, gang: Gang, checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint of another layout holds, and the step after it."""
    backend.load(checkpoint)
    held = weights(backend)
    return {"loaded": held, "metrics": stepped(trial, gang, SAVED + 1), "weights": weights(backend)}


def weights(backend: FSDP2Backend) -> dict[str, Any]:
    """As they are published, and the critic's; empty but on rank 0."""
    return {"policy": cases.policy_weights(backend), "critic": cases.critic_weights(backend)}
