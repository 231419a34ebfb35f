"""Settings that the learner's backend `megatron` does not do, told before anything starts.

Pure. Guarantees:
1. every refusal names the setting and what to use instead;
2. nothing is refused for another backend.

Example: `learner.backend = "megatron"` with `learner.algorithm.advantage = "gae"`: it trains no critic, use fsdp2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.config.sections import algorithm_catalogue as algorithms

if TYPE_CHECKING:
    from asyncrl.config import Config

#: Code, message, path of the key.
Conflict = tuple[str, str, tuple[str, ...]]


def problems(config: Config) -> Iterator[Conflict]:
    """What contradicts the backend."""
    learner, code = config.learner, "config.conflict"
    if learner.backend != "megatron":
        return
    if learner.mode == "reward_model":
        yield code, "backend 'megatron' trains no reward model: use fsdp2", ("learner", "mode")
    if config.model.dtype == "float16":
        yield code, "backend 'megatron' has no loss scale for float16: use bfloat16", ("model", "dtype")
    if learner.cpu_offload:
        yield code, "backend 'megatron' has no cpu_offload: use fsdp2", ("learner", "cpu_offload")
    for name in ("reference_offload", "offload_idle"):
        if getattr(learner, name):
            yield code, f"backend 'megatron' has no {name}: use fsdp2", ("learner", name)
    if learner.optim.name != "adamw":
        yield code, f"backend 'megatron' has no {learner.optim.name}: use adamw or fsdp2", ("learner", "optim", "name")
    if learner.liger:
        yield code, "backend 'megatron' has no liger: use fsdp2", ("learner", "liger")
    if learner.compile:
        yield code, "backend 'megatron' does not compile layers: use fsdp2", ("learner", "compile")
    entry = algorithms.ADVANTAGES.get(learner.algorithm.advantage) if learner.mode == "rl" else None
    for need in sorted({"critic", "process"} & set(entry.needs if entry else ())):
        what = f"learner.algorithm.advantage = {learner.algorithm.advantage!r} needs a {need} model, which backend "
        yield code, what + "'megatron' does not train: use fsdp2", ("learner", "algorithm", "advantage")
    if learner.megatron.sequence_parallel and learner.parallel.tensor == 1:
        what = "learner.megatron.sequence_parallel splits rows over tensor places: learner.parallel.tensor is 1"
        yield code, what, ("learner", "megatron", "sequence_parallel")


def model_problems(config: Config, model: Mapping[str, Any]) -> Iterator[Conflict]:
    """What of a model's config.json does not fit the layout, beside its heads."""
    parallel = config.learner.parallel
    if config.learner.backend != "megatron":
        return
    wide, layers = model.get("intermediate_size"), model.get("num_hidden_layers")
    if isinstance(wide, int) and wide % parallel.tensor:
        yield (
            "config.conflict",
            f"learner.parallel.tensor = {parallel.tensor}: intermediate_size = {wide} of the "
            "model does not divide by it",
            ("learner", "parallel", "tensor"),
        )
    if isinstance(layers, int) and layers < parallel.pipeline:
        yield (
            "config.conflict",
            f"learner.parallel.pipeline = {parallel.pipeline}: the model has num_hidden_layers = "
            f"{layers}, and every stage needs one",
            ("learner", "parallel", "pipeline"),
        )
