"""Rules between the mode of the learner, the source of the samples and the rest; rules of `[evaluation]`."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.mode import GROUP_SIZE, demonstrates, streams
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections.learner import LearnerConfig
from asyncrl.config.tree import Config
from asyncrl.evaluation.ids import METRICS
from asyncrl.metrics import CATALOGUE, OPEN

SMOOTHED = ("sigmoid", "robust", "simpo")  # losses of pairs that know of wrong labels


def problems(config: Config) -> Iterator[Conflict]:
    yield from _mode_problems(config)
    yield from _self_play_problems(config)
    yield from _evaluation_problems(config)
    yield from _checkpoint_problems(config)


def _mode_problems(config: Config) -> Iterator[Conflict]:
    mode, engine = config.learner.mode, config.producers.engine
    if mode == "rl":
        if streams(config):
            yield conflict(
                "producers.engine",
                "learner.mode = 'rl' cannot train on producers.engine = 'dataset': rows have no log-probs of the "
                "policy that made them; set learner.mode to sft, dpo, kto or reward_model",
            )
        return
    if not streams(config) and mode != "dpo":
        yield conflict(
            "producers.engine",
            f"learner.mode = {mode!r} trains on rows of the data: set producers.engine = 'dataset', not {engine!r}",
        )
    wanted = GROUP_SIZE[mode]
    generated = mode == "dpo" and not streams(config)
    if generated and (config.sampling.group_size < 2 or config.sampling.greedy_baseline):
        what = "a pair is made of the samples of a prompt: set sampling.group_size to 2 or more, and no greedy_baseline"
        yield conflict("sampling.group_size", what)
    elif not generated and (
        config.sampling.group_samples != wanted or (streams(config) and config.sampling.over_issue)
    ):
        group = "a pair of answers" if wanted == 2 else "one answer"
        yield conflict(
            "sampling.group_size",
            f"learner.mode = {mode!r} needs sampling.group_size = {wanted}, over_issue = 0 and no greedy_baseline: a "
            f"group is {group}",
        )
    if streams(config) and config.sampling.temperature != 1.0:
        yield conflict(
            "sampling.temperature",
            "rows were sampled at no temperature of ours: sampling.temperature must be 1",
        )
    if streams(config) and config.buffer.filters:
        yield conflict("buffer.filters", "rows have no rewards to filter by")
    yield from _preference_problems(config.learner)
    yield from _kto_problems(config)


def _preference_problems(learner: LearnerConfig) -> Iterator[Conflict]:
    preference = learner.preference
    if preference.label_smoothing and preference.loss not in SMOOTHED:
        yield conflict("learner.preference.label_smoothing", f"label_smoothing is of the losses {', '.join(SMOOTHED)}")
    if preference.loss == "robust" and not preference.label_smoothing:
        what = "loss = 'robust' needs label_smoothing, the share of wrong labels; without it it is 'sigmoid'"
        yield conflict("learner.preference.loss", what, code="config.missing")
    if preference.margin_key and learner.mode != "reward_model":
        what = f"learner.preference.margin_key is of mode reward_model; mode {learner.mode} has no margins of rows"
        yield conflict("learner.preference.margin_key", what)


def _self_play_problems(config: Config) -> Iterator[Conflict]:
    preference, sampling, here = config.learner.preference, config.sampling, "learner.preference.demonstrations"
    every = preference.iteration
    if preference.demonstrations and not demonstrates(config):
        yield conflict(
            here, f"{here} pairs answers of rows with samples: it needs mode dpo and an engine that generates"
        )
        return
    if every and not preference.has_reference:
        yield conflict(
            "learner.preference.iteration", "learner.preference.iteration renews a reference, and there is none"
        )
    if not preference.demonstrations:
        return
    if sampling.group_size != 2 or sampling.over_issue:
        what = f"{here}: a group is the row's answer and one sample: set sampling.group_size = 2, over_issue = 0"
        yield conflict("sampling.group_size", what)
    if not all(one.is_single_turn for one in config.environments):
        yield conflict(here, f"{here} needs answers of one turn: set no environment")
    if every and config.evaluation.enabled and config.evaluation.every % every:
        what = f"an evaluation within an iteration would publish its version: set a multiple of {every} (iteration)"
        yield conflict("evaluation.every", what)
    if every > config.buffer.max_staleness + 1:
        yield conflict(
            "buffer.max_staleness",
            f"learner.preference.iteration = {every} samples from the version at its start, which is {every - 1} steps "
            f"old at its end: set buffer.max_staleness = {every - 1}, not {config.buffer.max_staleness}",
        )
    depth = config.buffer.pipeline_depth
    if not isinstance(depth, str) and depth < every - 1:
        what = f"a smaller fixed one makes engines take new weights within an iteration of {every} versions: set 'auto'"
        yield conflict("buffer.pipeline_depth", f"buffer.pipeline_depth = {depth}: {what}")


def _kto_problems(config: Config) -> Iterator[Conflict]:
    learner = config.learner
    if learner.mode != "kto":
        return
    if not learner.preference.has_reference:
        yield conflict(
            "learner.preference", "learner.mode = 'kto' compares with a reference: no reference_free, and no loss"
        )
    if config.buffer.batch_groups < 2 * learner.algorithm.minibatches:
        yield conflict(
            "buffer.batch_groups",
            f"learner.mode = 'kto' estimates its KL from the answers of other rows: buffer.batch_groups = "
            f"{config.buffer.batch_groups} gives an update (learner.algorithm.minibatches) fewer than 2 rows",
        )


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
    elif config.learner.mode != "rl" and not config.reward and any(one.is_single_turn for one in config.environments):
        yield conflict("evaluation", "an evaluation needs a [[reward]]", code="config.missing")
    if evaluation.separate and config.producers.url:
        yield conflict(
            "evaluation.lane",
            "evaluation.lane = 'evaluators' starts engines of its own, and producers.url names servers of producers",
        )
    if evaluation.second_weights and config.weightsync.in_place:
        yield conflict(
            "evaluation.lane",
            "with weightsync.in_place = true an engine has no second set of weights: set evaluation.lane = 'auto'",
        )
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
