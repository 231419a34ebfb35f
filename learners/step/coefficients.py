"""Weights of loss terms that move from step to step: of the KL penalty, of the entropy bonus.

Kept by `learners.step.resilient_step` on every rank, written to checkpoints by `learners.loop`. Guarantees:
1. the state is a value: a run continued from a checkpoint has the coefficients of one that was never stopped, also
   where `asyncrl tune` had changed their settings before;
2. a coefficient whose setting changes starts again from the new setting; a fixed one is its setting;
3. they move by numbers that every rank has alike; a step that broke or trained no policy moves none.

Example: entropy_target 0.2, entropy_step 0.005, entropy_coeff 0: after a step with an entropy of 0.15 the weight is
0.005, after one of 0.19 it is 0.01, after one of 0.21 it is 0 in the next step and 0.005 is carried.
"""

from __future__ import annotations

import msgspec

from asyncrl.config.sections.algorithm import AlgorithmConfig
from learners.algorithms.entropy import next_entropy_coeff
from learners.algorithms.rewards import next_kl_coeff


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of the next step. `kl_start`, `entropy_start`: the settings that they started from."""

    kl: float
    kl_start: float
    entropy: float  # of the bonus in the next step
    entropy_carried: float  # what the controller goes on from; `entropy` is 0 while the entropy is high enough
    entropy_start: float


def start_coefficients(algorithm: AlgorithmConfig) -> Coefficients:
    """Where they start.

    >>> start_coefficients(AlgorithmConfig(entropy_coeff=0.01)).entropy
    0.01
    """
    kl, entropy = algorithm.kl.coeff, algorithm.entropy_coeff
    return Coefficients(kl, kl, entropy, entropy, entropy)


def apply_settings(found: Coefficients, algorithm: AlgorithmConfig) -> Coefficients:
    """With the settings of the step: what is fixed, or has another start than before, is the setting.

    >>> before = start_coefficients(AlgorithmConfig(entropy_coeff=0.01, entropy_target=0.5))
    >>> apply_settings(before, AlgorithmConfig(entropy_coeff=0.03, entropy_target=0.5)).entropy
    0.03
    """
    fresh = start_coefficients(algorithm)
    if algorithm.kl.controller == "adaptive" and found.kl_start == fresh.kl_start:
        fresh = msgspec.structs.replace(fresh, kl=found.kl)
    if algorithm.entropy_target and found.entropy_start == fresh.entropy_start:
        fresh = msgspec.structs.replace(fresh, entropy=found.entropy, entropy_carried=found.entropy_carried)
    return fresh


def next_coefficients(
    found: Coefficients, algorithm: AlgorithmConfig, *, kl: float | None, samples: int, entropy: float | None
) -> Coefficients:
    """After a step of so many samples with these means per token, in nats; None: not measured, nothing moves."""
    if algorithm.kl.controller == "adaptive" and kl is not None:
        known = algorithm.kl
        found = msgspec.structs.replace(
            found, kl=next_kl_coeff(found.kl, kl, samples, target=known.target, horizon=known.horizon)
        )
    if algorithm.entropy_target and entropy is not None:
        after = next_entropy_coeff(
            found.entropy_carried,
            entropy,
            target=algorithm.entropy_target,
            step=algorithm.entropy_step,
            high=algorithm.entropy_max,
        )
        found = msgspec.structs.replace(found, entropy=after.active, entropy_carried=after.coeff)
    return found
