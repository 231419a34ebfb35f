"""`[learner.algorithm]`: advantage, loss and correction of a run, and their numbers.

`asyncrl.config.sections.algorithm_catalogue` lists the names; `asyncrl.config.rules.algorithm` knows which of them fit
together. The tables `*_options` are keyword arguments of the chosen function; the word "off" in them is Python's None.
`clip_low`, `clip_high` and `tis_cap` are short forms for the losses and corrections that have them.

Example: `loss = "gspo"` with `loss_options = { clip_low = 3e-4, clip_high = 4e-4 }`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from asyncrl.config.sections.base import Count, Positive, Section, Share, one_of_or_place

Above0 = Annotated[float, Meta(gt=0)]
From0 = Annotated[float, Meta(ge=0)]
Kept = Annotated[float, Meta(gt=0, le=1)]
KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
KLKind = Annotated[str, one_of_or_place("auto", *KL_KINDS, *(f"{kind}+" for kind in KL_KINDS))]
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
Aggregation = Annotated[str, one_of_or_place(*AGGREGATIONS)]


class KLConfig(Section, frozen=True):
    """`[learner.algorithm.kl]`: divergence from a frozen reference model, in the loss or in the reward."""

    where: Literal["off", "loss", "reward"] = "off"  # only one of them: both would penalize the same distance twice
    kind: KLKind = "auto"  # estimator; auto: k3 in the loss, k1 in the reward; or your own, as 'file.py:name'
    coeff: From0 = 0.001  # weight; the start value with controller = adaptive
    importance_weighted: bool = False  # in the loss: k3 with the importance weights of the policy loss
    controller: Literal["fixed", "adaptive"] = "fixed"  # adaptive: in the reward, towards `target`
    target: Above0 = 0.1  # target in nats per token
    horizon: Above0 = 10000.0  # samples; smaller adapts faster


class ShapingConfig(Section, frozen=True):
    """`[learner.algorithm.shaping]`: what happens to rewards and rows before advantages are estimated."""

    overlong_buffer: Count = 0  # tokens before the limit over which the penalty grows; 0: off
    overlong_share: Share = 0.0  # the same as a share of the limit, if overlong_buffer is 0
    overlong_factor: From0 = 1.0  # penalty at the limit
    overlong_max: Count = 0  # the limit; 0: sampling.max_new_tokens
    overlong_filter: bool = False  # exclude samples cut by max_new_tokens from training, not from their group
    passk: Count = 0  # transform scores above correct_above so that the gradient raises pass@k; 0: off
    correct_above: float = 0.5  # a score above this is a correct answer
    resample: Literal["off", "pow", "max_min", "max_random"] = "off"  # PF-PPO: draw rows by score, with replacement
    resample_power: Above0 = 2.0  # exponent of resample = pow


class LagConfig(Section, frozen=True):
    """`[learner.algorithm.lag]`: effects of a sample's age in addition to its importance weight."""

    weight: Literal["off", "exp", "power"] = "off"  # weight of a sample: e^(-lag / tau) or (1 + lag)^-kappa
    tau: Above0 = 4.0  # steps, for weight = exp
    kappa: From0 = 0.5  # for weight = power
    normalize: bool = True  # scale the learning rate by the root of the samples' effective share
    step_scale: Literal["off", "sqrt_ess"] = "off"  # learning rate times the root of the samples' effective share


class AlgorithmConfig(Section, frozen=True):
    """`[learner.algorithm]`: GRPO with decoupled PPO and truncated importance weights unless set otherwise."""

    preset: str = ""  # name in configs/presets, or a .toml; settings of this file override it
    advantage: str = "grpo"  # estimator: see algorithms.md, 'file.py:name', or an entry point of asyncrl.advantages
    advantage_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the estimator
    loss: str = "decoupled_ppo"  # policy loss: see algorithms.md, 'file.py:name', or an entry point of asyncrl.losses
    loss_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the loss
    correction: str = "auto"  # auto: tis, or none if the loss or advantage already corrects for the behaviour policy
    correction_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the correction
    proximal: Literal["recompute", "behaviour", "loglinear"] = "recompute"  # the policy that the loss compares with
    clip_against: Literal["proximal", "behaviour"] = "proximal"  # the policy whose distance the clip of a loss measures
    clip_low: Above0 = 0.2  # PPO losses: lowest ratio is 1 - clip_low
    clip_high: Above0 = 0.28  # PPO losses: highest ratio is 1 + clip_high
    tis_cap: Above0 | Literal["off"] = 2.0  # correction = tis: largest exp(proximal - behaviour)
    aggregation: Aggregation = "token-mean"  # how the loss is averaged over the batch; or 'file.py:name'
    sequence: Literal["sample", "row"] = "sample"  # what counts once in seq-mean: a sample with all rows, or each row
    loss_scale_factor: From0 = 0.0  # divisor of seq-mean-token-sum-norm; 0: sampling.max_new_tokens
    denominator: Literal["original", "kept"] = "original"  # whether rejected tokens count in the denominator
    entropy_coeff: From0 = 0.0  # weight of the entropy bonus; the start value with an entropy_target
    entropy_target: From0 = 0.0  # nats per token: the weight grows while entropy is below the target; 0: fixed weight
    entropy_step: Above0 = 0.005  # change of the weight per step, with entropy_target
    entropy_max: Above0 = 1.0  # largest weight, with entropy_target
    entropy_keep: Kept = 1.0  # share of the batch's tokens, those of highest entropy, that the loss trains; 1: all
    stale_negatives: From0 = 0.0  # exclude bad samples with mean(behaviour - current) above this; 0: off
    positive_coeff: From0 = 0.0  # weight of the likelihood of correct answers (above shaping.correct_above)
    minibatches: Positive = 1  # optimizer steps per batch; more than one multiplies the effective staleness
    kl: KLConfig = field(default_factory=KLConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    lag: LagConfig = field(default_factory=LagConfig)
