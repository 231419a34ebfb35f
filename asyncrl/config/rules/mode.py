"""Rules between the learner's mode, the source of the samples and the rest."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.mode import GROUP_SIZE, streams
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.tree import Config


def problems(config: Config) -> Iterator[Conflict]:
    mode, engine = config.learner.mode, config.producers.engine
    if mode == "rl":
        if streams(config):
            yield conflict(
                "producers.engine",
                "learner.mode = 'rl' cannot train on producers.engine = 'dataset': rows have no log-probs of the "
                "policy that made them; set learner.mode to sft, dpo or reward_model",
            )
        return
    if not streams(config) and mode != "dpo":
        yield conflict(
            "producers.engine",
            f"learner.mode = {mode!r} trains on rows of the data: set producers.engine = 'dataset', not {engine!r}",
        )
    wanted = GROUP_SIZE[mode]
    if config.sampling.group_samples != wanted or (streams(config) and config.sampling.over_issue):
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
    if config.learner.preference.label_smoothing and config.learner.preference.loss != "sigmoid":
        yield conflict("learner.preference.label_smoothing", "label_smoothing is of the sigmoid loss alone")
