"""Rules between the learner's mode, the source of the samples and the rest."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.mode import GROUP_SIZE, streams
from asyncrl.config.rules import Conflict
from asyncrl.config.tree import Config


def problems(config: Config) -> Iterator[Conflict]:
    mode, engine = config.learner.mode, config.producers.engine
    if mode == "rl":
        if streams(config):
            yield (
                "config.conflict",
                "learner.mode = 'rl' cannot train on producers.engine = 'dataset': rows have no "
                "log-probs of the policy that made them; set learner.mode to sft, dpo or reward_model",
                ("producers", "engine"),
            )
        return
    if not streams(config) and mode != "dpo":
        yield (
            "config.conflict",
            f"learner.mode = {mode!r} trains on rows of the data: set producers.engine = 'dataset', not {engine!r}",
            ("producers", "engine"),
        )
    wanted = GROUP_SIZE[mode]
    if config.sampling.group_samples != wanted or (streams(config) and config.sampling.over_issue):
        group = "a pair of answers" if wanted == 2 else "one answer"
        yield (
            "config.conflict",
            f"learner.mode = {mode!r} needs sampling.group_size = {wanted}, over_issue = 0 and "
            f"no greedy_baseline: a group is {group}",
            ("sampling", "group_size"),
        )
    if streams(config) and config.sampling.temperature != 1.0:
        yield (
            "config.conflict",
            "rows were sampled at no temperature of ours: sampling.temperature must be 1",
            ("sampling", "temperature"),
        )
    if streams(config) and config.buffer.filters:
        yield "config.conflict", "rows have no rewards to filter by", ("buffer", "filters")
    if config.learner.preference.label_smoothing and config.learner.preference.loss != "sigmoid":
        yield (
            "config.conflict",
            "label_smoothing is of the sigmoid loss alone",
            ("learner", "preference", "label_smoothing"),
        )
