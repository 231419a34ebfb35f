"""`[evaluation]`: held-out prompts, sampled and scored now and then during the run, never trained.

Example: `path = "data/aime24.parquet"`, `every = 20`, `samples = 32`, `temperature = 0.6`: mean@32, best@n, maj@32 and
pass@n after every 20 steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Seconds, Section

Lane = Literal["auto", "before_swap", "second_weights", "evaluators"]


class EvaluationConfig(Section, frozen=True):
    """`[evaluation]`: held-out prompts, sampled and scored by the same workers, never trained."""

    path: str = ""  # like data.path; [data] names the columns
    source: str = ""  # like data.source; neither: no evaluation
    every: Count = 0  # learner steps between evaluations; 0: none by step
    at_start: bool = False  # evaluate the start weights
    at_end: bool = True  # evaluate the last step's weights; the run waits for it, up to timeout_s
    samples: Positive = 1  # samples per prompt: k of mean@k, best@k, maj@k and pass@k
    temperature: Annotated[float, Meta(ge=0)] = 0.0  # 0: greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    top_k: Count = 0  # 0: off
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # 0: off
    max_new_tokens: Count = 0  # longest response; 0: sampling.max_new_tokens
    max_prompts: Count = 0  # use only the first rows; 0: all
    timeout_s: Seconds = 600.0  # time limit of one evaluation; missing prompts are counted with their reason
    share: Annotated[float, Meta(gt=0, le=1)] = 0.25  # a producer may hold this share of its training work in addition
    lane: Lane = "auto"  # what keeps the version while its prompts are generated; auto: before_swap
    evaluators: Positive = 1  # lane evaluators: processes on this host that generate held-out prompts alone

    @property
    def separate(self) -> bool:
        """Whether processes of their own generate the prompts. `auto` is before_swap: that needs no memory and no
        device, so it always fits."""
        return self.enabled and self.lane == "evaluators"

    @property
    def second_weights(self) -> bool:
        """Whether engines of producers keep the measured version next to newer ones."""
        return self.enabled and self.lane == "second_weights"

    @property
    def delays_swaps(self) -> bool:
        """Whether producers take no newer weights while prompts of the measured version are left."""
        return self.enabled and not (self.separate or self.second_weights)

    @property
    def evaluator_count(self) -> int:
        """Evaluators on this host; 0 in another lane."""
        return self.evaluators if self.separate else 0

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.path or self.source) and bool(self.every or self.at_start or self.at_end)

    def held_groups(self, *, training_samples: int) -> int:
        """Evaluation prompts that a producer may hold in addition to its training samples; at least 1."""
        return max(1, int(self.share * training_samples) // self.samples)
