"""Rules of `[evaluation]`, and of the checkpoints that its figures choose."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.mode import streams
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.tree import Config
from asyncrl.evaluation.ids import METRICS
from asyncrl.metrics import CATALOGUE, OPEN


def problems(config: Config) -> Iterator[Conflict]:
    yield from _evaluation_problems(config)
    yield from _checkpoint_problems(config)


def _evaluation_problems(config: Config) -> Iterator[Conflict]:
    evaluation = config.evaluation
    if evaluation.path and evaluation.source:
        yield conflict("evaluation", "set at most one of evaluation.path and evaluation.source", code="config.data")
    if not (evaluation.path or evaluation.source):
        if evaluation.every or evaluation.at_start:
            key = "every" if evaluation.every else "at_start"
            yield conflict(
                f"evaluation.{key}",
                f"evaluation.{key} is set without evaluation.path or evaluation.source",
                code="config.data",
            )
        return
    if streams(config):
        yield conflict("evaluation", "producers.engine = 'dataset' generates nothing: there is nothing to evaluate")
    elif config.learner.mode != "rl" and not config.reward and config.environment.is_single_turn:
        yield conflict("evaluation", "an evaluation needs a [[reward]]", code="config.missing")
    if evaluation.top_k and evaluation.temperature == 0:
        yield conflict("evaluation.top_k", "evaluation.temperature = 0 is greedy: evaluation.top_k says nothing")


KEY = "learner.checkpoint_metric"


def _checkpoint_problems(config: Config) -> Iterator[Conflict]:
    learner = config.learner
    name = learner.checkpoint_metric
    if not learner.checkpoint_best:
        return
    if name.startswith(METRICS):
        if not (config.evaluation.enabled and config.evaluation.every):
            yield conflict(
                KEY,
                f"learner.checkpoint_metric = {name!r} is a figure of evaluations: set evaluation.path or "
                "evaluation.source, and evaluation.every",
            )
    elif not name.startswith(OPEN) and (name not in CATALOGUE or CATALOGUE[name].role != "learner"):
        yield conflict(
            KEY,
            f"learner.checkpoint_metric = {name!r} is neither a metric of the learner's steps nor a figure of "
            "evaluations (docs/metrics.md)",
        )
