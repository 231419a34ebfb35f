"""What a run trains: by reward (rl), or on rows that are given (sft, dpo, reward_model); and what follows from it.

Where the samples come from is another question: with `producers.engine = "dataset"` a
producer streams rows of the data instead of generating. Guarantees:
1. rows are made by no weights, so no bound of staleness applies to them: the bound of every group is the length of the
   run, and `buffer.pipeline_depth` alone says how far the producer reads ahead;
2. a run over rows has no weight sync and no reward workers;
3. `data.epochs` becomes `learner.steps` before anything starts; the run ends with its last step like any other.

Example: 10 rows, batch_groups 4, epochs 3: ceil(30 / 4) = 8 steps; the last batch is filled up from a fourth epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config

#: Name of the engine that streams rows instead of generating.
DATASET = "dataset"
#: First letters of a digest in the history that is not of weights, but of the data that a row came from.
DATA_PREFIX = "data:"
#: Samples of a group by mode of the learner: one answer, or a chosen and a rejected one.
GROUP_SIZE = {"sft": 1, "dpo": 2, "reward_model": 2}
#: Roles of `launch all` that a run over rows does not have: its weights go to nobody, its rows are scored.
GENERATING = frozenset({"weightsync", "reward"})

#: Code, message, and the path of the key that a contradiction stands at.
Conflict = tuple[str, str, tuple[str, ...]]


def streams(config: Config) -> bool:
    """Whether producers stream rows instead of generating."""
    return config.producers.engine == DATASET


def is_paired(config: Config) -> bool:
    """Whether a group is a chosen and a rejected answer."""
    return GROUP_SIZE.get(config.learner.mode) == 2


def bound_of(config: Config) -> int:
    """The largest lag of a group: `buffer.max_staleness`; for rows the whole run."""
    return config.learner.steps if streams(config) else config.buffer.max_staleness


def roles_of(target: Sequence[str], config: Config) -> tuple[str, ...]:
    """The roles of a launch target that this run has."""
    return tuple(role for role in target if not (streams(config) and role in GENERATING))


def longest_row(config: Config) -> int:
    """Tokens that one packed row of the learner must hold: a sample, or the two of a pair."""
    sample = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return 2 * sample if is_paired(config) else sample


def answer_keys(config: Config) -> tuple[str, ...]:
    """Columns of the answers of a row, in the order of the group's samples."""
    data = config.data
    return (data.chosen_key, data.rejected_key) if is_paired(config) else (data.response_key,)


def with_epochs(config: Config, rows: int | None) -> Config:
    """The configuration with `learner.steps` for `data.epochs` passes over so many rows (None: not known).

    Raises:
        ConfigError: the number of rows is not known.
    """
    if not config.data.epochs:
        return config
    if not rows:
        raise ConfigError("config.data", "the number of rows is not known: set learner.steps", where="data.epochs")
    steps = -(-config.data.epochs * rows // config.buffer.batch_groups)
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, steps=steps))


def conflicts(config: Config) -> Iterator[Conflict]:
    """Contradictions between the learner's mode, where samples come from, and the rest."""
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
