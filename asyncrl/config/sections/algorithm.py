"""`[learner.algorithm]`: which advantages, loss and correction a run uses, and their numbers.

Part of `asyncrl.config`, which re-exports `AlgorithmConfig`. What the names are and which of them fit together is in
`asyncrl.config.sections.algorithm_catalogue`. The tables `*_options` are keyword arguments of the chosen function;
the word "off" in them stands
for Python's None. `clip_low`, `clip_high` and `tis_cap` are short forms for the losses and corrections that have them.

Example: `loss = "gspo"` with `loss_options = { clip_low = 3e-4, clip_high = 4e-4 }`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from asyncrl.config.sections.base import Count, Positive, Section, Share

Above0 = Annotated[float, Meta(gt=0)]
From0 = Annotated[float, Meta(ge=0)]
Kept = Annotated[float, Meta(gt=0, le=1)]
KLKind = Literal[
    "auto",
    "k1",
    "kl",
    "abs",
    "k2",
    "mse",
    "k3",
    "low_var_kl",
    "k1+",
    "kl+",
    "abs+",
    "k2+",
    "mse+",
    "k3+",
    "low_var_kl+",
]

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class KLConfig(Section, frozen=True):
    """`[learner.algorithm.kl]`: divergence from a frozen reference model, in the loss or in the reward."""

    where: Literal["off", "loss", "reward"] = "off"  # one of them: both would punish the same distance twice
    kind: KLKind = "auto"  # estimator; auto: k3 in the loss, k1 in the reward
    coeff: From0 = 0.001  # weight; where it starts with controller = adaptive
    importance_weighted: bool = False  # in the loss: k3 times the ratio current / proximal, unbiased off policy
    controller: Literal["fixed", "adaptive"] = "fixed"  # adaptive: in the reward, towards `target`
    target: Above0 = 0.1  # nats per token
    horizon: Above0 = 10000.0  # samples; smaller adapts faster


class ShapingConfig(Section, frozen=True):
    """`[learner.algorithm.shaping]`: what happens to rewards and rows before advantages are estimated."""

    overlong_buffer: Count = 0  # tokens before the limit in which the penalty grows; 0: off
    overlong_share: Share = 0.0  # the same as a share of the limit, where overlong_buffer is 0
    overlong_factor: From0 = 1.0  # penalty at the limit
    overlong_max: Count = 0  # the limit; 0: sampling.max_new_tokens
    overlong_filter: bool = False  # samples cut by max_new_tokens are not trained; they count in their group
    passk: Count = 0  # scores above correct_above become those whose gradient raises pass@k; 0: off
    correct_above: float = 0.5  # a score above this is a right answer
    resample: Literal["off", "pow", "max_min", "max_random"] = "off"  # PF-PPO: rows drawn by score, with replacement
    resample_power: Above0 = 2.0  # of resample = pow


class LagConfig(Section, frozen=True):
    """`[learner.algorithm.lag]`: what the age of a sample changes beside its importance weight."""

    weight: Literal["off", "exp", "power"] = "off"  # samples count e^(-lag / tau) or (1 + lag)^-kappa
    tau: Above0 = 4.0  # steps, of weight = exp
    kappa: From0 = 0.5  # of weight = power
    normalize: bool = True  # weights are divided by their mean over the batch
    step_scale: Literal["off", "sqrt_ess"] = "off"  # learning rate times the root of the samples' effective share


class AlgorithmConfig(Section, frozen=True):
    """`[learner.algorithm]`: GRPO with decoupled PPO and truncated importance weights unless set otherwise."""

    preset: str = ""  # name in configs/presets, or a .toml: its settings, below those of this file
    advantage: str = "grpo"  # estimator: see algorithms.md, or a name of the entry-point group asyncrl.advantages
    advantage_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the estimator
    loss: str = "decoupled_ppo"  # policy loss: see algorithms.md, or a name of the entry-point group asyncrl.losses
    loss_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the loss
    correction: str = "auto"  # auto: tis, or none where loss or advantage hold the ratio to the behaviour policy
    correction_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the correction
    proximal: Literal["recompute", "behaviour", "loglinear"] = "recompute"  # the policy that the loss compares with
    clip_low: Above0 = 0.2  # ratio at least 1 - clip_low, of the PPO losses
    clip_high: Above0 = 0.28  # ratio at most 1 + clip_high, of the PPO losses
    tis_cap: Above0 | Literal["off"] = 2.0  # truncation of exp(proximal - behaviour), of correction = tis
    aggregation: Aggregation = "token-mean"  # over the batch
    loss_scale_factor: From0 = 0.0  # of seq-mean-token-sum-norm; 0: sampling.max_new_tokens
    denominator: Literal["original", "kept"] = "original"  # whether tokens that the correction rejects are counted
    entropy_coeff: From0 = 0.0  # weight of the entropy bonus; where it starts with an entropy_target
    entropy_target: From0 = 0.0  # nats per token: the weight grows while the last step's entropy was below; 0: fixed
    entropy_step: Above0 = 0.005  # by how much the weight moves per step; with entropy_target
    entropy_max: Above0 = 1.0  # the largest weight; with entropy_target
    entropy_keep: Kept = 1.0  # share of the batch's tokens, those of highest entropy, that the loss trains; 1: all
    stale_negatives: From0 = 0.0  # bad samples with mean(behaviour - current) above it are not trained; 0: off
    positive_coeff: From0 = 0.0  # weight of the likelihood of right answers (above shaping.correct_above)
    minibatches: Positive = 1  # optimizer steps per batch; more than one multiplies the effective staleness
    kl: KLConfig = field(default_factory=KLConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    lag: LagConfig = field(default_factory=LagConfig)
