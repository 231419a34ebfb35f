"""Rules of `[learner]`: layouts of its ranks, what a backend supports, adapters, profiles.

Guarantees:
1. what a backend cannot do is refused before anything starts, with the setting and an alternative;
2. only the ranks of this host are checked; with several hosts the gang checks the number of ranks when they join.
Backends of plugins are not checked here.

Example: 4 ranks with tensor = 2 and replicate = 4 leave 2 shares, which do not divide by 4: refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.rules import Conflict
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.lora import TAKE_WHOLE
from asyncrl.config.sections.profile import parse_steps
from asyncrl.config.tree import Config

HERE = ("learner", "parallel")
NAMES = ("replicate", "tensor", "sequence", "pipeline", "expert")
#: What the built-in backends can split.
SPLITS = {"fsdp2": ("replicate", "tensor", "sequence", "expert"), "megatron": ("tensor", "pipeline")}
#: Splits of a backend that cannot be combined.
ALONE = {"fsdp2": ("tensor", "sequence", "expert")}


def problems(config: Config) -> Iterator[Conflict]:
    yield from megatron_problems(config)
    yield from _lora_problems(config)
    yield from _layout_problems(config)
    yield from _profile_problems(config)


def _layout_problems(config: Config) -> Iterator[Conflict]:
    learner = config.learner
    sizes = {name: int(getattr(learner.parallel, name)) for name in NAMES}
    for name in NAMES:
        if sizes[name] > 1 and name not in SPLITS.get(learner.backend, NAMES):
            yield (
                "config.conflict",
                f"learner.parallel.{name} = {sizes[name]}: backend {learner.backend!r} cannot "
                f"split so; it has {', '.join(SPLITS[learner.backend])}",
                (*HERE, name),
            )
    together = [name for name in ALONE.get(learner.backend, ()) if sizes[name] > 1]
    if len(together) > 1:
        yield (
            "config.conflict",
            f"learner.parallel.{' and .'.join(together)}: backend {learner.backend!r} takes one of them at a time",
            (*HERE, together[0]),
        )
    if learner.backend == "fsdp2" and sizes["expert"] > 1 and sizes["replicate"] > 1:
        yield (
            "config.conflict",
            "learner.parallel.expert and .replicate: backend 'fsdp2' takes one of them at a time",
            (*HERE, "expert"),
        )
    if learner.backend == "fsdp2" and learner.cpu_offload and max(sizes["tensor"], sizes["expert"]) > 1:
        yield (
            "config.conflict",
            "learner.cpu_offload with learner.parallel.tensor or .expert: weights that are split stay on the device",
            ("learner", "cpu_offload"),
        )
    yield from _optimizer_problems(config)
    each = sizes["tensor"] * sizes["sequence"] * sizes["pipeline"]
    if learner.ranks % each:
        yield (
            "config.conflict",
            f"learner.ranks = {learner.ranks} does not divide by tensor * sequence * pipeline = {each}",
            HERE,
        )
        return
    for name in ("replicate", "expert"):
        if (learner.ranks // each) % sizes[name]:
            yield (
                "config.conflict",
                f"learner.ranks / (tensor * sequence * pipeline) = {learner.ranks // each} does "
                f"not divide by learner.parallel.{name} = {sizes[name]}",
                (*HERE, name),
            )


def _optimizer_problems(config: Config) -> Iterator[Conflict]:
    """Features that only support weights sharded by FSDP alone."""
    learner = config.learner
    if learner.backend != "fsdp2":
        return
    split = [name for name in ("tensor", "sequence", "expert") if getattr(learner.parallel, name) > 1]
    for switch in ("compile", "liger"):
        if getattr(learner, switch) and split:
            yield (
                "config.conflict",
                f"learner.{switch} with learner.parallel.{split[0]} is not supported",
                ("learner", switch),
            )
    for name in ("optim", "critic", "process_reward"):
        if getattr(learner, name).name == "muon" and {"tensor", "expert"} & set(split):
            yield (
                "config.conflict",
                f"learner.{name}.name = 'muon' needs whole matrices: not with learner.parallel.{split[0]}",
                ("learner", name, "name"),
            )


def model_problems(config: Config, model: Mapping[str, Any]) -> Iterator[Conflict]:
    """Heads and experts of the model's config.json that the layout does not divide."""
    parallel = config.learner.parallel
    model = model.get("text_config") or model
    yield from _megatron_model_problems(config, model)
    heads = model.get("num_attention_heads")
    counts = {
        "num_attention_heads": (heads, ("tensor", "sequence")),
        "num_key_value_heads": (model.get("num_key_value_heads") or heads, ("tensor", "sequence")),
        "num_experts": (model.get("num_experts") or model.get("num_local_experts") or 0, ("expert",)),
    }
    for key, (count, names) in counts.items():
        for name in names:
            size = int(getattr(parallel, name))
            if size > 1 and isinstance(count, int) and (count == 0 or count % size):
                yield (
                    "config.conflict",
                    f"learner.parallel.{name} = {size}: {key} = {count} of the model does not divide by it",
                    (*HERE, name),
                )


def megatron_problems(config: Config) -> Iterator[Conflict]:
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


def _megatron_model_problems(config: Config, model: Mapping[str, Any]) -> Iterator[Conflict]:
    """Sizes in a model's config.json that do not fit the layout, other than heads and experts."""
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


def _lora_problems(config: Config) -> Iterator[Conflict]:
    """Settings that cannot be combined with adapters."""
    learner, here, code = config.learner, ("learner", "lora", "rank"), "config.conflict"
    if not learner.lora.rank:
        return
    if learner.backend == "megatron":
        yield code, "learner.lora.rank: backend 'megatron' trains all weights: use fsdp2", here
    for name in ("tensor", "expert"):
        if getattr(learner.parallel, name) > 1:
            yield code, f"learner.lora.rank with learner.parallel.{name} is not supported: use FSDP alone", here
    if learner.optim.name == "muon":
        yield (
            code,
            "learner.lora.rank with learner.optim.name = 'muon', which is for whole matrices: use adamw",
            ("learner", "optim", "name"),
        )
    if learner.compile:
        yield code, "learner.lora.rank with learner.compile is not supported", ("learner", "compile")
    if learner.mode == "reward_model":
        yield code, "learner.lora.rank: a reward model trains its head too: use rl, sft or dpo", ("learner", "mode")
    if learner.lora.publish == "adapter":
        what, place = "learner.lora.publish = 'adapter'", ("learner", "lora", "publish")
        if config.producers.engine in TAKE_WHOLE:
            yield code, f"{what}: engine {config.producers.engine!r} takes whole weights alone: use auto", place
        if config.weightsync.in_place:
            yield code, f"{what} with weightsync.in_place: an adapter needs a second copy, its base: use auto", place


def _profile_problems(config: Config) -> Iterator[Conflict]:
    profile, here = config.learner.profile, ("learner", "profile")
    try:
        parse_steps(profile.steps)
    except ValueError as error:
        yield "config.type", f"learner.profile.steps: {error}", (*here, "steps")
    if profile.memory and not profile.steps:
        yield "config.conflict", "learner.profile.memory needs learner.profile.steps", (*here, "memory")
