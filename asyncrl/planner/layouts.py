"""Layouts of a large learner that fit a device's memory, and its engines, on paper. Pure; nothing was measured.

`python -m asyncrl.planner.layouts` prints the tables of docs/large-models.md, `asyncrl plan FILE --layouts N` those of
a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.config import Config
from asyncrl.config.sections.producers import devices_each
from asyncrl.errors import ConfigError
from asyncrl.planner.weight_seconds import MODELS, PORTS, sync_seconds
from asyncrl.preflight.layouts import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    STATE_BYTES,
    WEIGHT_BYTES,
    Layout,
    Rank,
    find_fullest,
)
from asyncrl.preflight.model_shape import Shape, model_shape

GB = 10**9
USABLE = 0.9  # of a device: fragmentation, kernels' work space, groups
SHOWN = 3  # layouts for each number of devices
POWERS = (1, 2, 4, 8, 16, 32, 64)


class Fit(NamedTuple):
    """A layout that fits, its fullest stage, and what a rank of that holds."""

    layout: Layout
    stage: int
    rank: Rank


def fitting(shape: Shape, devices: int, *, device_bytes: int, tokens: int = 8192, chunk: int = 1024) -> list[Fit]:
    """Layouts that fit, those that split the least first. Experts stay whole: their parts would be too narrow."""
    found, mixture = [], any(shape.experts)
    for pipeline in POWERS:
        for tensor in POWERS[:4]:
            for expert in POWERS[tensor > 1 :] if mixture else (1,):
                layout = Layout(devices, tensor, pipeline, expert)
                split = max(tensor, expert) * pipeline
                if pipeline > shape.layers or devices % (tensor * pipeline) or devices % split:
                    continue
                number, rank = find_fullest(shape, layout, tokens=tokens, chunk=chunk)
                if rank.total <= USABLE * device_bytes:
                    found.append(Fit(layout, number, rank))
    return sorted(found, key=lambda one: (math.prod(one.layout[1:]), one.layout.pipeline, one.layout.tensor))


def engine_tokens(shape: Shape, workers: int, *, device_bytes: int) -> int:
    """Tokens of KV cache of an engine on this many devices, in bfloat16; below 0 if the weights do not fit."""
    free = USABLE * device_bytes * workers - WEIGHT_BYTES * shape.parameters
    return int(free / (shape.layers * shape.cached * STATE_BYTES))


def format_layouts(config: Config, model: Mapping[str, Any], counts: Sequence[int], device_gb: int) -> Iterator[str]:
    """For each number of devices the layouts of a learner on Megatron-core that fit, the least split ones first.

    Raises:
        ConfigError: `config.model`: the model's architecture is not known.
    """
    shape, learner = model_shape(model), config.learner
    if shape is None:
        what = "its config.json is missing, or of an architecture whose sizes are not known"
        raise ConfigError("config.model", what, where=f"model.path = {config.model.path!r}")
    yield f"computed for devices of {device_gb} GB, {USABLE:.0%} of them used: nothing was measured"
    for devices in counts:
        ways = fitting(
            shape, devices, device_bytes=device_gb * GB,
            tokens=learner.micro_batch_tokens, chunk=learner.logprob_chunk_tokens,
        )  # fmt: skip
        if not ways:
            least = (WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES) * shape.parameters / devices / GB
            yield f"{devices:>6} devices: none fits (weights, gradients and optimizer alone: {least:.0f} GB a device)"
        for layout, number, rank in ways[:SHOWN]:
            names = f"tensor {layout.tensor}, pipeline {layout.pipeline}, expert {layout.expert}"
            parts = ", ".join(f"{name} {part / GB:.1f}" for name, part in rank._asdict().items())
            yield f"{devices:>6} devices: {names}: {rank.total / GB:.1f} GB on a rank of stage {number} ({parts})"
    workers = max(1, devices_each(config.producers.engine, config.producers.engine_args))
    tokens, nbytes = engine_tokens(shape, workers, device_bytes=device_gb * GB), WEIGHT_BYTES * shape.parameters
    one, every = (sync_seconds(nbytes, workers=workers, senders=ports).direct for ports in (1, PORTS))
    room = f"{tokens:,} tokens of KV cache" if tokens > 0 else "its weights do not fit"
    sent = f"weights of {nbytes / GB:.0f} GB: {one:.1f} s by one port, {every:.1f} s by {PORTS}"
    yield f"an engine of {workers} devices: {room}; {sent}"


#: As its model card and config.json tell them.
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "tie_word_embeddings": False, "vocab_size": 129280, "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
LARGE = {"Qwen3-235B-A22B": (MODELS["Qwen3-235B-A22B"][0], 8), "DeepSeek-V3 (671B)": (DEEPSEEK_V3, 32)}
COUNTS, DEVICE_GB = (64, 128, 256, 512), 80


def _shape(model: Mapping[str, Any]) -> Shape:
    found = model_shape(model)
    assert found is not None
    return found


def table() -> Iterator[str]:
    """The lines of the tables."""
    parts = "weights | gradients | optimizer | activations | sum"
    yield f"| model | devices | tensor x pipeline x expert | fullest stage | {parts} |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, (model, _) in LARGE.items():
        for devices in COUNTS:
            ways = fitting(_shape(model), devices, device_bytes=DEVICE_GB * GB)
            if not ways:
                yield f"| {name} | {devices} | none fits | | | | | | |"
                continue
            layout, number, rank = ways[0]
            parts = " | ".join(f"{part / GB:.1f}" for part in (*rank, rank.total))
            yield f"| {name} | {devices} | {layout.tensor} x {layout.pipeline} x {layout.expert} | {number} | {parts} |"


def engine_table() -> Iterator[str]:
    """Engines and weights of the same models."""
    yield "| model | GB | devices of an engine | tokens of its KV cache | direct, 1 port | 8 ports |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, (model, workers) in LARGE.items():
        shape = _shape(model)
        nbytes = WEIGHT_BYTES * shape.parameters
        tokens = engine_tokens(shape, workers, device_bytes=DEVICE_GB * GB)
        one, every = (sync_seconds(nbytes, workers=workers, senders=ports).direct for ports in (1, PORTS))
        yield f"| {name} | {nbytes / GB:.0f} | {workers} | {tokens:,} | {one:.1f} s | {every:.1f} s |"


if __name__ == "__main__":
    print("\n".join([*table(), "", *engine_table()]))
