"""What `asyncrl check` says of settings of the algorithm that work and may surprise.

Guarantees: pure; the default configuration has no note; every preset alone has none. What
cannot work is no note but a problem: see `asyncrl.config.sections.algorithm_catalogue`.

Example: `correction = "none"` with `buffer.max_staleness = 4` gives "correction = 'none': samples of older policies
count in full; the gradient is biased by their lag (up to 4 steps)".
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config import Config
from asyncrl.config.sections.algorithm_catalogue import correction_of, entry

#: Losses that look at the ratio of a whole row.
ROW_RATIOS = frozenset({"gspo", "luspo", "gmpo", "vespo", "topr"})


def notes(config: Config) -> Iterator[str]:
    """All notes on the algorithm of a configuration."""
    if config.learner.mode == "rl":
        yield from _on_corrections(config)
        yield from _on_losses(config)
        yield from _on_models_beside(config)
        yield from _on_entropy(config)


def _on_corrections(config: Config) -> Iterator[str]:
    algorithm = config.learner.algorithm
    correction, loss = correction_of(algorithm), entry("loss", algorithm.loss)
    stale = bool(config.buffer.max_staleness) and algorithm.proximal != "behaviour" and algorithm.advantage != "vtrace"
    if correction == "none" and stale and loss is not None and loss.ratio != "behaviour":
        yield (
            "correction = 'none': samples of older policies count in full; the gradient is biased by their lag "
            f"(up to {config.buffer.max_staleness} steps)"
        )
    if loss is not None and loss.ratio == "none" and algorithm.proximal == "behaviour":
        yield f"loss = {algorithm.loss!r} with proximal = 'behaviour' corrects nothing: the age of samples is ignored"
    if correction != "tis" and algorithm.tis_cap not in (2.0, "off"):
        yield f"tis_cap = {algorithm.tis_cap} has no effect with correction = {correction!r}"
    if algorithm.proximal == "loglinear" and algorithm.minibatches == 1:
        yield "proximal = 'loglinear' saves no forward pass with minibatches = 1: recompute needs none either"


def _on_losses(config: Config) -> Iterator[str]:
    algorithm = config.learner.algorithm
    loss = entry("loss", algorithm.loss)
    if loss is not None and not loss.clip and (algorithm.clip_low, algorithm.clip_high) != (0.2, 0.28):
        yield f"clip_low and clip_high have no effect on loss = {algorithm.loss!r}: set its loss_options"
    if loss is not None and loss.aggregation and algorithm.aggregation != loss.aggregation:
        yield f"loss = {algorithm.loss!r} is always aggregated by {loss.aggregation}"
    if algorithm.advantage == "dr_grpo" and algorithm.aggregation != "seq-mean-token-sum-norm":
        yield "advantage = 'dr_grpo' belongs to aggregation = 'seq-mean-token-sum-norm'"
    if algorithm.loss == "kl_cov" and algorithm.proximal == "recompute" and algorithm.minibatches == 1:
        yield (
            "loss = 'kl_cov' holds tokens back by |current - proximal|, which is 0 with minibatches = 1: it has no "
            "effect before the second mini-batch"
        )


def _on_models_beside(config: Config) -> Iterator[str]:
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


def _on_entropy(config: Config) -> Iterator[str]:
    algorithm = config.learner.algorithm
    if not algorithm.entropy_target and (algorithm.entropy_step, algorithm.entropy_max) != (0.005, 1.0):
        yield "entropy_step and entropy_max have no effect without an entropy_target: entropy_coeff is fixed"
    if algorithm.entropy_keep < 1 and algorithm.loss in ROW_RATIOS:
        yield (
            f"loss = {algorithm.loss!r} has one ratio for a row: with entropy_keep = {algorithm.entropy_keep:g} it "
            "is that of the tokens that are kept"
        )
