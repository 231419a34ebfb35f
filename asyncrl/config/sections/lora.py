"""`[learner.lora]` and `[learner.profile]`: low-rank adapters (LoRA, arXiv 2106.09685), and traces of single steps.

A test compares the lists of engines with what the engines say of themselves; for an engine of a plugin, `publish =
"adapter"` declares support.

Example: rank 8, alpha 32 on q_proj `[2048, 1024]`: 24,576 trained numbers for 2,097,152; W = W0 + 4 B A. `profile.steps
= "5:8"`, `ranks = [0, 3]`, `memory = true`: traces and memory of ranks 0 and 3 for the steps 5 to 8.
"""

from __future__ import annotations

import re
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


class ProfileConfig(Section, frozen=True):
    """`[learner.profile]`: traces of single steps, and the peak for utilization."""

    steps: str = ""  # steps to trace, "5:8" for 5 to 8 (both included) or "5"; empty: none. Files: RUN/profile
    ranks: tuple[Count, ...] = (0,)  # ranks that write a trace
    memory: bool = False  # also record the device's memory over these steps
    peak_flops: Annotated[float, Meta(ge=0)] = 0.0  # of one device, for mfu; 0: by its name (on a CPU: no mfu)


def parse_steps(text: str) -> range:
    """The steps of a setting; empty for an empty text.

    >>> list(parse_steps("5:8")), list(parse_steps("5")), list(parse_steps(""))
    ([5, 6, 7, 8], [5], [])

    Raises:
        ValueError: it is not a range of steps.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} is not a step such as 5, nor a range such as 5:8")
    return range(first, last + 1)
