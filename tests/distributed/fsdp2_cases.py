"""All cases of the FSDP2 backend: `ranks` runs them on two ranks, `test_fsdp2.py` on one as the reference."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from made_batches import a_batch, a_group, a_sample
from ranks import settings

from asyncrl import config as configuration
from learners import update
from learners.backends.fsdp2 import FSDP2Backend, decoder_layers
from learners.batch import Minibatch, Sample, _minibatch
from learners.gang import Gang
from learners.trial import Trial
from learners.update import train_step

STEPS = 3


def make_config(model: Path, *, extra: str = "") -> configuration.Config:
    return settings(model, """
data.max_prompt_tokens = 16
learner.optim.max_grad_norm = 0.05
learner.algorithm.entropy_coeff = 0.01
[[reward]]
function = "a:b"
""", extra)  # fmt: skip


def samples(count: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt, length = int(rng.integers(1, 8)), int(rng.integers(1, 14))
        mask = (rng.random(length) < 0.9).astype(np.uint8)
        made.append(Sample(
            rng.integers(3, 20, prompt + length).astype(np.int32), prompt, -3 * rng.random(length).astype("f4"),
            mask, float(rng.normal()), number,
        ))  # fmt: skip
    return made


def cut(count: int, seed: int, config: configuration.Config, gang: Gang) -> list[Minibatch]:
    """This rank's mini-batches: the samples in as many parts as the algorithm has mini-batches."""
    every = samples(count, seed)
    parts = config.learner.algorithm.minibatches
    return [
        _minibatch(every[part::parts], ranks=gang.size, max_tokens=config.learner.micro_batch_tokens,
                   packing=config.learner.packing)[gang.rank]
        for part in range(parts)
    ]  # fmt: skip


def digest(backend: FSDP2Backend) -> tuple[dict[str, list[float]], str, list[str]]:
    """Every exported tensor as numbers, a digest of all bytes, and the names; empty but on rank 0."""
    total, values, names = hashlib.blake2b(), {}, []
    for name, data in backend.iter_hf_weights():
        total.update(data)
        names.append(name)
        values[name] = data.view(np.float32).tolist()
    return values, total.hexdigest(), names


def case(model: Path, gang: Gang, *, extra: str, count: int = 14) -> dict[str, Any]:
    """Three steps: metrics of each and the weights after them."""
    config = make_config(model, extra=extra)
    backend = FSDP2Backend(config, gang)
    backend.self_check()
    metrics, by_sample = [], []
    for step in range(1, STEPS + 1):
        share = cut(count, step, config, gang)
        result = train_step(share, backend=backend, gang=gang, config=config.learner, step=step)
        metrics.append(result.metrics)
        by_sample.append(sorted(result.weights.items()))
    values, whole, names = digest(backend)
    specs = [(spec.name, spec.dtype, spec.shape) for spec in backend.weight_specs()]
    return {"metrics": metrics, "weights": values, "digest": whole, "names": names, "specs": specs,
            "by_sample": by_sample}  # fmt: skip


CASES = {
    "plain": "",
    "small_rows": "learner.micro_batch_tokens=40",
    "padded": "learner.packing=false",
    "sequence_mean": "learner.algorithm.aggregation=seq-mean-token-mean",
    "bypass": "learner.algorithm.preset=bypass",
    "minibatches": "learner.algorithm.minibatches=2",
    "checkpointing": "learner.gradient_checkpointing=true",
    "offload": "learner.cpu_offload=true",
    "few": "",  # fewer samples than ranks
}


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by case; checkpoints and an export under `out`."""
    results = {name: case(model, gang, extra=extra, count=1 if name == "few" else 14)
               for name, extra in CASES.items()}  # fmt: skip
    results |= {name: through_a_trial(model, gang, extra) for name, extra in WHOLE.items()}
    results["half"] = half_precision(model, gang)
    results["poison"] = {how: poison(model, gang, how) for how in ("raises", "nan")}
    results["resume"] = resume(model, gang, out / "checkpoint")
    return results | words(gang)


def words(gang: Gang) -> dict[str, Any]:
    """What the collectives of the gang bring."""
    parts = [f"part {number}".encode() * (number + 1) for number in range(gang.size)]
    return {
        "gather": [part.decode() for part in gang.gather(f"rank {gang.rank}".encode() * (gang.rank + 1))],
        "share": gang.share(b"order" if gang.lead else None).decode(),
        "scatter": [part.decode() for part in gang.gather(gang.scatter(parts if gang.lead else None))],
        "total": gang.total({"x": gang.rank + 1.0, "y_max": float(gang.rank)}),
    }


def half_precision(model: Path, gang: Gang) -> dict[str, Any]:
    """bf16 compute over fp32 master weights: exported bytes are half as many."""
    config = make_config(model, extra="model.dtype=bfloat16")
    backend = FSDP2Backend(config, gang)
    backend.self_check()
    metrics = train_step(cut(14, 1, config, gang), backend=backend, gang=gang, config=config.learner, step=1).metrics
    exported = {name: data.nbytes for name, data in backend.iter_hf_weights()}
    masters = {str(p.dtype) for p in backend._policy.parameters()}
    return {"metrics": metrics, "bytes": exported, "masters": sorted(masters), "specs": backend.weight_specs()}


#: Settings that look at the whole batch: forward passes first, then statistics on rank 0, then the step.
WHOLE = {
    "kl_reward": "advantage=reinforce_plus_plus;kl.where=reward;kl.coeff=0.1;kl.controller=adaptive;kl.horizon=100",
    "m2po": "correction=m2po;correction_options.threshold=0.5",
    "kept": "correction=rejection;correction_options.thresholds=[4.0];denominator=kept;minibatches=2",
    "kl_cov": "loss=kl_cov;loss_options.ratio=0.2;loss_options.coeff=1.0;minibatches=2",
    "lag": "lag.weight=exp;lag.step_scale=sqrt_ess;stale_negatives=0.1;positive_coeff=0.1",
    "loglinear": "proximal=loglinear;minibatches=2",
    "high_entropy": "entropy_keep=0.3;entropy_target=9;entropy_coeff=0.02;minibatches=2",
    "high_entropy_kept": "entropy_keep=0.3;denominator=kept;loss=clip_cov;loss_options.ratio=0.3",
    "token_baseline": "advantage=optimal_token_baseline;advantage_options.off_policy=true",
}


def through_a_trial(model: Path, gang: Gang, extra: str) -> dict[str, Any]:
    """Two steps from claimed batches, as the learner makes them."""
    config = make_config(model, extra=";".join(f"learner.algorithm.{part}" for part in extra.split(";")))
    backend = FSDP2Backend(config, gang)
    trial = Trial(config.learner, gang=gang, backend=backend, say=str, bury=lambda *_: None)
    metrics, by_sample = [], []
    for step in (1, 2):
        rng = np.random.default_rng(step)
        batch = a_batch(step, 0, [
            a_group(n, rng.integers(3, 20, 4), [
                a_sample(i, rng.integers(3, 20, 3 + n + i), -2.5 - rng.random(3 + n + i).astype("f4"),
                            rng.integers(0, 3))
                for i in range(3)
            ]) for n in range(6)
        ])  # fmt: skip
        shares = trial.cut(batch)[1] if gang.lead else None
        given: Any = batch if gang.lead else None
        result, _ = trial.train(gang.scatter(shares), step=step, batch=given)
        assert not result.broken, result.broken
        metrics.append(result.metrics)
        by_sample.append(sorted(result.weights.items()))
    values, whole, names = digest(backend)
    return {"metrics": metrics, "weights": values, "digest": whole, "names": names, "by_sample": by_sample,
            "kl_coeff": trial.coefficients.kl, "coefficients": trial.coefficients}  # fmt: skip


MARK = -7.25


def poison(model: Path, gang: Gang, how: str) -> dict[str, Any]:
    """A step whose loss breaks on one rank alone, for two of six groups; the ranks find them and train the rest."""
    config = make_config(model)
    backend = FSDP2Backend(config, gang)
    rng = np.random.default_rng(5)
    groups = [
        a_group(n, rng.integers(3, 20, 4), [
            a_sample(i, rng.integers(3, 20, 6 + n), np.full(6 + n, MARK if n in (1, 4) and i == 0 else -1.0), i)
            for i in range(3)
        ]) for n in range(6)
    ]  # fmt: skip
    inner = update.loss_of

    def broken(algorithm: Any) -> Any:
        def loss(inputs: Any) -> Any:
            result = inner(algorithm)(inputs)
            if not bool((inputs.behaviour == MARK).any()):
                return result
            if how == "raises":
                raise ValueError(f"seen on rank {gang.rank}")
            return result._replace(loss=result.loss * float("nan"))

        return loss

    found: dict[int, str] = {}
    trial = Trial(config.learner, gang=gang, backend=backend, say=str,
                  bury=lambda step, group, why: found.update({group: why}))  # fmt: skip
    update.loss_of = broken  # type: ignore[assignment]
    try:
        batch = a_batch(1, 0, groups)
        shares = trial.cut(batch)[1] if gang.lead else None
        given: Any = batch if gang.lead else None
        result, left = trial.train(gang.scatter(shares), step=1, batch=given)
    finally:
        update.loss_of = inner
    values, _, names = digest(backend)
    return {"found": found, "metrics": [result.metrics], "broken": result.broken, "weights": values, "names": names,
            "left": [group.group for group in left.groups] if left is not None else []}  # fmt: skip


def resume(model: Path, gang: Gang, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step; then the third step again from the checkpoint in a new backend."""
    config = make_config(model)
    backend = FSDP2Backend(config, gang)
    for step in (1, 2):
        train_step(cut(14, step, config, gang), backend=backend, gang=gang, config=config.learner, step=step)
    if gang.lead:
        folder.mkdir(parents=True)
    gang.barrier()
    backend.forward_logprobs(cut(14, 3, config, gang)[0].micro)  # a forward without a backward comes before both
    backend.save(folder)
    gang.barrier()
    saved = digest(backend)[1]
    third = train_step(cut(14, 3, config, gang), backend=backend, gang=gang, config=config.learner, step=3).metrics
    after = digest(backend)[1]
    fresh = FSDP2Backend(config, gang)
    fresh.self_check()
    fresh.load(folder)
    loaded = digest(fresh)[1]
    again = train_step(cut(14, 3, config, gang), backend=fresh, gang=gang, config=config.learner, step=3).metrics
    result = {"third": third, "again": again, "digest": after, "digest_again": digest(fresh)[1],
              "saved": saved, "loaded": loaded,
              "layers": len(decoder_layers(backend._policy.model))}  # fmt: skip
    fresh.export_hf(folder.parent / "export")
    return result
