"""The weight of old rows in the loss.

Guarantees:
1. weights have no gradient and are positive;
2. dividing by the batch mean mixes rows: call it once on the whole batch, before the split.

The age of a row in steps is the version that the step starts from minus the version of its tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.errors import ConfigError

Decay = Literal["exp", "power"]


def staleness_weights(
    lags: Tensor, *, kind: Decay = "exp", tau: float = 4.0, kappa: float = 0.5, normalize: bool = True
) -> Tensor:
    """How much each row counts, float64 `[S]`: `e^(-lag / tau)` (exp) or `(1 + lag)^-kappa` (power).

    `lags` `[S]` in steps. `normalize` divides by the mean over ALL rows of the
    batch, so that the step keeps its size. The weights multiply the loss like those of a correction. Raises
    `config.type` where the kind is unknown or `tau` is not positive. An extension of asyncrl, not from a paper.
    """
    if kind == "exp" and tau > 0:
        weights = torch.exp(-lags.detach().double() / tau)
    elif kind == "power":
        weights = (1 + lags.detach().double()) ** -kappa
    else:
        raise ConfigError("config.type", f"staleness weight {kind!r} with tau {tau}: exp (tau > 0) or power")
    return weights / weights.mean() if normalize and weights.numel() else weights
