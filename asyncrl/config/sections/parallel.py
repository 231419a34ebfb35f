"""Which layouts of `[learner.parallel]` fit together, fit the backend and fit the model.

`learners.gang.topology` says who
stands where. Pure. Guarantees:
1. what a backend cannot split is refused before anything starts, with the arithmetic;
2. the ranks of this host alone are looked at: with several hosts the gang checks the number of all ranks when it joins.
A backend of a plugin is asked nothing here.

Example: 4 ranks with tensor = 2 and replicate = 4 leave 2 shares, which do not divide by 4: refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.config.sections import lora, megatron

if TYPE_CHECKING:
    from asyncrl.config import Config

HERE = ("learner", "parallel")
NAMES = ("replicate", "tensor", "sequence", "pipeline", "expert")
#: What the built-in backends split.
SPLITS = {"fsdp2": ("replicate", "tensor", "sequence", "expert"), "megatron": ("tensor", "pipeline")}
#: Of these a backend takes one at a time.
ALONE = {"fsdp2": ("tensor", "sequence", "expert")}

#: Code, message, path of the key.
Conflict = tuple[str, str, tuple[str, ...]]


def problems(config: Config) -> Iterator[Conflict]:
    """Layouts that contradict the ranks or the backend."""
    learner = config.learner
    yield from megatron.problems(config)
    yield from lora.problems(config)
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
    yield from _of_the_optimizer(config)
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


def _of_the_optimizer(config: Config) -> Iterator[Conflict]:
    """What has only been made for weights that FSDP alone shards."""
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
    """Layouts that the model of this config.json does not divide into: heads and experts."""
    parallel = config.learner.parallel
    model = model.get("text_config") or model
    yield from megatron.model_problems(config, model)
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
