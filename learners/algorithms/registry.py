"""The algorithms by their TOML name.

Called by `learners.batch` (advantages) and `learners.update` (losses). Guarantees:
1. an unknown name is an error that lists the known ones;
2. torch is imported only for losses, so that batch assembly stays free of it.
"""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.errors import ConfigError
from learners.algorithms import advantages

ADVANTAGES: dict[str, advantages.Advantage] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
}
LOSSES = ("decoupled_ppo", "ppo", "reinforce")


def advantage_of(name: str) -> advantages.Advantage:
    """The advantage estimator of that name."""
    if name not in ADVANTAGES:
        raise ConfigError("config.type", f"learner.algorithm.advantage {name!r}: one of {', '.join(ADVANTAGES)}")
    return ADVANTAGES[name]


def loss_of(name: str) -> Any:
    """The loss of that name: `(LossInputs, LossSettings) -> TokenLoss`."""
    if name not in LOSSES:
        raise ConfigError("config.type", f"learner.algorithm.loss {name!r}: one of {', '.join(LOSSES)}")
    return getattr(importlib.import_module("learners.algorithms.losses"), name)
