"""About how much memory each role needs, from the model's config.json and the settings.

Pure. Guarantees:
1. every part has its arithmetic; a role's total is the sum of its parts, for ONE process of it;
2. parameters are counted as the model classes of transformers lay them out (a test compares them), but for biases;
3. `device` is the accelerator where the role uses one, `host` everything else.
It is an estimate: fragmentation, kernels' work space and an engine's own reserve (vLLM takes a share of the device,
`gpu_memory_utilization`) are not in it. A model of another build gives `None`, never a guess.

Example: Qwen2.5-0.5B has 494 million parameters; one of 4 ranks holds (4 + 4 + 8) * 494e6 / 4 = 1.8 GiB of weights,
gradients and AdamW's moments in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.config import Config, mode
from asyncrl.config.judges import list_judges
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.process_plan.device_assignment import devices_each

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Feed-forward parts of two matrices instead of three.
PLAIN = frozenset({"gpt_neox", "starcoder2", "phi", "gpt2", "opt"})
#: Bytes of optimizer state per trained parameter; Muon keeps one moment of matrices.
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.1, "muon": 4.0}
#: Of an idle process: measured with torch 2.13 and transformers 5.23 on a CPU, and without them.
PROCESS_BYTES = {True: 350 << 20, False: 50 << 20}
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


class Shape(msgspec.Struct, frozen=True):
    """Sizes of a model that determine its memory."""

    hidden: int
    layers: int
    vocabulary: int
    attention: int  # parameters of one layer's attention
    queries: int  # width of q, of k and v together, and of the KV cache per token and layer
    keys_values: int
    cached: int
    feed_forward: tuple[int, ...]  # parameters of each layer's feed-forward part
    active_width: int  # of the feed-forward part that one token uses
    linear: int  # sum of inputs and outputs of one layer's linear parts: adapters grow with it
    tied: bool
    tower: int = 0  # parameters of a vision tower
    projector: int = 0  # of the layers between it and the language part

    @property
    def embedding(self) -> int:
        """vocabulary * hidden, twice if the output head is separate."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Of the whole model: embeddings, layers with two norms each, the last norm, what sees images."""
        norms = (2 * self.layers + 1) * self.hidden
        language = self.embedding + self.layers * self.attention + sum(self.feed_forward) + norms
        return language + self.tower + self.projector

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest unit that is gathered at once: a layer, or the embeddings."""
        return max(self.attention + max(self.feed_forward), self.embedding)


def model_shape(model: Mapping[str, Any]) -> Shape | None:
    """The sizes in a config.json; None for an unknown architecture."""
    vision, kind = model.get("vision_config"), model.get("model_type", "")
    if text := model.get("text_config"):
        model = {"tie_word_embeddings": model.get("tie_word_embeddings", False)} | text
    try:
        shape = _shape(model)
        if vision is None:
            return shape
        tower, projector = _vision(vision, kind, shape.hidden)
        return msgspec.structs.replace(shape, tower=tower, projector=projector)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _shape(model: Mapping[str, Any]) -> Shape:
    hidden, layers, heads = model["hidden_size"], model["num_hidden_layers"], model["num_attention_heads"]
    width = model["intermediate_size"]
    head = model.get("head_dim") or hidden // heads
    values = model.get("num_key_value_heads") or heads
    queries, keys_values = heads * head, 2 * values * head
    attention, cached = hidden * (2 * queries + keys_values), keys_values
    if model.get("kv_lora_rank"):  # attention over compressed keys and values
        attention, cached = _latent(model, hidden, heads)
    matrices = 2 if model.get("model_type") in PLAIN else 3
    feed_forward = tuple(_feed_forward(model, layer, matrices) for layer in range(layers))
    active = width
    if experts := _experts(model):
        each = model.get("moe_intermediate_size") or width
        active = each * model.get("num_experts_per_tok", experts)
    linear = 4 * hidden + 2 * queries + keys_values + matrices * (hidden + width)
    return Shape(
        hidden,
        layers,
        model["vocab_size"],
        attention,
        queries,
        keys_values,
        cached,
        feed_forward,
        active,
        linear,
        bool(model.get("tie_word_embeddings", False)),
    )


def _vision(vision: Mapping[str, Any], kind: str, out: int) -> tuple[int, int]:
    """Parameters of the vision tower and of the projector of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (`kind`); `out`: width
    of the language part. Qwen2-VL calls the width of its tower `embed_dim`.
    """
    width = vision.get("embed_dim") or vision["hidden_size"]
    matrices = 3 if kind.startswith("qwen2_5") else 2
    inner = vision.get("intermediate_size") or vision["mlp_ratio"] * width
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    places = vision.get("num_position_embeddings", 0)
    merged = width * vision["spatial_merge_size"] ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    layer = 4 * width * width + matrices * width * inner + 2 * width
    return vision["depth"] * layer + (patch + places) * width, mergers * merged * (merged + out)


def _experts(model: Mapping[str, Any]) -> int:
    return int(model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts") or 0)


def _latent(model: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Parameters of multi-head latent attention (arXiv 2405.04434), and its cache per token."""
    rank, rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    nope, value = model["qk_nope_head_dim"], model["v_head_dim"]
    query = model.get("q_lora_rank")
    up = heads * (nope + rope)
    queries = hidden * query + query * up if query else hidden * up
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden, rank + rope


def _feed_forward(model: Mapping[str, Any], layer: int, matrices: int) -> int:
    hidden, experts = model["hidden_size"], _experts(model)
    step = model.get("decoder_sparse_step") or 1
    dense = (
        layer in (model.get("mlp_only_layers") or ())
        or layer < (model.get("first_k_dense_replace") or 0)
        or (layer + 1) % step
    )
    if not experts or dense:
        return int(matrices * hidden * model["intermediate_size"])
    each = model.get("moe_intermediate_size") or model["intermediate_size"]
    shared = model.get("shared_expert_intermediate_size") or (model.get("n_shared_experts") or 0) * each
    return int(matrices * hidden * (experts * each + shared) + experts * hidden)


def estimate(config: Config, model: Mapping[str, Any], roles: Sequence[str], *, accelerator: bool) -> list[RoleMemory]:
    """Memory of every role; empty for an unknown model."""
    shape = model_shape(model)
    if shape is None:
        return []
    found: list[RoleMemory] = []
    if "learner" in roles:
        found += _learner(config, shape, accelerator=accelerator)
    if "producer" in roles and config.producers.engine in ("hf", "vllm"):
        found += _engines(config, shape, "producer", config.producers.count, accelerator=accelerator)
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
    sent = BYTES[config.model.dtype if config.weightsync.dtype == "auto" else config.weightsync.dtype]
    staged: list[Part] = []
    if not mode.streams(config):
        staged = [
            Part(
                "staged versions",
                2 * shape.parameters * sent // learner.ranks,
                f"2 x {_count(shape.parameters)} x {sent} B / ranks {learner.ranks}, in /dev/shm",
            )
        ]
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
    host = [_process(torch=True), *staged]
    found = [RoleMemory("run folder", "disk", 1, (disk,))]
    if on_device:
        resident = [] if learner.cpu_offload else states
        found.insert(0, RoleMemory("learner", "device", ranks, (*resident, *working)))
        host += states if learner.cpu_offload else []
    else:
        host += [*states, *working]
    return [*found, RoleMemory("learner", "host", ranks, tuple(host))]


def _states(config: Config, shape: Shape) -> list[Part]:
    """Weights, gradients and optimizer of the policy, on one rank."""
    learner = config.learner
    shards = _shards(config)
    every, trained = shape.parameters, _trained_parameters(config, shape)
    of = f"/ {shards} shard{'s' * (shards != 1)}"
    moment = MOMENTS[learner.optim.name]
    return [
        Part("weights", 4 * every // shards, f"{_count(every)} x 4 B {of}"),
        Part("gradients", 4 * trained // shards, f"{_count(trained)} x 4 B {of}"),
        Part(
            "optimizer", int(moment * trained / shards), f"{_count(trained)} x {moment:g} B ({learner.optim.name}) {of}"
        ),
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
    preference = learner.mode in ("dpo", "kto") and learner.preference.has_reference
    if (learner.mode == "rl" and learner.algorithm.kl.where != "off") or preference or "process" in needs:
        width = BYTES[config.model.dtype]
        parts.append(Part("reference", every * width // shards, f"{_count(every)} x {width} B / {shards}"))
    return parts


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
    if _shards(config) > 1:
        parts.append(
            Part("gathered layers", 2 * shape.largest_layer * width, f"2 x {_count(shape.largest_layer)} x {width} B")
        )
        if not mode.streams(config):
            tensor = max(shape.vocabulary * shape.hidden, *(2 * part // 3 for part in shape.feed_forward))
            parts.append(Part("published tensors", 3 * tensor * width, f"3 x {_count(tensor)} x {width} B, on rank 0"))
    return parts


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
    host = [_process(torch=True)]
    if staged:
        host.append(Part("weights to come", 2 * weights, f"2 x {_count(shape.parameters)} x {width} B, in /dev/shm"))
    if accelerator and producers.device != "cpu":
        return [
            RoleMemory(role, "device", count * each, tuple(parts)),
            RoleMemory(role, "host", count, tuple(host)),
        ]
    return [RoleMemory(role, "host", count, (*host, *parts))]


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
