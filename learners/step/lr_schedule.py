"""Learning rates by step. Pure: a repeated step gets the same rate."""

from __future__ import annotations

import math

from asyncrl.config import OptimConfig
from asyncrl.errors import ConfigError
from asyncrl.plugins import is_place, load_object


def learning_rate(optim: OptimConfig, *, step: int, steps: int) -> float:
    """Return the rate of step 1..steps: linear warm-up, then constant, linear or cosine decay to 0 after the last step.

    A user's own schedule is a function `(step, steps) -> factor` of the rate, 0 or more, for the steps after the
    warm-up: step 1..steps. Raises `config.type` for another result.

    Example: lr 1, warmup 2, linear, 6 steps: 0.5, 1, 1, 0.75, 0.5, 0.25.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if is_place(optim.schedule):
        own = load_object(optim.schedule, code="config.extra")
        factor = own(step - optim.warmup_steps, steps - optim.warmup_steps)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ConfigError("config.type", f"{optim.schedule} gives {factor!r} for step {step}, not a number >= 0")
        return optim.lr * factor
    if optim.schedule == "constant":
        return optim.lr
    done = (step - optim.warmup_steps - 1) / max(steps - optim.warmup_steps, 1)
    if optim.schedule == "linear":
        return optim.lr * max(1 - done, 0.0)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
