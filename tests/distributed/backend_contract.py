"""What every backend in every layout must do alike: cases that `ranks` runs in the layouts of its launches.

`test_backend_contract.py` compares them with the same cases in one process, `run_all` with the settings of no layout. A
backend is made by its name in the settings; what a case tells is what a backend gives to anyone: metrics, log-probs by
sample, exported weights. Two ranks in plain FSDP2 run all cases, other layouts those of `CORE`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from made_batches import a_batch, a_group, a_sample
from msgspec.structs import replace
from ranks import chosen, settings
from safetensors import safe_open

from asyncrl import config as configuration
from asyncrl.errors import AsyncRLError
from asyncrl.plugins import find
from learners.backends import muon, start_weights
from learners.backends.base import Backend
from learners.backends.sharded_checkpoint import local_tensor, own_name
from learners.batch.assembly import _minibatch
from learners.batch.micro_batches import Minibatch, Sample
from learners.gang.gang import Gang
from learners.models import policy_model
from learners.step import update
from learners.step.resilient_step import StepRunner
from learners.step.update import train_step

STEPS = 3


def make_config(model: Path, *, extra: str = "") -> configuration.Config:
    return settings(
        model,
        """
data.max_prompt_tokens = 16
learner.optim.max_grad_norm = 0.05
learner.algorithm.entropy_coeff = 0.01
[[reward]]
function = "a:b"
""",
        extra,
    )


def make_backend(config: configuration.Config, gang: Gang) -> Backend:
    """The backend of these settings."""
    made: Backend = find("asyncrl.backends", config.learner.backend)(config, gang)
    return made


def samples(count: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt, length = int(rng.integers(1, 8)), int(rng.integers(1, 14))
        mask = (rng.random(length) < 0.9).astype(np.uint8)
        made.append(
            Sample(
                rng.integers(3, 20, prompt + length).astype(np.int32),
                prompt,
                -3 * rng.random(length).astype("f4"),
                mask,
                float(rng.normal()),
                number,
            )
        )
    return made


def cut(count: int, seed: int, config: configuration.Config, gang: Gang) -> list[Minibatch]:
    """This rank's mini-batches: the samples in as many parts as the algorithm has mini-batches. For an aggregation over
    sequences, three of them are the rows of one sample.
    """
    every = samples(count, seed)
    if config.learner.algorithm.aggregation.startswith("seq"):
        every = [replace(one, owner=one.number // 3) for one in every]
    parts = config.learner.algorithm.minibatches
    return [
        _minibatch(
            every[part::parts],
            ranks=gang.shares,
            max_tokens=config.learner.micro_batch_tokens,
            packing=config.learner.packing,
        )[gang.topology.share]
        for part in range(parts)
    ]


def digest(backend: Backend) -> tuple[dict[str, list[float]], str, list[str]]:
    """Every exported tensor as numbers, a digest of all bytes, and the names; empty but on rank 0."""
    total, values, names = hashlib.blake2b(), {}, []
    for name, data in backend.iter_hf_weights():
        total.update(data)
        names.append(name)
        values[name] = np.array(data).view(np.float32).tolist()
    return values, total.hexdigest(), names


def case(model: Path, gang: Gang, *, extra: str, count: int = 14) -> dict[str, Any]:
    """Three steps: metrics of each and the weights after them."""
    config = make_config(model, extra=extra)
    backend = make_backend(config, gang)
    backend.self_check()
    metrics, to_samples = [], []
    for step in range(1, STEPS + 1):
        share = cut(count, step, config, gang)
        result = train_step(share, backend=backend, gang=gang, config=config.learner, step=step)
        metrics.append(result.metrics)
        to_samples.append(sorted(result.weights.items()))
    values, whole, names = digest(backend)
    specs = [(spec.name, spec.dtype, spec.shape) for spec in backend.weight_specs()]
    return {
        "metrics": metrics,
        "weights": values,
        "digest": whole,
        "names": names,
        "specs": specs,
        "to_samples": to_samples,
    }


CASES = {
    "plain": "",
    "small_rows": "learner.micro_batch_tokens=40",
    "padded": "learner.packing=false",
    "sequence_mean": "learner.algorithm.aggregation=seq-mean-token-mean",
    "bypass": "learner.algorithm.preset=bypass",
    "minibatches": "learner.algorithm.minibatches=2",
    "checkpointing": "learner.gradient_checkpointing=true",
    "offload": "learner.cpu_offload=true",
    "muon": "learner.optim.name=muon;learner.optim.weight_decay=0.1",
    "dense_mask": "model.attn_implementation=sdpa",
    "few": "",  # fewer samples than ranks
}


#: Of these the cases of every layout, and those of some layouts beside them.
CORE = ("plain", "small_rows", "minibatches", "few", "kl_cov")
MORE = {
    "replicate": ("muon",),
    "sequence": ("padded", "checkpointing", "dense_mask", "high_entropy"),
    "tensor": ("checkpointing",),
}


def run_all(
    model: Path,
    gang: Gang,
    out: Path,
    *,
    layout: str = "",
    others: Mapping[str, Path] = MappingProxyType({}),
    wanted: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Results by case; checkpoints and an export under `out`. `others`: checkpoints of other layouts at step 2;
    `wanted`: cases, else those of the layout."""
    wanted = wanted or trained_of(layout)
    also = f"{layout};" if layout else ""
    results = {
        name: case(model, gang, extra=also + extra, count=1 if name == "few" else 14)
        for name, extra in CASES.items()
        if name in wanted
    }
    results |= {name: through_a_trial(model, gang, extra, also) for name, extra in WHOLE.items() if name in wanted}
    if "megatron" not in layout:
        results["start"] = start(model, gang, layout)
        results["whole_gradients"] = whole_gradients(model, gang, layout)
        results["mixed"] = mixed_sequences(model, gang, layout)
    results["half"] = half_precision(model, gang, layout)
    results["forward"] = forward(model, gang, layout)
    results["poison"] = {how: poison(model, gang, how, layout) for how in (("nan",) if layout else ("raises", "nan"))}
    results["resume"] = resume(model, gang, out / "checkpoint", layout)
    if not layout:
        results["resume_muon"] = resume(model, gang, out / "muon" / "checkpoint", CASES["muon"])
    if "muon" in wanted:
        results["orthogonalized"] = orthogonalized_matrices(model, gang, layout)
    results["from_others"] = {
        name: continued(model, gang, folder, layout, again=out / f"again_{name}") for name, folder in others.items()
    }
    return results | words(gang)


def wanted_of(layout: str) -> tuple[str, ...]:
    """The cases of a layout."""
    if not layout:
        return (*CASES, *WHOLE)
    return (*CORE, *(name for word, names in MORE.items() if word in layout for name in names))


def long_of(layout: str) -> tuple[str, ...]:
    """Those of the long form: four ranks take mini-batches with `kl_cov`."""
    if not layout:
        return ()
    return ("small_rows", "minibatches", "checkpointing") if "ranks=4" in layout else ("small_rows",)


def trained_of(layout: str) -> tuple[str, ...]:
    return tuple(chosen(wanted_of(layout), long_of(layout)))


def to_samples(share: Minibatch, found: list[Any], gang: Gang) -> dict[int, list[float]]:
    """Numbers by micro-batch `[N]` of this rank as those of every sample, of all shares."""
    mine: dict[int, list[float]] = {}
    for micro, values in zip(share.micro, found, strict=True):
        for row, value in zip(micro.sequences.tolist(), values.float().cpu().tolist(), strict=True):
            mine.setdefault(int(micro.samples[row]), []).append(value)
    every: dict[int, list[float]] = {}
    for text in gang.gather_shares(msgspec.msgpack.encode(mine)):
        every |= msgspec.msgpack.decode(text, type=dict[int, list[float]])
    return dict(sorted(every.items()))


def forward(model: Path, gang: Gang, layout: str) -> dict[str, Any]:
    """Every number that a forward pass gives, by sample, and those of the reference after a step."""
    config = make_config(model, extra=layout)
    backend = make_backend(config, gang)
    share = cut(14, 1, config, gang)
    (part,) = share
    calls: list[int] = []
    given = policy_model.split_logprobs
    policy_model.split_logprobs = lambda *inputs, **more: calls.append(len(inputs)) or given(*inputs, **more)
    try:
        numbers = backend.forward_numbers(part.micro, squares=True)
    finally:
        policy_model.split_logprobs = given
    found = {
        "split_heads": len(calls),
        "logprobs": to_samples(part, backend.forward_logprobs(part.micro), gang),
        "again": to_samples(part, [piece.logprobs for piece in numbers], gang),
        "entropy": to_samples(part, [piece.entropy for piece in numbers], gang),
        "squares": to_samples(part, [piece.square_sums for piece in numbers], gang),
    }
    train_step(share, backend=backend, gang=gang, config=config.learner, step=1)
    return found | {
        "reference": to_samples(part, backend.reference_logprobs(part.micro), gang),
        "after": to_samples(part, backend.forward_logprobs(part.micro), gang),
    }


def orthogonalized_matrices(model: Path, gang: Gang, layout: str) -> list[list[int]]:
    """The sizes of the matrices that a step of Muon makes orthogonal, by rank."""
    config = make_config(model, extra=f"{layout};{CASES['muon']}")
    backend = make_backend(config, gang)
    sizes: list[int] = []
    given = muon.orthogonalized
    muon.orthogonalized = lambda matrix: sizes.append(matrix.numel()) or given(matrix)
    try:
        train_step(cut(14, 1, config, gang), backend=backend, gang=gang, config=config.learner, step=1)
    finally:
        muon.orthogonalized = given
    return [msgspec.msgpack.decode(text) for text in gang.gather(msgspec.msgpack.encode(sizes))]


def start(model: Path, gang: Gang, layout: str) -> dict[str, Any]:
    """The start weights read part by part and whole: digests of weights and log-probs, what was read of how much."""
    found: dict[str, Any] = {}
    fill, counts = start_weights.fill, list[int]()
    start_weights.fill = lambda *given: counts.append(fill(*given)) or counts[-1]
    try:
        for how in ("parts", "whole"):
            config = make_config(model, extra=f"{layout};learner.load={how}")
            backend: Any = make_backend(config, gang)
            (part,) = cut(14, 1, config, gang)
            numbers = b"".join(values.numpy().tobytes() for values in backend.forward_logprobs(part.micro))
            buffers = {name: value.tolist() for name, value in backend._policy.named_buffers()}
            found[how] = [digest(backend)[1], hashlib.blake2b(numbers).hexdigest(), repr(buffers)]
            mine = sum(local_tensor(one).numel() for one in backend._policy.parameters())
    finally:
        start_weights.fill = fill
    every = [msgspec.msgpack.decode(text) for text in gang.gather(msgspec.msgpack.encode([*counts, mine]))]
    return found | {"counts": every, "elements": sum(p.numel() for p in backend._policy.parameters())}


def mixed_sequences(model: Path, gang: Gang, layout: str) -> list[str]:
    """What the check at the start says, on every rank, of a model whose packed sequences see each other."""
    said = []
    for attention in ("auto", "sdpa"):
        backend: Any = make_backend(make_config(model, extra=f"{layout};model.attn_implementation={attention}"), gang)
        body = backend._policy.model.base_model
        forward = body.forward
        body.forward = lambda forward=forward, **given: forward(**{**given, "position_ids": None})
        try:
            backend.self_check()
            said.append("nothing")
        except AsyncRLError as error:
            said.append(error.code)
    return [text.decode() for text in gang.gather(" ".join(said).encode())]


def words(gang: Gang) -> dict[str, Any]:
    """What the collectives of the gang bring."""
    parts = [f"part {number}".encode() * (number + 1) for number in range(gang.shares)]
    return {
        "gather": [part.decode() for part in gang.gather(f"rank {gang.rank}".encode() * (gang.rank + 1))],
        "share": gang.share(b"order" if gang.lead else None).decode(),
        "scatter": [part.decode() for part in gang.gather(gang.scatter(parts if gang.lead else None))],
        "total": gang.total({"x": gang.topology.share + 1.0, "y_max": float(gang.rank)}),
    }


def half_precision(model: Path, gang: Gang, layout: str) -> dict[str, Any]:
    """bf16 compute over fp32 master weights: exported bytes are half as many."""
    config = make_config(model, extra=f"{layout};model.dtype=bfloat16")
    backend = make_backend(config, gang)
    backend.self_check()
    metrics = train_step(cut(14, 1, config, gang), backend=backend, gang=gang, config=config.learner, step=1).metrics
    exported = {name: data.nbytes for name, data in backend.iter_hf_weights()}
    return {"metrics": metrics, "bytes": exported, "specs": backend.weight_specs()}


def whole_gradients(model: Path, gang: Gang, layout: str) -> list[int]:
    """Elements of whole gradients that this rank holds at the loss of each micro-batch of a step."""
    config = make_config(model, extra=f"{layout};learner.micro_batch_tokens=40")
    backend: Any = make_backend(config, gang)
    inner, found = update.loss_for, list[int]()

    def held() -> int:
        groups = [group for unit in backend._units for group in unit._get_fsdp_state()._fsdp_param_groups]
        shards = [one for group in groups for one in group.fsdp_params]
        whole = [one.unsharded_accumulated_grad for one in shards]
        whole += [one._unsharded_param.grad for one in shards if hasattr(one, "_unsharded_param")]
        return sum(grad.numel() for grad in whole if grad is not None)

    def watched(algorithm: Any) -> Any:
        def loss(inputs: Any) -> Any:
            found.append(held())
            return inner(algorithm)(inputs)

        return loss

    update.loss_for = watched  # type: ignore[assignment]
    try:
        train_step(cut(14, 1, config, gang), backend=backend, gang=gang, config=config.learner, step=1)
    finally:
        update.loss_for = inner
    return found


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


def through_a_trial(model: Path, gang: Gang, extra: str, also: str = "") -> dict[str, Any]:
    """Two steps from claimed batches, as the learner makes them."""
    config = make_config(model, extra=also + ";".join(f"learner.algorithm.{part}" for part in extra.split(";")))
    backend = make_backend(config, gang)
    trial = StepRunner(config.learner, gang=gang, backend=backend, say=str, quarantine=lambda *_: None)
    metrics, to_samples = [], []
    for step in (1, 2):
        rng = np.random.default_rng(step)
        batch = a_batch(
            step,
            0,
            [
                a_group(
                    n,
                    rng.integers(3, 20, 4),
                    [
                        a_sample(
                            i,
                            rng.integers(3, 20, 3 + n + i),
                            -2.5 - rng.random(3 + n + i).astype("f4"),
                            rng.integers(0, 3),
                        )
                        for i in range(3)
                    ],
                )
                for n in range(6)
            ],
        )
        shares = trial.cut(batch)[1] if gang.lead else None
        given: Any = batch if gang.lead else None
        result, _ = trial.train(gang.scatter(shares), step=step, batch=given)
        assert not result.broken, result.broken
        metrics.append(result.metrics)
        to_samples.append(sorted(result.weights.items()))
    values, whole, names = digest(backend)
    return {
        "metrics": metrics,
        "weights": values,
        "digest": whole,
        "names": names,
        "to_samples": to_samples,
        "kl_coeff": trial.coefficients.kl,
        "coefficients": trial.coefficients,
    }


MARK = -7.25


def poison(model: Path, gang: Gang, how: str, layout: str) -> dict[str, Any]:
    """A step whose loss breaks on one share alone, for two of six groups; the ranks find them and train the rest."""
    config = make_config(model, extra=layout)
    backend = make_backend(config, gang)
    rng = np.random.default_rng(5)
    groups = [
        a_group(
            n,
            rng.integers(3, 20, 4),
            [
                a_sample(i, rng.integers(3, 20, 6 + n), np.full(6 + n, MARK if n in (1, 4) and i == 0 else -1.0), i)
                for i in range(3)
            ],
        )
        for n in range(6)
    ]
    inner = update.loss_for

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
    trial = StepRunner(
        config.learner,
        gang=gang,
        backend=backend,
        say=str,
        quarantine=lambda step, group, why: found.update({group: why}),
    )
    update.loss_for = broken  # type: ignore[assignment]
    try:
        batch = a_batch(1, 0, groups)
        shares = trial.cut(batch)[1] if gang.lead else None
        given: Any = batch if gang.lead else None
        result, left = trial.train(gang.scatter(shares), step=1, batch=given)
    finally:
        update.loss_for = inner
    values, _, names = digest(backend)
    return {
        "found": found,
        "metrics": [result.metrics],
        "broken": result.broken,
        "weights": values,
        "names": names,
        "left": [group.group for group in left.groups] if left is not None else [],
    }


def resume(model: Path, gang: Gang, folder: Path, layout: str) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step; then the third step again from the checkpoint in a new backend. What is
    read back was written after the third step, from a snapshot; `written` compares it with what `save` wrote before."""
    config = make_config(model, extra=layout)
    backend = make_backend(config, gang)
    for step in (1, 2):
        train_step(cut(14, step, config, gang), backend=backend, gang=gang, config=config.learner, step=step)
    if gang.lead:
        folder.mkdir(parents=True)
    gang.barrier()
    backend.forward_logprobs(cut(14, 3, config, gang)[0].micro)  # a forward without a backward comes before both
    directly = backend.save(folder).read_bytes()
    held = backend.snapshot()
    saved = digest(backend)[1]
    third = train_step(cut(14, 3, config, gang), backend=backend, gang=gang, config=config.learner, step=3).metrics
    after = digest(backend)[1]
    written = b"same" if held.save(folder).read_bytes() == directly else b"other"
    gang.barrier()
    fresh = make_backend(config, gang)
    fresh.self_check()
    fresh.load(folder)
    loaded = digest(fresh)[1]
    again = train_step(cut(14, 3, config, gang), backend=fresh, gang=gang, config=config.learner, step=3).metrics
    result = {
        "third": third,
        "again": again,
        "digest": after,
        "digest_again": digest(fresh)[1],
        "saved": saved,
        "loaded": loaded,
        "written": [word.decode() for word in gang.gather(written)],
    }
    fresh.export_hf(folder.parent / "export")
    return result


def continued(
    model: Path, gang: Gang, checkpoint: Path, layout: str = "", *, again: Path | None = None
) -> dict[str, Any]:
    """The third step from a checkpoint of `resume` that was written in another layout; before it the checkpoint is
    written once more, to `again`."""
    config = make_config(model, extra=layout)
    backend = make_backend(config, gang)
    backend.load(checkpoint)
    loaded = digest(backend)[1]
    if again is not None:
        if gang.lead:
            again.mkdir(parents=True)
        gang.barrier()
        backend.save(again)
    third = train_step(cut(14, 3, config, gang), backend=backend, gang=gang, config=config.learner, step=3).metrics
    values, _, names = digest(backend)
    return {"metrics": [third], "weights": values, "names": names, "loaded": loaded}


def contents(checkpoint: Path) -> dict[str, str]:
    """Weights and optimizer states of a checkpoint, whole tensors by name: digests of their bytes."""
    boxes: dict[str, list[tuple[list[int], Any]]] = {}
    for path in checkpoint.glob("shard_*.safetensors"):
        with safe_open(path, framework="np") as file:
            for key, start in msgspec.json.decode(file.metadata()["starts"]).items():
                value = file.get_tensor(key)
                begin = ([start] if isinstance(start, int) else start) + [0] * value.ndim
                boxes.setdefault(own_name(key), []).append((begin[: value.ndim], value))
    found = {}
    for name, parts in boxes.items():
        ends = [np.add(start, value.shape) for start, value in parts]
        whole = np.full(np.max(ends, axis=0).astype(int), np.nan, parts[0][1].dtype)
        for start, value in parts:
            whole[tuple(slice(low, low + size) for low, size in zip(start, value.shape, strict=True))] = value
        found[name] = hashlib.blake2b(whole.tobytes()).hexdigest()
    return found
