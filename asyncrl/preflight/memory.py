"""About how much memory each role needs, from the model's config.json and the settings.

Pure. Guarantees:
1. every part has its arithmetic; a role's total is the sum of its parts, for ONE process of it;
2. `device` is the accelerator where the role uses one, `host` everything else.
It is an estimate: fragmentation, kernels' work space and an engine's own reserve (vLLM takes a share of the device,
`gpu_memory_utilization`) are not in it. A model of another build gives `None`, never a guess.

Example: Qwen2.5-0.5B has 494 million parameters; one of 4 ranks holds (4 + 4 + 8) * 494e6 / 4 = 1.8 GiB of weights,
gradients and AdamW's moments in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config, mode
from asyncrl.config.capabilities import MOST_SENDERS
from asyncrl.config.judges import list_judges
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.producers import devices_each
from asyncrl.preflight.layouts import Layout, find_fullest
from asyncrl.preflight.model_shape import Shape, model_shape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes of optimizer state per trained parameter; Muon keeps one moment of matrices.
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.1, "muon": 4.0}
#: Of an idle process: measured with torch 2.13 and transformers 5.23 on a CPU, and without them.
PROCESS_BYTES = {True: 350 << 20, False: 50 << 20}
IN_SHARED_MEMORY = "in /dev/shm"  # end of the arithmetic of parts that are files there
KEPT_SOFTMAX_BYTES = 128 << 20  # learners.models.logprobs: kept for the backward pass


class Part(msgspec.Struct, frozen=True):
    """One use of memory."""

    name: str
    bytes: int
    arithmetic: str


class RoleMemory(msgspec.Struct, frozen=True):
    """One process of a role on one device or host; `count` such processes run."""

    role: str
    place: str  # device or host
    count: int
    parts: tuple[Part, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return sum(part.bytes for part in self.parts)


def estimate(
    config: Config,
    model: Mapping[str, Any],
    roles: Sequence[str],
    *,
    accelerator: bool,
    others: Mapping[str, tuple[Config, Mapping[str, Any]]] | None = None,
) -> list[RoleMemory]:
    """Memory of every role; empty for an unknown model. `others`: configuration and model of other policies, which
    producers have an engine for.
    """
    shape = model_shape(model)
    if shape is None:
        return []
    found: list[RoleMemory] = []
    if "learner" in roles:
        found += _learner(config, shape, accelerator=accelerator)
    if "producer" in roles and config.producers.engine in ("hf", "vllm"):
        producers = _engines(config, shape, "producer", config.producers.count, accelerator=accelerator)
        found += _add_others(producers, others or {})
    if "evaluator" in roles and config.evaluation.separate and config.producers.engine in ("hf", "vllm"):
        found += _engines(config, shape, "evaluator", config.evaluation.evaluator_count, accelerator=accelerator)
    if "buffer" in roles:
        cache = Part("payload cache", config.buffer.cache_bytes, "buffer.cache_bytes")
        found.append(RoleMemory("buffer", "host", 1, (_process(torch=False), cache)))
    if "reward" in roles:
        found.append(
            RoleMemory("reward", "host", sum(judge.count for judge in list_judges(config)), (_process(torch=False),))
        )
    return found


def _process(*, torch: bool) -> Part:
    return Part("the process", PROCESS_BYTES[torch], "interpreter and libraries")


def _learner(config: Config, shape: Shape, *, accelerator: bool) -> list[RoleMemory]:
    learner = config.learner
    on_device = accelerator and learner.device != "cpu"
    states = [*_states(config, shape), *_companion_parts(config, shape)]
    working = _step_memory(config, shape)
    staged: list[Part] = []
    if not mode.streams(config):
        sent, how = _sent_bytes(config, shape)
        where = f" / ranks {learner.ranks}, {IN_SHARED_MEMORY}"
        staged = [Part("staged versions", 2 * sent // learner.ranks, f"2 x {how}{where}")]
    kept = learner.checkpoint_keep + learner.checkpoint_best
    trained, per = _trained_parameters(config, shape), 4 + MOMENTS[learner.optim.name]
    renewed = learner.mode in ("dpo", "kto") and learner.preference.iteration > 0
    per += 4 * renewed
    disk = Part(
        "checkpoints",
        int(kept * trained * per),
        f"{kept} kept x {_count(trained)} x {per:g} B of weights and optimizer{', and the reference' * renewed}",
    )
    ranks = learner.ranks
    host, found = [_process(torch=True), *staged], [RoleMemory("run folder", "disk", 1, (disk,))]
    if on_device:
        resident = [] if learner.cpu_offload else states
        found.insert(0, RoleMemory("learner", "device", ranks, (*resident, *working)))
        host += states if learner.cpu_offload else []
        host += _resting(config, sum(part.bytes for part in resident if part.name != "gradients"))
    else:
        host += [*states, *working]
    return [*found, RoleMemory("learner", "host", ranks, tuple(host))]


def _resting(config: Config, size: int) -> list[Part]:
    """What leaves the device between turns."""
    turns = config.cluster.devices == "turns"
    return [Part("off the device", size, "weights and optimizer between turns (cluster.devices)")] if turns else []


def _states(config: Config, shape: Shape) -> list[Part]:
    """Weights, gradients and optimizer of the policy, on one rank."""
    learner = config.learner
    if learner.backend == "megatron":
        return _stage_states(config, shape)
    shards = _shards(config)
    every, trained = shape.parameters, _trained_parameters(config, shape)
    of = f"/ {shards} shard{'s' * (shards != 1)}"
    moment = MOMENTS[learner.optim.name]
    weights = Part("weights", 4 * every // shards, f"{_count(every)} x 4 B {of}")
    if learner.lora.rank:  # the frozen model is in `model.dtype`, adapters are in float32
        width = BYTES[config.model.dtype]
        how = f"({_count(every)} x {width} B + {_count(trained)} x 4 B) {of}"
        weights = Part("weights", (width * every + 4 * trained) // shards, how)
    return [
        weights,
        Part("gradients", 4 * trained // shards, f"{_count(trained)} x 4 B {of}"),
        Part(
            "optimizer", int(moment * trained / shards), f"{_count(trained)} x {moment:g} B ({learner.optim.name}) {of}"
        ),
    ]


def _stage_states(config: Config, shape: Shape) -> list[Part]:
    """The same of Megatron-core, on a rank of the fullest stage."""
    split = config.learner.parallel
    layout = Layout(config.learner.ranks * config.cluster.learner_hosts, split.tensor, split.pipeline, split.expert)
    number, rank = find_fullest(shape, layout)
    wide = config.model.dtype == "float32"  # parameters in float32 are their own master weights
    where = f"stage {number} of {layout.pipeline}, by tensor {layout.tensor} and expert {layout.expert}"
    return [
        Part("weights", rank.weights << wide, f"{where}, {2 << wide} B"),
        Part("gradients", rank.gradients, f"{where}, 4 B"),
        Part("optimizer", rank.optimizer * (8 if wide else 12) // 12, f"{where}, by the ranks that hold the same"),
    ]


def _shards(config: Config) -> int:
    """Ranks that share one copy of the weights, on all hosts."""
    return max(1, config.learner.ranks * config.cluster.learner_hosts // config.learner.parallel.replicate)


def _trained_parameters(config: Config, shape: Shape) -> int:
    """Trained parameters: all but frozen parts, or those of adapters."""
    rank, vision = config.learner.lora.rank, config.learner.vision
    if rank:
        return shape.layers * rank * shape.linear
    return shape.parameters - shape.tower * (not vision.tower) - shape.projector * (not vision.projector)


def _companion_parts(config: Config, shape: Shape) -> list[Part]:
    """Further models: critic, process reward model, frozen reference."""
    learner, every = config.learner, shape.parameters
    shards = _shards(config)
    parts = []
    known = algorithms.entry("advantage", learner.algorithm.advantage)
    needs = set(known.needs) if known is not None and learner.mode == "rl" else set()
    for need, name in (("critic", "critic"), ("process", "process_reward")):
        if need in needs:
            per = 8 + MOMENTS[getattr(learner, name).name]
            parts.append(
                Part(name.replace("_", " "), int(per * every / shards), f"{_count(every)} x {per:g} B / {shards}")
            )
    if count := _references(config, process="process" in needs):
        width, times = BYTES[config.model.dtype], f"{count} x " * (count > 1)
        parts.append(
            Part("reference", count * every * width // shards, f"{times}{_count(every)} x {width} B / {shards}")
        )
    return parts


def _references(config: Config, *, process: bool) -> int:
    """Frozen models: that of the policy, which under adapters is its own base, and another one of `process` rewards."""
    learner, rewards, path = config.learner, config.learner.process_reward, config.model.path
    frozen = rewards.reference or rewards.model or path
    other = process and (Path(frozen) != Path(path) or config.sampling.temperature != 1)
    preference = learner.mode in ("dpo", "kto") and learner.preference.has_reference
    policy = (learner.mode == "rl" and learner.algorithm.kl.where != "off") or preference or (process and not other)
    return other + (policy and not learner.lora.rank)


def _step_memory(config: Config, shape: Shape) -> list[Part]:
    """Memory within a step, on one rank."""
    learner, width = config.learner, BYTES[config.model.dtype]
    split = learner.parallel.sequence * learner.parallel.tensor
    tokens = -(-learner.micro_batch_tokens // split)
    layers = -(-shape.layers // learner.parallel.pipeline)
    each = (
        width * (4 * shape.hidden + 2 * shape.keys_values + 3 * shape.queries + 4 * shape.active_width)
        + 8 * shape.hidden
    )
    if learner.gradient_checkpointing:
        size = tokens * (layers * shape.hidden * width + each)
        how = f"{tokens} tokens x ({layers} layers x {shape.hidden} x {width} B + {each} B of one layer)"
    else:
        size, how = tokens * layers * each, f"{tokens} tokens x {layers} layers x {each} B"
    chunk = min(learner.logprob_chunk_tokens, tokens)
    logits = 3 * 4 * chunk * shape.vocabulary
    kept = min(KEPT_SOFTMAX_BYTES, 4 * tokens * shape.vocabulary)
    of_chunk = f"3 x {chunk} tokens x {shape.vocabulary} x 4 B, and {format_bytes(kept)} of softmaxes kept"
    parts = [Part("activations", size, how), Part("logits chunk", logits + kept, of_chunk)]
    parts += _gathered_rows(config, shape)
    if learner.backend == "fsdp2" and not learner.lora.rank:
        parts.append(_largest_gradient(config, shape))
    if _shards(config) > 1:
        parts.append(
            Part("gathered layers", 2 * shape.largest_layer * width, f"2 x {_count(shape.largest_layer)} x {width} B")
        )
    if _sends_direct(config):
        parts.append(_buckets(config, shape, 3, where=", on ranks that send"))
    elif _shards(config) > 1 and not mode.streams(config) and not _writes_rows(config):
        tensor = _largest_tensor(shape)
        parts.append(Part("published tensors", 3 * tensor * width, f"3 x {_count(tensor)} x {width} B, on rank 0"))
    return parts


def _largest_gradient(config: Config, shape: Shape) -> Part:
    """The tensor of the embeddings, once more: its gradient before it is added to the others' (and, of several shards,
    the gathered tensor), then what the optimizer computes of it.
    """
    tensor, width = _largest_tensor(shape), BYTES[config.model.dtype]
    each = 2 * width if _shards(config) > 1 else 4
    return Part("largest tensor", tensor * each, f"{_count(tensor)} x {each} B, its gradient once more")


def _gathered_rows(config: Config, shape: Shape) -> list[Part]:
    """Keys and values of whole rows, where rows are split over more ranks than the heads divide by."""
    learner, width = config.learner, BYTES[config.model.dtype]
    split = learner.parallel
    heads = math.gcd(split.sequence, shape.common_heads // split.tensor)
    if heads == split.sequence:
        return []
    each, kept = shape.keys_values // (split.tensor * heads), 1 if learner.gradient_checkpointing else shape.layers
    how = f"{learner.micro_batch_tokens} tokens x {each} x {width} B x ({kept} kept + a gradient)"
    return [Part("gathered keys and values", learner.micro_batch_tokens * each * width * (kept + 1), how)]


def _sent_width(config: Config) -> int:
    """Bytes of an element that is not quantised."""
    sync = config.weightsync
    return BYTES[config.model.dtype if sync.dtype == "auto" or sync.quantised else sync.dtype]


def _sent_bytes(config: Config, shape: Shape) -> tuple[int, str]:
    """Bytes of a version, and their arithmetic. Quantised: all but the embeddings has a byte per element; norms and
    scales are left out.
    """
    width, every = _sent_width(config), shape.parameters
    if not config.weightsync.quantised:
        return every * width, f"{_count(every)} x {width} B"
    plain = shape.embedding
    return plain * width + every - plain, f"({_count(plain)} x {width} B + {_count(every - plain)} x 1 B)"


def _sends_direct(config: Config) -> bool:
    return config.weightsync.transport == "direct" and not mode.streams(config)


def _largest_tensor(shape: Shape) -> int:
    return max(shape.vocabulary * shape.hidden, *(2 * part // 3 for part in shape.feed_forward))


def _buckets(config: Config, shape: Shape, count: int, *, further: int = 0, where: str = "") -> Part:
    """Buckets of transport `direct` on a device; `count` of them hold at least a whole tensor each."""
    size, tensor = config.weightsync.bucket_bytes, _largest_tensor(shape) * _sent_width(config)
    of = "weightsync.bucket_bytes" if size >= tensor else "the largest tensor"
    how = f"{count} x {of}, {format_bytes(max(size, tensor))}{where}"
    how += f", and {further} x weightsync.bucket_bytes, one of each further sender" if further else ""
    return Part("buckets", count * max(size, tensor) + further * size, how)


def _senders(config: Config) -> int:
    """Most ranks that send by transport `direct`; those of a mixture of experts are one (`WeightsOut.turns`)."""
    split = config.learner.parallel
    rows = split.tensor == split.expert == 1 and not config.learner.lora.rank
    return min(_shards(config), MOST_SENDERS) if rows else 1


def _writes_rows(config: Config) -> bool:
    """Whether ranks publish their own rows (`learners.row_weights`), without room for whole tensors."""
    split, one_host = config.learner.parallel, config.cluster.learner_hosts == 1
    plain = config.learner.backend == "fsdp2" and split.tensor == split.expert == 1 and not config.learner.lora.rank
    return plain and one_host and not config.weightsync.quantised


def _engines(config: Config, shape: Shape, role: str, count: int, *, accelerator: bool) -> list[RoleMemory]:
    producers = config.producers
    dtype = config.model.dtype if producers.dtype == "auto" else producers.dtype
    width, each = BYTES[dtype], max(1, devices_each(producers.engine, producers.engine_args))
    staged = producers.engine == "vllm"  # the version to come is a file in host memory
    of = f" / {each} devices" if each > 1 else ""
    longest = config.data.max_prompt_tokens + config.longest_response
    token = shape.layers * shape.cached * width
    weights = shape.parameters * width
    full = f"slots {producers.slots} x {longest} tokens x {token} B{of}, where every sample is longest"
    full += "; vLLM takes what is free" if staged else ""
    parts = [
        Part("weights", weights // each, f"{_count(shape.parameters)} x {width} B{of}"),
        Part("K/V", producers.slots * longest * token // each, full),
    ]
    if not config.weightsync.in_place and not staged:
        parts.insert(1, Part("weights to come", weights, "a second copy while weights change (weightsync.in_place)"))
    if role == "producer" and (held_out := config.held_out_slots):
        parts += [
            Part("measured weights", weights, "a third copy during an evaluation (evaluation.lane)"),
            Part(
                "held-out K/V",
                held_out * longest * token,
                f"{held_out} held-out samples x {longest} tokens x {token} B",
            ),
        ]
    if producers.engine == "hf" and (kept := config.kept_sessions):
        what = f"{kept} ended turns x {longest} tokens x {token} B, for the next turns of their sessions"
        parts.append(Part("K/V of sessions", kept * longest * token, what))
    if _sends_direct(config):
        parts.append(_buckets(config, shape, 3 if staged else 2, further=_senders(config) - 1))
        if staged:
            layer = shape.largest_layer * _sent_width(config)
            parts.append(Part("incomplete layers", layer, "tensors of a layer that wait for its last"))
    host = [_process(torch=True)]
    if config.weightsync.quantised and config.weightsync.encoding == "delta":
        sent, how = _sent_bytes(config, shape)
        host.append(Part("codes", 2 * sent, f"2 x {how}, kept for deltas"))
    if staged:
        how = f"2 x {_count(shape.parameters)} x {width} B, {IN_SHARED_MEMORY}"
        host.append(Part("weights to come", 2 * weights, how))
    if accelerator and producers.device != "cpu":
        host += _resting(config, weights)
        return [
            RoleMemory(role, "device", count * each, tuple(parts)),
            RoleMemory(role, "host", count, tuple(host)),
        ]
    return [RoleMemory(role, "host", count, (*host, *parts))]


def _add_others(
    producers: list[RoleMemory], others: Mapping[str, tuple[Config, Mapping[str, Any]]]
) -> list[RoleMemory]:
    """The producers with the engines of other policies, which are in the same place as their own."""
    first, *rest = producers
    for name, (other, model) in others.items():
        shape = model_shape(model)
        if shape is None or other.producers.engine not in ("hf", "vllm"):
            continue
        [engine, *_] = _engines(other, shape, "producer", 1, accelerator=first.place == "device")
        own = [part for part in engine.parts if part.name != "the process"]
        parts = [msgspec.structs.replace(part, name=f"{part.name} of {name}") for part in own]
        first = msgspec.structs.replace(first, parts=(*first.parts, *parts))
    return [first, *rest]


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
