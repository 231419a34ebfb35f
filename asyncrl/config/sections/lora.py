"""`[learner.lora]`: low-rank adapters (LoRA, arXiv 2106.09685) in the place of all weights, and what it refuses.

Pure. Guarantees:
1. every refusal names the setting and what to use instead;
2. `sends_adapters` is true only where every generator of the run takes adapters: the engines that do are listed here,
   a test compares the list with what they say of themselves; of an engine of a plugin `publish = "adapter"` says it.
It holds no tensor: `learners.backends.fsdp2.lora` does.

Example: rank 8, alpha 32 on q_proj `[2048, 1024]`: 24,576 trained numbers for 2,097,152; W = W0 + 4 B A.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Section

#: Built-in engines that take adapters over weights they keep.
TAKE_ADAPTERS = ("hf",)
#: Built-in engines that take whole weights alone.
TAKE_WHOLE = ("vllm", "vllm_http", "sglang")


class LoraConfig(Section, frozen=True):
    """`[learner.lora]`: train low-rank adapters and leave the model's own weights as they are."""

    rank: Count = 0  # of the adapters; 0: off, all weights are trained
    alpha: Annotated[float, Meta(gt=0)] = 32.0  # adapters count alpha / rank
    rslora: bool = False  # adapters count alpha / sqrt(rank) instead (arXiv 2312.03732)
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # of the adapters' inputs, while gradients are computed
    target_modules: tuple[str, ...] = ()  # last parts of names of linear layers; empty: all of the decoder
    publish: Literal["auto", "adapter", "merged"] = "auto"  # auto: adapters to engines that take them, else whole
