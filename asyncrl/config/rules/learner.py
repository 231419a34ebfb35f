"""Rules of `[learner]`: layouts of its ranks, settings that exclude each other, adapters, profiles.

What a backend cannot do at all is in `asyncrl.config.capabilities`. Guarantees:
1. sizes that do not fit are refused before anything starts, with the setting and the arithmetic;
2. only the ranks of this host are checked; with several hosts the gang checks the number of ranks when they join.
Backends of plugins are not checked here.

Example: 4 ranks with tensor = 2 and replicate = 4 leave 2 shares, which do not divide by 4: refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.model_facts import count_experts
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections.profile import parse_steps
from asyncrl.config.tree import Config

NAMES = ("replicate", "tensor", "sequence", "pipeline", "expert")
#: Attentions with which rows are split beyond the number of heads.
BY_CHUNK = ("auto", "sdpa", "varlen")


def problems(config: Config) -> Iterator[Conflict]:
    yield from megatron_problems(config)
    yield from _lora_problems(config)
    yield from _layout_problems(config)
    yield from _replay_problems(config)
    yield from _profile_problems(config)


def _layout_problems(config: Config) -> Iterator[Conflict]:
    learner = config.learner
    sizes = {name: int(getattr(learner.parallel, name)) for name in NAMES}
    if learner.backend == "fsdp2" and min(sizes["tensor"], sizes["expert"]) > 1:
        yield conflict(
            "learner.parallel.tensor",
            "learner.parallel.tensor and .expert: backend 'fsdp2' splits a model by one plan of transformers: set one "
            "to 1, or use megatron",
        )
    if learner.backend == "fsdp2" and learner.cpu_offload and max(sizes["tensor"], sizes["expert"]) > 1:
        yield conflict(
            "learner.cpu_offload",
            "learner.cpu_offload with learner.parallel.tensor or .expert: weights that are split stay on the device",
        )
    yield from _optimizer_problems(config)
    if ":" in learner.device and learner.ranks > 1:
        yield conflict(
            "learner.device",
            f"learner.device = {learner.device!r} with learner.ranks = {learner.ranks}: "
            "every rank would take that one device; use auto, or the type alone",
        )
    each, every = sizes["tensor"] * sizes["sequence"] * sizes["pipeline"], learner.ranks * config.cluster.learner_hosts
    named = "learner.ranks" + " * cluster.learner_hosts" * (config.cluster.learner_hosts > 1)
    if every % each:
        what = f"{named} = {every} does not divide by tensor * sequence * pipeline = {each}"
        yield conflict("learner.parallel", what)
        return
    copies = sizes["pipeline"] * sizes["replicate"]
    for name, words, ranks in (
        ("replicate", "(tensor * sequence * pipeline)", every // each),
        ("expert", "(pipeline * replicate)", every // copies),
    ):
        if ranks % sizes[name]:
            yield conflict(
                f"learner.parallel.{name}",
                f"{named} / {words} = {ranks} does not divide by learner.parallel.{name} = {sizes[name]}",
            )


def _replay_problems(config: Config) -> Iterator[Conflict]:
    learner, here = config.learner, "learner.router_replay"
    if not learner.router_replay:
        return
    if learner.backend not in ("fsdp2", "megatron"):
        yield conflict(here, f"{here} with learner.backend = {learner.backend!r} is not supported: use fsdp2")
    if learner.mode != "rl":
        yield conflict(here, f"{here} with learner.mode = {learner.mode!r}: an engine chooses experts in mode rl alone")
    if learner.compile:
        yield conflict(here, f"{here} with learner.compile is not supported")
    if learner.parallel.sequence > 1:
        yield conflict(here, f"{here} with learner.parallel.sequence is not supported: rows must be whole")
    if config.producers.speculative_tokens:
        what = "the experts of drafts are not recorded"
        yield conflict(here, f"{here} with producers.speculative_tokens is not supported: {what}")


def _optimizer_problems(config: Config) -> Iterator[Conflict]:
    """Features that only support weights sharded by FSDP alone."""
    learner = config.learner
    if learner.backend != "fsdp2":
        return
    split = [name for name in ("tensor", "sequence", "expert") if getattr(learner.parallel, name) > 1]
    for switch in ("compile", "liger"):
        if getattr(learner, switch) and split:
            yield conflict(f"learner.{switch}", f"learner.{switch} with learner.parallel.{split[0]} is not supported")
    for name in ("optim", "critic", "process_reward"):
        cut = [one for one in split if one != "sequence"]  # which leaves matrices whole
        if getattr(learner, name).name == "muon" and cut:
            yield conflict(
                f"learner.{name}.name",
                f"learner.{name}.name = 'muon' needs whole matrices: not with learner.parallel.{cut[0]}",
            )


def model_problems(config: Config, model: Mapping[str, Any]) -> Iterator[Conflict]:
    """Heads and experts of the model's config.json that the layout does not divide."""
    parallel = config.learner.parallel
    model = model.get("text_config") or model
    yield from _megatron_model_problems(config, model)
    if config.learner.router_replay and model and not count_experts(model):
        yield conflict("learner.router_replay", "learner.router_replay: the model is no mixture of experts")
    heads = model.get("num_attention_heads")
    splits = ("tensor",) if config.learner.backend == "fsdp2" else ("tensor", "sequence")
    counts = {
        "num_attention_heads": (heads, splits),
        "num_key_value_heads": (model.get("num_key_value_heads") or heads, splits),
        "num_experts": (count_experts(model), ("expert",)),
    }
    for key, (count, names) in counts.items():
        for name in names:
            size = int(getattr(parallel, name))
            if size > 1 and isinstance(count, int) and (count == 0 or count % size):
                yield conflict(
                    f"learner.parallel.{name}",
                    f"learner.parallel.{name} = {size}: {key} = {count} of the model does not divide by it",
                )
    yield from _chunk_problems(config, {key: counts[key][0] for key in ("num_attention_heads", "num_key_value_heads")})


def _chunk_problems(config: Config, heads: Mapping[str, Any]) -> Iterator[Conflict]:
    """Rows over more ranks than the heads divide by, with an attention that takes whole rows."""
    parallel, attention = config.learner.parallel, config.model.attn_implementation
    if config.learner.backend != "fsdp2" or parallel.sequence == 1 or attention in BY_CHUNK:
        return
    for key, count in heads.items():
        if isinstance(count, int) and count % (parallel.sequence * parallel.tensor):
            yield conflict(
                "learner.parallel.sequence",
                f"learner.parallel.sequence = {parallel.sequence}: {key} = {count} of the model does not divide by it, "
                f"and model.attn_implementation = {attention!r} takes whole rows: use sdpa, or varlen on CUDA",
            )


def megatron_problems(config: Config) -> Iterator[Conflict]:
    learner = config.learner
    if learner.backend != "megatron":
        return
    if learner.megatron.sequence_parallel and learner.parallel.tensor == 1:
        what = "learner.megatron.sequence_parallel splits rows over tensor places: learner.parallel.tensor is 1"
        yield conflict("learner.megatron.sequence_parallel", what)
    if learner.critic.name != "adamw":
        what = f"learner.critic.name = {learner.critic.name!r}: backend 'megatron' has adamw alone"
        yield conflict("learner.critic.name", what)


def _megatron_model_problems(config: Config, model: Mapping[str, Any]) -> Iterator[Conflict]:
    """Sizes in a model's config.json that do not fit the layout, other than heads and experts."""
    parallel = config.learner.parallel
    if config.learner.backend != "megatron":
        return
    for name in ("intermediate_size", "moe_intermediate_size"):
        wide = model.get(name)
        if isinstance(wide, int) and wide % parallel.tensor and (name[0] == "i" or parallel.expert == 1):
            yield conflict(
                "learner.parallel.tensor",
                f"learner.parallel.tensor = {parallel.tensor}: {name} = {wide} of the model does not divide by it",
            )
    if count_experts(model) and parallel.tensor > 1 and not config.learner.megatron.sequence_parallel:
        yield conflict(
            "learner.megatron.sequence_parallel",
            f"learner.parallel.tensor = {parallel.tensor} with a mixture of experts: Megatron-core trains it with "
            "learner.megatron.sequence_parallel = true alone",
        )
    layers = model.get("num_hidden_layers")
    if isinstance(layers, int) and layers < parallel.pipeline:
        yield conflict(
            "learner.parallel.pipeline",
            f"learner.parallel.pipeline = {parallel.pipeline}: the model has num_hidden_layers = {layers}, and every "
            "stage needs one",
        )


def _lora_problems(config: Config) -> Iterator[Conflict]:
    """Settings that cannot be combined with adapters."""
    learner, here = config.learner, "learner.lora.rank"
    if not learner.lora.rank:
        return
    for name in ("tensor", "expert"):
        if getattr(learner.parallel, name) > 1:
            yield conflict(here, f"learner.lora.rank with learner.parallel.{name} is not supported: use FSDP alone")
    if learner.optim.name == "muon":
        yield conflict(
            "learner.optim.name",
            "learner.lora.rank with learner.optim.name = 'muon', which is for whole matrices: use adamw",
        )
    if learner.preference.iteration:
        yield conflict(
            "learner.preference.iteration", "learner.lora.rank: the reference is the model under the adapters"
        )
    if learner.compile:
        yield conflict("learner.compile", "learner.lora.rank with learner.compile is not supported")
    if learner.mode == "reward_model":
        yield conflict("learner.mode", "learner.lora.rank: a reward model trains its head too: use rl, sft, dpo or kto")
    if learner.lora.publish == "adapter":
        what, place = "learner.lora.publish = 'adapter'", "learner.lora.publish"
        if config.weightsync.in_place:
            yield conflict(
                place,
                f"{what} with weightsync.in_place: an adapter needs a second copy, its base: use auto",
            )


def _profile_problems(config: Config) -> Iterator[Conflict]:
    profile = config.learner.profile
    try:
        parse_steps(profile.steps)
    except ValueError as error:
        yield conflict("learner.profile.steps", f"learner.profile.steps: {error}", code="config.type")
    if profile.memory and not profile.steps:
        yield conflict("learner.profile.memory", "learner.profile.memory needs learner.profile.steps")
