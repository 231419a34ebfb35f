"""`[evaluation]`: prompts that are never trained, sampled and scored now and then while the run goes on.

Part of `asyncrl.config`. `problems` lists what contradicts the rest of the file, `notes` what works and may surprise
(`asyncrl check`).

Example: `path = "data/aime24.parquet"`, `every = 20`, `samples = 32`, `temperature = 0.6`: mean@32, best@n, maj@32 and
pass@n after every 20 steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Seconds, Section
from asyncrl.config.sections.mode import streams

if TYPE_CHECKING:
    from asyncrl.config import Config


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


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
    evaluation = config.evaluation
    if evaluation.path and evaluation.source:
        yield "config.data", "set at most one of evaluation.path and evaluation.source", ("evaluation",)
    if not (evaluation.path or evaluation.source):
        if evaluation.every or evaluation.at_start:
            key = "every" if evaluation.every else "at_start"
            yield (
                "config.data",
                f"evaluation.{key} is set without evaluation.path or evaluation.source",
                ("evaluation", key),
            )
        return
    if streams(config):
        yield (
            "config.conflict",
            "producers.engine = 'dataset' generates nothing: there is nothing to evaluate",
            ("evaluation",),
        )
    elif config.learner.mode != "rl" and not config.reward and config.environment.is_single_turn:
        yield "config.missing", "an evaluation needs a [[reward]]", ("evaluation",)
    if evaluation.top_k and evaluation.temperature == 0:
        yield (
            "config.conflict",
            "evaluation.temperature = 0 is greedy: evaluation.top_k says nothing",
            ("evaluation", "top_k"),
        )


def notes(config: Config) -> Iterator[str]:
    """What works and may surprise."""
    evaluation = config.evaluation
    if not (evaluation.path or evaluation.source):
        return
    if not evaluation.enabled:
        yield "evaluation.every, at_start and at_end are off: nothing is evaluated"
        return
    for key in ("path", "source"):
        shared = _parts(getattr(config.data, key)) & _parts(getattr(evaluation, key))
        if shared:
            yield f"evaluation.{key} names what data.{key} trains on ({', '.join(sorted(shared))}): nothing is held out"
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield f"evaluation.temperature = 0: all {evaluation.samples} samples of a prompt are the same"


def _parts(text: str) -> set[str]:
    parts = {part.strip() for part in text.split(",") if part.strip()}
    return {str(Path(part).resolve()) if ":" not in part else part for part in parts}
