"""`[producers]`: processes that generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import field

from asyncrl.config.sections.base import Count, Positive, Section

#: Engines behind HTTP.
SERVED = ("vllm_http", "sglang")
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")


def devices_each(engine: str, engine_args: Mapping[str, Any]) -> int:
    """Devices of one process with this engine; 0: it uses none."""
    if engine in (*SERVED, "dataset"):
        return 0
    if engine != "vllm":
        return 1
    found = 1
    for name in PARALLEL:
        given = engine_args.get(name, engine_args.get(name.replace("_", "-"), 1))
        found *= given if isinstance(given, int) and given > 0 else 1
    return found


class ProducersConfig(Section, frozen=True):
    """`[producers]`: processes that generate, one engine each."""

    count: Positive = 1  # processes on this host
    engine: str = "hf"  # hf, dataset (rows of the data), 'file.py:name', or an entry point of asyncrl.engines
    slots: Positive = 64  # samples that one engine decodes at once
    max_groups_in_flight: Count = 0  # groups in one producer; 0: by the engine's capacity and the samples' cost
    checkpoint_tokens: Count = 0  # send longer samples, or turns, in pieces of this size: others can go on; 0: off
    kv_at_swap: Literal["keep", "recompute"] = "keep"  # KV cache of samples in progress when weights change
    speculative_tokens: Count = 0  # hf: drafts per sample and step, of its own earlier text (n-grams); 0: off
    threads: Count = 0  # torch threads of one engine on a CPU; 0: the cores are shared with the learner's ranks
    device: str = "auto"  # auto: an accelerator if the host has one, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: model.dtype
    restarts: Count = 5  # in 10 minutes
    python: str = ""  # interpreter with the engine; empty: this one, or .venv-ENGINE in the same folder
    url: tuple[str, ...] = ()  # servers of engines behind HTTP; producer number i uses the i-th
    engine_args: dict[str, Any] = field(default_factory=dict)  # arguments of the engine, under its own names

    @property
    def torch_threads(self) -> int:
        """`threads`, or one where no launcher has chosen a number."""
        return self.threads or 1

    def groups_in_flight(self, group_size: int) -> int:
        """Groups in one producer: the setting, or `ceil(2 * slots group_size)` if the KV cache holds them."""
        return self.max_groups_in_flight or max(1, -(-2 * self.slots // group_size))
