"""`[evaluation]`: prompts that are never trained, sampled and scored now and then while the run goes on.

Part of `asyncrl.config`. `problems` lists what contradicts the rest of the file, `notes` what works and may surprise
(`asyncrl check`).

Example: `path = "data/aime24.parquet"`, `every = 20`, `samples = 32`, `temperature = 0.6`: mean@32, best@n, maj@32 and
pass@n after every 20 steps.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Seconds, Section


class EvaluationConfig(Section, frozen=True):
    """`[evaluation]`: held-out prompts, sampled and scored by the same workers and never trained."""

    path: str = ""  # like data.path; the columns are those of data
    source: str = ""  # like data.source; neither: no evaluation
    every: Count = 0  # learner steps from one evaluation to the next; 0: none by step
    at_start: bool = False  # one of the start weights
    at_end: bool = True  # one of the last step's weights; the run waits for it, up to timeout_s
    samples: Positive = 1  # per prompt: the k of mean@k, best@k, maj@k and pass@k
    temperature: Annotated[float, Meta(ge=0)] = 0.0  # 0: greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: off
    top_k: Count = 0  # 0: off
    max_new_tokens: Count = 0  # longest response; 0: sampling.max_new_tokens
    max_prompts: Count = 0  # the first so many rows; 0: all
    timeout_s: Seconds = 600.0  # of one evaluation; what is missing then is counted, with its reason
    share: Annotated[float, Meta(gt=0, le=1)] = 0.25  # of what a producer holds for training it may hold beside that

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.path or self.source) and bool(self.every or self.at_start or self.at_end)

    def held_groups(self, *, training_samples: int) -> int:
        """Prompts of an evaluation that a producer may hold beside so many samples of training; at least 1."""
        return max(1, int(self.share * training_samples) // self.samples)
