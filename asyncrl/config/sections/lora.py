"""`[learner.lora]`: low-rank adapters (LoRA, arXiv 2106.09685) in the place of all weights, and what it refuses.

Pure. Guarantees:
1. every refusal names the setting and what to use instead;
2. `sends_adapters` is true only where every generator of the run takes adapters: the engines that do are listed here,
   a test compares the list with what they say of themselves; of an engine of a plugin `publish = "adapter"` says it.
It holds no tensor: `learners.backends.fsdp2.lora` does.

Example: rank 8, alpha 32 on q_proj `[2048, 1024]`: 24,576 trained numbers for 2,097,152; W = W0 + 4 B A.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections import mode as modes
from asyncrl.config.sections.base import Count, Section

if TYPE_CHECKING:
    from asyncrl.config import Config

#: Built-in engines that take adapters over weights they keep.
TAKE_ADAPTERS = ("hf",)
#: Built-in engines that take whole weights alone.
TAKE_WHOLE = ("vllm", "vllm_http", "sglang")

#: Code, message, path of the key.
Conflict = tuple[str, str, tuple[str, ...]]


class LoraConfig(Section, frozen=True):
    """`[learner.lora]`: train low-rank adapters and leave the model's own weights as they are."""

    rank: Count = 0  # of the adapters; 0: off, all weights are trained
    alpha: Annotated[float, Meta(gt=0)] = 32.0  # adapters count alpha / rank
    rslora: bool = False  # adapters count alpha / sqrt(rank) instead (arXiv 2312.03732)
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # of the adapters' inputs, while gradients are computed
    target_modules: tuple[str, ...] = ()  # last parts of names of linear layers; empty: all of the decoder
    publish: Literal["auto", "adapter", "merged"] = "auto"  # auto: adapters to engines that take them, else whole


def sends_adapters(config: Config) -> bool:
    """Whether versions after the base are published as adapters, not as whole weights with the adapters added."""
    lora = config.learner.lora
    if not lora.rank or modes.streams(config):
        return False
    fits = config.producers.engine in TAKE_ADAPTERS and not config.weightsync.in_place
    return lora.publish == "adapter" or (lora.publish == "auto" and fits)


def problems(config: Config) -> Iterator[Conflict]:
    """What adapters do not go with."""
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
            yield code, f"{what} with weightsync.in_place: an adapter needs its base beside it: use auto", place
