"""What contradicts itself, and what may surprise, in the settings `learner.checkpoint_*`.

Pure; it holds no setting.

Example: checkpoint_best = 2 with checkpoint_metric = "val-core/aime24/reward/mean@32" and no [evaluation]: refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.evaluation.ids import METRICS
from asyncrl.metrics import CATALOGUE, OPEN

if TYPE_CHECKING:
    from asyncrl.config import Config

KEY = ("learner", "checkpoint_metric")


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
    learner = config.learner
    name = learner.checkpoint_metric
    if not learner.checkpoint_best:
        return
    if name.startswith(METRICS):
        if not (config.evaluation.enabled and config.evaluation.every):
            yield (
                "config.conflict",
                f"learner.checkpoint_metric = {name!r} is a figure of evaluations: set "
                "evaluation.path or evaluation.source, and evaluation.every",
                KEY,
            )
    elif not name.startswith(OPEN) and (name not in CATALOGUE or CATALOGUE[name].role != "learner"):
        yield (
            "config.conflict",
            f"learner.checkpoint_metric = {name!r} is neither a metric of the learner's steps "
            "nor a figure of evaluations (docs/metrics.md)",
            KEY,
        )


def notes(config: Config) -> Iterator[str]:
    """What works and may surprise."""
    learner, evaluation = config.learner, config.evaluation
    if not learner.checkpoint_best or not learner.checkpoint_metric.startswith(METRICS) or not evaluation.every:
        return
    common = math.lcm(learner.checkpoint_every, evaluation.every)
    if common != evaluation.every:
        yield (
            f"checkpoints are made every {learner.checkpoint_every} steps and evaluated every {evaluation.every}: only "
            f"those of every {common} steps can be among the best"
        )
