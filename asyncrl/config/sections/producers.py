"""`[producers]`: processes that generate."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from asyncrl.config.sections.base import Count, Positive, Section


class ProducersConfig(Section, frozen=True):
    """`[producers]`: processes that generate, one engine each."""

    count: Positive = 1  # processes on this host
    engine: str = "hf"  # hf, dataset (rows of the data), or a name of the entry-point group asyncrl.engines
    slots: Positive = 64  # samples that one engine decodes at once
    max_groups_in_flight: Count = 0  # groups one producer holds; 0: by the engine's capacity and what samples cost
    checkpoint_tokens: Count = 0  # longer samples are sent in pieces of about so many, so that others can go on; 0: off
    kv_at_swap: Literal["keep", "recompute"] = "keep"  # KV cache of samples under way when weights change
    threads: Positive = 1  # torch threads of one engine on a CPU
    device: str = "auto"  # auto: the accelerator if there is one, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: model.dtype
    restarts: Count = 5  # in 10 minutes
    python: str = ""  # interpreter of the engine's environment; empty: this one, or .venv-ENGINE beside it
    url: tuple[str, ...] = ()  # engines behind HTTP: their servers; the producer with number i has the i-th
    engine_args: dict[str, Any] = field(default_factory=dict)  # handed to the engine as they are: its own names

    def groups_in_flight(self, group_size: int) -> int:
        """Groups one producer holds: the setting, or `ceil(2 * slots / group_size)` where its K/V holds them."""
        return self.max_groups_in_flight or max(1, -(-2 * self.slots // group_size))
