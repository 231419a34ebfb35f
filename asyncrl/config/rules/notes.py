"""Notes of `asyncrl check`: settings that work and may surprise. The default configuration has none, nor has a preset
with a batch that is large enough for its updates.

Example: `correction = "none"` with `buffer.max_staleness = 4` gives "correction = 'none': samples of older policies
count in full; the gradient is biased by their lag (up to 4 steps)".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.algorithm_catalogue import (
    OLD_STEPS,
    ROW_RATIOS,
    effective_correction,
    entry,
    idle_limit,
    level_of_age,
)
from asyncrl.config.tree import Config
from asyncrl.evaluation.ids import METRICS

GROUPS_PER_UPDATE = 4  # updates of fewer may overshoot at the learning rate of a whole batch (docs/learning.md)
#: What losses without a limit do with the distance of the policy from the proximal one.
DISTANCES = {
    "kl_cov": "holds tokens back by |current - proximal|",
    "dro": "has a penalty beta * (current - proximal)^2",
    "topr": "weighs bad responses by their distance current - proximal",
}


def notes(config: Config) -> Iterator[str]:
    yield from _algorithm_notes(config)
    yield from _checkpoint_notes(config)
    yield from _evaluation_notes(config)


def _evaluation_notes(config: Config) -> Iterator[str]:
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
    if evaluation.delays_swaps and evaluation.timeout_s > config.run.hang_timeout_s:
        yield (
            f"evaluation.timeout_s = {evaluation.timeout_s:g} is longer than run.hang_timeout_s = "
            f"{config.run.hang_timeout_s:g}: training may wait that long for an evaluation"
        )
    if evaluation.temperature == 0 and evaluation.samples > 1:
        yield f"evaluation.temperature = 0: all {evaluation.samples} samples of a prompt are the same"


def _parts(text: str) -> set[str]:
    parts = {part.strip() for part in text.split(",") if part.strip()}
    return {str(Path(part).resolve()) if ":" not in part else part for part in parts}


def _checkpoint_notes(config: Config) -> Iterator[str]:
    learner, evaluation = config.learner, config.evaluation
    if not learner.checkpoint_best or not learner.checkpoint_metric.startswith(METRICS) or not evaluation.every:
        return
    common = math.lcm(learner.checkpoint_every, evaluation.every)
    if common != evaluation.every:
        yield (
            f"checkpoints are made every {learner.checkpoint_every} steps and evaluated every {evaluation.every}: only "
            f"those of every {common} steps can be among the best"
        )


def _algorithm_notes(config: Config) -> Iterator[str]:
    if config.learner.mode == "rl":
        yield from _correction_notes(config)
        yield from _loss_notes(config)
        yield from _update_notes(config)
        yield from _companion_notes(config)
        yield from _entropy_notes(config)


def _correction_notes(config: Config) -> Iterator[str]:
    algorithm = config.learner.algorithm
    correction, loss = effective_correction(algorithm), entry("loss", algorithm.loss)
    stale = bool(config.buffer.max_staleness) and algorithm.proximal != "behaviour" and algorithm.advantage != "vtrace"
    if correction == "none" and stale and loss is not None and loss.ratio != "behaviour":
        yield (
            "correction = 'none': samples of older policies count in full; the gradient is biased by their lag "
            f"(up to {config.buffer.max_staleness} steps)"
        )
    if loss is not None and loss.ratio == "none" and algorithm.proximal == "behaviour":
        yield f"loss = {algorithm.loss!r} with proximal = 'behaviour' corrects nothing: the age of samples is ignored"
    age = min(config.buffer.depth, config.buffer.max_staleness)
    if stale and config.buffer.pipeline_depth != "auto" and age >= OLD_STEPS and level_of_age(algorithm) == "token":
        yield (
            f"pipeline_depth = {config.buffer.pipeline_depth!r}: samples are up to {age} steps old. From {OLD_STEPS} "
            "steps on, weights of whole responses learn more from answers of up to a few hundred tokens than those of "
            "single tokens: set correction_options = { level = 'sequence' }, or pipeline_depth = 'auto'"
        )
    if correction != "tis" and algorithm.tis_cap not in (2.0, "off"):
        yield f"tis_cap = {algorithm.tis_cap} has no effect with correction = {correction!r}"
    if algorithm.proximal == "loglinear" and algorithm.minibatches == 1:
        yield "proximal = 'loglinear' saves no forward pass with minibatches = 1: recompute needs none either"


def _loss_notes(config: Config) -> Iterator[str]:
    algorithm = config.learner.algorithm
    loss = entry("loss", algorithm.loss)
    synchronous = not min(config.buffer.depth, config.buffer.max_staleness)
    if (limit := idle_limit(algorithm, synchronous=synchronous)) and _is_own_choice(algorithm):
        remedies = "set minibatches above 1"
        if algorithm.loss != "clip_cov" and not synchronous:
            remedies += f", or clip_against = 'behaviour', which measures the {limit} from the policy that sampled"
        yield (
            f"loss = {algorithm.loss!r}: its {limit} cannot act. With one update per batch (minibatches = 1) the "
            f"policy is still the one that the ratio compares with, and the ratio is 1: {remedies}"
        )
    if loss is not None and not loss.clip and (algorithm.clip_low, algorithm.clip_high) != (0.2, 0.28):
        yield f"clip_low and clip_high have no effect on loss = {algorithm.loss!r}: set its loss_options"
    if loss is not None and loss.aggregation and algorithm.aggregation != loss.aggregation:
        yield f"loss = {algorithm.loss!r} is always aggregated by {loss.aggregation}"
    if algorithm.advantage == "dr_grpo" and algorithm.aggregation != "seq-mean-token-sum-norm":
        yield "advantage = 'dr_grpo' belongs to aggregation = 'seq-mean-token-sum-norm'"
    if algorithm.loss in DISTANCES and algorithm.proximal == "recompute" and algorithm.minibatches == 1:
        yield (
            f"loss = {algorithm.loss!r} {DISTANCES[algorithm.loss]}, which is 0 with minibatches = 1: it has no effect "
            "before the second mini-batch. Set minibatches above 1, or proximal = 'behaviour'"
        )
    if algorithm.kl.where == "loss" and algorithm.kl.kind in ("k1", "kl"):
        yield (
            f"kl.kind = {algorithm.kl.kind!r} in the loss holds nothing back: its gradient is 0 in expectation. Set "
            "kl.kind = 'k2' or 'k3', or kl.where = 'reward'"
        )


def _update_notes(config: Config) -> Iterator[str]:
    updates, groups = config.learner.algorithm.minibatches, config.buffer.batch_groups
    if updates > 1 and groups < updates * GROUPS_PER_UPDATE:
        seen = "1 group" if groups == updates else f"{groups / updates:.3g} groups"
        yield (
            f"minibatches = {updates} with buffer.batch_groups = {groups}: an update sees {seen}. Updates of fewer "
            f"than {GROUPS_PER_UPDATE} may overshoot at the learning rate of a whole batch: raise batch_groups to "
            f"{updates * GROUPS_PER_UPDATE}, or lower minibatches or learner.optim.lr"
        )


def _is_own_choice(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss or its clip was chosen, not left to the defaults."""
    usual = AlgorithmConfig()
    names = ("preset", "loss", "loss_options", "clip_low", "clip_high")
    return any(getattr(algorithm, name) != getattr(usual, name) for name in names)


def _companion_notes(config: Config) -> Iterator[str]:
    advantage = config.learner.algorithm.advantage
    critic, process, known = config.learner.critic, config.learner.process_reward, entry("advantage", advantage)
    if known is None:
        return
    if "critic" not in known.needs and critic != type(critic)():
        yield f"[learner.critic] has no effect on advantage = {advantage!r}: it needs no values"
    if "process" not in known.needs and process != type(process)():
        yield f"[learner.process_reward] has no effect on advantage = {advantage!r}: it needs no such rewards"
    if "process" in known.needs and not process.lr and process.reference in ("", process.model):
        yield (
            "learner.process_reward.lr = 0: the process reward model stays equal to its reference, and all process "
            "rewards are 0"
        )


def _entropy_notes(config: Config) -> Iterator[str]:
    algorithm = config.learner.algorithm
    if not algorithm.entropy_target and (algorithm.entropy_step, algorithm.entropy_max) != (0.005, 1.0):
        yield "entropy_step and entropy_max have no effect without an entropy_target: entropy_coeff is fixed"
    if algorithm.entropy_keep < 1 and algorithm.loss in ROW_RATIOS:
        yield (
            f"loss = {algorithm.loss!r} has one ratio for a row: with entropy_keep = {algorithm.entropy_keep:g} it "
            "is that of the tokens that are kept"
        )
