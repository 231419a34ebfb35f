"""Rules of `[evaluation]`, and of the checkpoints that its figures choose."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.mode import streams
from asyncrl.config.rules import Conflict
from asyncrl.config.tree import Config
from asyncrl.evaluation.ids import METRICS
from asyncrl.metrics import CATALOGUE, OPEN


def problems(config: Config) -> Iterator[Conflict]:
    yield from _evaluation_problems(config)
    yield from _checkpoint_problems(config)


def _evaluation_problems(config: Config) -> Iterator[Conflict]:
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


KEY = ("learner", "checkpoint_metric")


def _checkpoint_problems(config: Config) -> Iterator[Conflict]:
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
