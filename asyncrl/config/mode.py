"""What a run trains: by reward (rl) or on given rows (sft, dpo, kto, reward_model); its evaluations, and what follows.

Where the samples come from is a separate question: with `producers.engine = "dataset"` a producer streams rows of the
data instead of generating. Guarantees:
1. no weights made the rows, so no staleness bound applies to them: the bound of every group is the length of the run,
   and only `buffer.pipeline_depth` limits how far the producer reads ahead;
2. a run over rows has no weight sync and no reward workers;
3. `data.epochs` becomes `learner.steps` before anything starts; the run ends with its last step like any other.

Example: 10 rows, batch_groups 4, epochs 3: ceil(30 / 4) = 8 steps; the last batch is filled from a fourth epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from asyncrl.config.sections.algorithm_catalogue import explain
from asyncrl.config.sections.lora import TAKE_ADAPTERS
from asyncrl.config.tree import Config
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.sections.data import DataConfig, SamplingConfig

#: Name of the engine that streams rows instead of generating.
DATASET = "dataset"
#: Prefix of digests in the history that belong to the data of a row, not to weights.
DATA_PREFIX = "data:"
#: Samples of a group by mode of the learner: one answer, or a chosen and a rejected one.
GROUP_SIZE = {"sft": 1, "dpo": 2, "kto": 1, "reward_model": 2}
#: Roles of `launch all` that a run over rows does not need: it syncs no weights and scores nothing.
GENERATING = frozenset({"weightsync", "reward"})


def streams(config: Config) -> bool:
    """Whether producers stream rows instead of generating."""
    return config.producers.engine == DATASET


def is_paired(config: Config) -> bool:
    """Whether a group is a chosen and a rejected answer."""
    return GROUP_SIZE.get(config.learner.mode) == 2


def demonstrates(config: Config) -> bool:
    """Whether sample 0 of a group is the answer of its row, and the others are generated (self-play)."""
    learner = config.learner
    return learner.mode == "dpo" and learner.preference.demonstrations and not streams(config)


def publishes(config: Config, step: int) -> bool:
    """Whether producers get the weights after this step: during an iteration of self-play they keep those before it."""
    every = config.learner.preference.iteration if demonstrates(config) else 0
    return not every or step % every == 0 or step == config.learner.steps or is_evaluation_due(config, step)


def staleness_bound(config: Config) -> int:
    """The largest lag of a group: `buffer.max_staleness`; for rows, the whole run."""
    return config.learner.steps if streams(config) else config.buffer.max_staleness


def present_roles(target: Sequence[str], config: Config) -> tuple[str, ...]:
    """The roles of a launch target that this run has."""
    absent = (GENERATING if streams(config) else frozenset()) | (
        frozenset() if config.evaluation.separate else {"evaluator"}
    )
    if demonstrates(config) and not config.reward:
        absent |= {"reward"}
    return tuple(role for role in target if role not in absent)


def longest_row(config: Config) -> int:
    """Tokens that one packed row of the learner must hold: a sample, or the two of a pair."""
    sample = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return 2 * sample if is_paired(config) else sample


def answer_keys(config: Config) -> tuple[str, ...]:
    """Columns of the answers of a row, in the order of the group's samples."""
    return tuple(getattr(config.data, key) for key in _answer_settings(config))


def answer_columns(config: Config, row: Mapping[str, Any]) -> dict[str, str]:
    """Setting and name of the columns that rows need besides the prompt. A conversation may end with its answer."""
    if demonstrates(config):
        return {"response_key": config.data.response_key}
    if not streams(config):
        return {}
    optional = not (is_paired(config) or isinstance(row.get(config.data.prompt_key), str))
    answers = () if optional else _answer_settings(config)
    labels = ("label_key",) if config.learner.mode == "kto" else ()
    return {key: getattr(config.data, key) for key in (*answers, *labels)}


def _answer_settings(config: Config) -> tuple[str, ...]:
    if is_paired(config):
        return ("chosen_key", "rejected_key")
    return ("completion_key",) if config.learner.mode == "kto" else ("response_key",)


def explain_update(config: Config) -> str:
    """The update in force in one line: for rewards the algorithm, else mode, loss and reference."""
    learner, preference = config.learner, config.learner.preference
    if learner.mode == "rl":
        return explain(learner.algorithm)
    if learner.mode not in ("dpo", "kto"):
        return learner.mode
    loss = preference.loss if learner.mode == "dpo" else "kto"
    every = preference.iteration
    frozen = f"the weights of every {every} versions" if every else "the start weights"
    reference = frozen if preference.has_reference else "no reference"
    pairs = "" if streams(config) else ", the best and the worst sample of each prompt"
    if demonstrates(config):
        pairs = ", the row's answer and a sample of each prompt"
    return f"{loss}(beta={preference.beta:g}) against {reference}{pairs}"


def derive_steps(config: Config, rows: int | None) -> Config:
    """Set `learner.steps` for `data.epochs` passes over `rows` rows (None: unknown).

    Raises:
        ConfigError: the number of rows is unknown.
    """
    if not config.data.epochs:
        return config
    if not rows:
        raise ConfigError("config.data", "the number of rows is not known: set learner.steps", where="data.epochs")
    steps = -(-config.data.epochs * rows // config.buffer.batch_groups)
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, steps=steps))


def sends_adapters(config: Config) -> bool:
    """Whether versions after the base are published as adapters instead of full weights with the adapters merged."""
    lora = config.learner.lora
    if not lora.rank or streams(config):
        return False
    sync = config.weightsync
    fits = config.producers.engine in TAKE_ADAPTERS and not sync.in_place and not sync.quantised
    return lora.publish == "adapter" or (lora.publish == "auto" and fits)


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
        min_p=evaluation.min_p,
        truncation="biased",  # nothing of it is trained
        max_new_tokens=evaluation.max_new_tokens or config.sampling.max_new_tokens,
        temperature=1.0 if greedy else evaluation.temperature,
        top_k=1 if greedy else evaluation.top_k,
    )


def evaluation_data(config: Config) -> DataConfig:
    """Where the held-out rows are: `[data]` with path and source of `[evaluation]`, in their own order."""
    held = config.evaluation
    return replace(config.data, path=held.path, source=held.source, shuffle=False, sampler="", ratios=())


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
