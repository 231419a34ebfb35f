"""Coefficients of the KL penalty and the entropy bonus, which controllers change from step to step.

Guarantees:
1. the state is a value in checkpoints: a continued run has the coefficients of an uninterrupted one, also after
   `asyncrl tune`;
2. a coefficient starts again when its setting changes; a fixed one equals its setting;
3. they change by numbers that are equal on every rank; a step that failed or did not train the policy changes none.

Example: entropy_target 0.2, entropy_step 0.005, entropy_coeff 0: after an entropy of 0.15 the coefficient is 0.005,
after 0.19 it is 0.01, after 0.21 it is 0 in the next step while the controller stores 0.005.
"""

from __future__ import annotations

import msgspec

from asyncrl.config.sections.algorithm import AlgorithmConfig
from learners.algorithms.entropy import next_entropy_coeff
from learners.algorithms.rewards import next_kl_coeff


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the next step. `kl_start`, `entropy_start`: the settings that they started from."""

    kl: float
    kl_start: float
    entropy: float  # in the next step
    entropy_carried: float  # state of the controller; `entropy` is 0 while the entropy is high enough
    entropy_start: float


def start_coefficients(algorithm: AlgorithmConfig) -> Coefficients:
    """Example:

    >>> start_coefficients(AlgorithmConfig(entropy_coeff=0.01)).entropy
    0.01
    """
    kl, entropy = algorithm.kl.coeff, algorithm.entropy_coeff
    return Coefficients(kl, kl, entropy, entropy, entropy)


def apply_settings(found: Coefficients, algorithm: AlgorithmConfig) -> Coefficients:
    """Reset coefficients that are fixed or whose setting changed.

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
    """Update after a step with `samples` samples and these means per token, in nats. None: not measured, no change."""
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
