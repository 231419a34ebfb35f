"""Policy and critic together: `ranks` runs these cases on two ranks, `test_critic_ranks.py` on one as the reference.

Whole steps as `learners.step.resilient_step` makes them: values of all rows, GAE on the whole batch, both updates.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_batches import a_batch, a_group, a_sample
from ranks import HAS_MEGATRON, chosen, in_layout, settings

from asyncrl import config as configuration
from asyncrl.plugins import find
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.step.resilient_step import StepRunner

STEPS = 3
CASES = {
    "plain": "",
    "small_rows": "learner.micro_batch_tokens=40",
    "padded": "learner.packing=false",
    "offload": "learner.cpu_offload=true",
    "checkpointing": "learner.gradient_checkpointing=true",
    "minibatches": "learner.algorithm.minibatches=2",
    "sequence_mean": "learner.critic.aggregation=seq-mean-token-mean",
    "narrow_clip": "learner.critic.value_clip=0.001;learner.algorithm.minibatches=2",
    "bootstrap": "learner.critic.bootstrap=true",
    "vapo": "learner.algorithm.advantage=gae_length_adaptive;learner.algorithm.positive_coeff=0.1",
    "vtrace": "learner.algorithm.advantage=vtrace;learner.algorithm.loss=reinforce",
    "warmup": "learner.critic.critic_warmup=2",
    "few": "",  # fewer samples than ranks
}
#: With the backend megatron on two ranks: the case of fsdp2 that gives the same.
MEGATRON = {
    f"{name}_{split.partition('=')[0]}": (name, f"learner.backend=megatron;learner.ranks=2;learner.parallel.{split}")
    for name, split in (
        ("minibatches", "tensor=2;learner.megatron.sequence_parallel=true"),
        ("bootstrap", "pipeline=2"),
    )
}
SAME = ("small_rows", "padded", "offload", "checkpointing")
LONG = ("padded", "offload", "checkpointing")


def make_config(model: Path, extra: str = "") -> configuration.Config:
    return settings(
        model,
        """
data.max_prompt_tokens = 16
learner.algorithm.advantage = "gae"
learner.critic.lr = 2e-3
learner.critic.warmup_steps = 2
learner.critic.max_grad_norm = 0.05
[[reward]]
function = "a:b"
""",
        extra,
    )


def make_batch(step: int, groups: int = 6) -> Any:
    """Two samples per group, of different lengths, some tokens masked, every other one cut by the length limit."""
    rng = np.random.default_rng(step)
    made = []
    for number in range(groups):
        rows = []
        for index in range(2):
            size = int(rng.integers(2, 14))
            mask = (rng.random(size) < 0.9).astype(np.uint8)
            mask[-1] = 1
            rows.append(
                a_sample(
                    index,
                    rng.integers(3, 20, size),
                    -3 * rng.random(size).astype("f4"),
                    rng.integers(0, 2),
                    mask=mask,
                    runs=((step - 1, size),),
                    finish="length" if number % 2 else "stop",
                )
            )
        made.append(a_group(number, rng.integers(3, 20, int(rng.integers(1, 8))), rows))
    return a_batch(step, step, made)


def make_trial(config: configuration.Config, backend: FSDP2Backend, gang: Gang, buried: dict[int, str]) -> StepRunner:
    return StepRunner(
        config.learner,
        gang=gang,
        backend=backend,
        say=str,
        quarantine=lambda step, group, why: buried.update({group: why}),
    )


def train(trial: StepRunner, gang: Gang, batch: Any) -> Any:
    """One step on every rank; its result."""
    shares = trial.cut(batch)[1] if gang.lead else None
    return trial.train(gang.scatter(shares), step=batch.step, batch=batch if gang.lead else None)[0]


def policy_weights(backend: FSDP2Backend) -> dict[str, list[float]]:
    """By name; empty but on rank 0."""
    return {name: np.array(data).view(np.float32).tolist() for name, data in backend.iter_hf_weights()}


def critic_weights(backend: FSDP2Backend) -> dict[str, list[float]]:
    """By name, on every rank. Collective."""
    assert backend.critic is not None
    if hasattr(backend.critic, "trained"):  # of megatron: on rank 0
        every = backend.critic.trained.export(torch.float32, unstack=False)
        return {f"model.{name}": whole.flatten().tolist() for name, whole in every}
    found = {}
    for name, parameter in backend.critic._model.named_parameters():
        whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = whole.detach().flatten().cpu().tolist()
    return found


def digest(backend: FSDP2Backend) -> str:
    """Of every bit of both models and both optimizers on this rank."""
    total = hashlib.blake2b()
    for name, tensor in sorted(backend._state().items()):
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total.update(name.encode() + local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def case(model: Path, gang: Gang, *, extra: str, groups: int = 6) -> dict[str, Any]:
    """Three steps: metrics of each, policy and critic after each."""
    config = make_config(model, extra)
    backend: Any = find("asyncrl.backends", config.learner.backend)(config, gang)
    backend.self_check()
    trial = make_trial(config, backend, gang, {})
    steps = []
    start = {"policy": policy_weights(backend), "critic": critic_weights(backend)}
    for step in range(1, STEPS + 1):
        result = train(trial, gang, make_batch(step, groups))
        steps.append(
            {
                "metrics": result.metrics,
                "broken": result.broken,
                "policy": policy_weights(backend),
                "critic": critic_weights(backend),
            }
        )
    return {"start": start, "steps": steps}


def by_megatron(model: Path, gang: Gang, name: str, out: Path) -> dict[str, Any]:
    """A case, then a step of another backend: its weights, checkpoint and export."""
    base, layout = MEGATRON[name]
    placed, extra = in_layout(gang, layout), f"{CASES[base]};{layout}".lstrip(";")
    found = case(model, placed, extra=extra)
    config = make_config(model, extra)
    backend: Any = find("asyncrl.backends", "megatron")(config, placed)
    train(make_trial(config, backend, placed, {}), placed, make_batch(1))
    if gang.lead:
        out.mkdir(parents=True)
    gang.barrier()
    backend.save(out)
    backend.export_hf(out / "export")
    return found | {"out": str(out), "written": {"policy": policy_weights(backend), "critic": critic_weights(backend)}}


def resume(model: Path, gang: Gang, folder: Path, extra: str = "") -> dict[str, Any]:
    """Two steps, a checkpoint, a third step; then the third step again from the checkpoint in a new backend."""
    config = make_config(model, extra)
    backend = FSDP2Backend(config, gang)
    trial = make_trial(config, backend, gang, {})
    for step in (1, 2):
        train(trial, gang, make_batch(step))
    if gang.lead:
        folder.mkdir(parents=True)
    gang.barrier()
    backend.save(folder)
    gang.barrier()
    saved = digest(backend)
    third = train(trial, gang, make_batch(3)).metrics
    fresh = FSDP2Backend(config, gang)
    fresh.self_check()
    fresh.load(folder)
    loaded = digest(fresh)
    again = train(make_trial(config, fresh, gang, {}), gang, make_batch(3)).metrics
    fresh.export_hf(folder / "export")
    words = [part.decode() for part in gang.gather(" ".join((saved, loaded, digest(backend), digest(fresh))).encode())]
    return {"third": third, "again": again, "digests": words, "critic": critic_weights(fresh)}


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by case; a checkpoint under `out`."""
    results = {
        name: case(model, gang, extra=CASES[name], groups=1 if name == "few" else 6) for name in chosen(CASES, LONG)
    }
    if HAS_MEGATRON and gang.size == 2:
        results |= {name: by_megatron(model, gang, name, out / name) for name in MEGATRON}
    # In the second one the policy has not been trained yet: its optimizer has no state of its own.
    return results | {
        "resume": resume(model, gang, out / "checkpoint"),
        "resume_warm": resume(model, gang, out / "warm", CASES["warmup"]),
    }
