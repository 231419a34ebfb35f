"""Run by `test_process_ranks.py` under torchrun: policy and process reward model together; rank 0 writes results.

Whole steps as `learners.step.resilient_step` makes them: log-probs of all rows, PRIME on the whole batch, both updates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import critic_cases as common
import msgspec
from ranks import chosen

from asyncrl import config as configuration
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang

STEPS = 3
BASE = (
    "learner.algorithm.advantage=prime;learner.process_reward.lr=2e-3;learner.process_reward.beta=0.5;"
    "learner.process_reward.warmup_steps=2;learner.process_reward.max_grad_norm=0.5;"
)
CASES = {
    "plain": "",
    "small_rows": "learner.micro_batch_tokens=40",
    "padded": "learner.packing=false",
    "offload": "learner.cpu_offload=true",
    "minibatches": "learner.algorithm.minibatches=2",
    "before": "learner.process_reward.update=before",
    "before_minibatches": "learner.process_reward.update=before;learner.algorithm.minibatches=2",
    "not_normed": "learner.process_reward.batch_norm=false",
    "temperature": "sampling.temperature=0.7",  # a frozen copy of its own
    "penalty": "learner.algorithm.kl.where=reward;learner.algorithm.kl.coeff=0.1",
    "few": "",  # fewer samples than ranks
}
SAME = ("small_rows", "padded", "offload")
LONG = ("padded", "offload", "before_minibatches")


def make_config(model: Path, extra: str = "") -> configuration.Config:
    return common.make_config(model, BASE + extra)


def process_weights(backend: FSDP2Backend) -> dict[str, list[float]]:
    """By name, on every rank. Collective."""
    assert backend.process_reward is not None
    return whole(backend.process_reward._model)


def whole(module: Any) -> dict[str, list[float]]:
    found = {}
    for name, parameter in module.named_parameters():
        full: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("model.")] = full.detach().float().flatten().cpu().tolist()
    return found


def weights(backend: FSDP2Backend) -> dict[str, Any]:
    return {"policy": common.policy_weights(backend), "process": process_weights(backend)}


def case(model: Path, gang: Gang, *, extra: str, groups: int = 6) -> dict[str, Any]:
    """Three steps: metrics, advantages (rank 0) and weights after each."""
    backend = FSDP2Backend(make_config(model, extra), gang)
    backend.self_check()
    trial = common.make_trial(make_config(model, extra), backend, gang, {})
    steps, start = [], weights(backend)
    for step in range(1, STEPS + 1):
        result = common.train(trial, gang, common.make_batch(step, groups))
        steps.append(
            {"metrics": result.metrics, "broken": result.broken, "advantages": trial._advantages, **weights(backend)}
        )
    return {"start": start, "steps": steps}


def resume(model: Path, gang: Gang, folder: Path, extra: str = "") -> dict[str, Any]:
    """Two steps, a checkpoint, a third step; then the third step again from the checkpoint in a new backend."""
    config = make_config(model, extra)
    backend = FSDP2Backend(config, gang)
    trial = common.make_trial(config, backend, gang, {})
    for step in (1, 2):
        common.train(trial, gang, common.make_batch(step))
    if gang.lead:
        folder.mkdir(parents=True)
    gang.barrier()
    backend.save(folder)
    gang.barrier()
    saved = common.digest(backend)
    third = common.train(trial, gang, common.make_batch(3)).metrics
    fresh = FSDP2Backend(config, gang)
    fresh.self_check()
    fresh.load(folder)
    loaded = common.digest(fresh)
    again = common.train(common.make_trial(config, fresh, gang, {}), gang, common.make_batch(3)).metrics
    fresh.export_hf(folder / "export")
    words = [
        part.decode()
        for part in gang.gather(" ".join((saved, loaded, common.digest(backend), common.digest(fresh))).encode())
    ]
    return {"third": third, "again": again, "digests": words, **weights(fresh)}


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by case; a checkpoint under `out`."""
    results = {
        name: case(model, gang, extra=CASES[name], groups=1 if name == "few" else 6) for name in chosen(CASES, LONG)
    }
    return results | {
        "resume": resume(model, gang, out / "checkpoint"),
        "resume_before": resume(model, gang, out / "before", CASES["before"]),
    }


def main() -> None:
    """`torchrun process_cases.py MODEL OUT`."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    gang = Gang.join(make_config(model))
    results = run_all(model, gang, out)
    if gang.lead:
        (out / "results.json").write_bytes(msgspec.json.encode(results))
    gang.leave()


if __name__ == "__main__":
    main()
