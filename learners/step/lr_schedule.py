"""Learning rates by step. Pure: a repeated step gets the same rate."""

from __future__ import annotations

import math

from asyncrl.config import OptimConfig


def learning_rate(optim: OptimConfig, *, step: int, steps: int) -> float:
    """Return the rate of step 1..steps: linear warm-up, then constant, linear or cosine decay to 0 after the last step.

    Example: lr 1, warmup 2, linear, 6 steps: 0.5, 1, 1, 0.75, 0.5, 0.25.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    done = (step - optim.warmup_steps - 1) / max(steps - optim.warmup_steps, 1)
    if optim.schedule == "linear":
        return optim.lr * max(1 - done, 0.0)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
