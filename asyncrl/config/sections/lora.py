"""`[learner.lora]`: low-rank adapters (LoRA, arXiv 2106.09685) instead of all weights.

A test compares the lists of engines with what the engines say of themselves; for an engine of a plugin, `publish =
"adapter"` declares support.

Example: rank 8, alpha 32 on q_proj `[2048, 1024]`: 24,576 trained numbers for 2,097,152; W = W0 + 4 B A.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Section

#: Built-in engines that apply adapters to weights that they keep.
TAKE_ADAPTERS = ("hf",)
#: Built-in engines that take only full weights.
TAKE_WHOLE = ("vllm", "vllm_http", "sglang")


class LoraConfig(Section, frozen=True):
    """`[learner.lora]`: train low-rank adapters and leave the model's own weights as they are."""

    rank: Count = 0  # rank of the adapters; 0: off, train all weights
    alpha: Annotated[float, Meta(gt=0)] = 32.0  # adapters are scaled by alpha / rank
    rslora: bool = False  # scale by alpha / sqrt(rank) instead (arXiv 2312.03732)
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # on the adapters' inputs, in passes with gradients
    target_modules: tuple[str, ...] = ()  # last parts of names of linear layers; empty: all of the decoder
    publish: Literal["auto", "adapter", "merged"] = "auto"  # auto: adapters if the engine takes them, else merged
