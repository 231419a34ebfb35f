"""Held-out evaluation: how its samples are made, where its rows are, and after which steps it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from asyncrl.config.sections.data import DataConfig, SamplingConfig
    from asyncrl.config.tree import Config


def evaluation_sampling(config: Config) -> SamplingConfig:
    """How evaluations sample: as `[evaluation]` says. Temperature 0 is greedy (top_k 1)."""
    evaluation = config.evaluation
    greedy = evaluation.temperature == 0
    return replace(
        config.sampling,
        group_size=evaluation.samples,
        over_issue=0,
        greedy_baseline=False,
        top_p=evaluation.top_p,
        max_new_tokens=evaluation.max_new_tokens or config.sampling.max_new_tokens,
        temperature=1.0 if greedy else evaluation.temperature,
        top_k=1 if greedy else evaluation.top_k,
    )


def evaluation_data(config: Config) -> DataConfig:
    """Where the held-out rows are: `[data]` with path and source of `[evaluation]`, in their own order."""
    return replace(config.data, path=config.evaluation.path, source=config.evaluation.source, shuffle=False)


def is_evaluation_due(config: Config, step: int) -> bool:
    """Whether an evaluation follows this step (0: the start weights)."""
    evaluation = config.evaluation
    if not evaluation.enabled:
        return False
    if step == 0:
        return evaluation.at_start
    if step >= config.learner.steps and evaluation.at_end:
        return True
    return evaluation.every > 0 and step % evaluation.every == 0
