"""Entropy of the policy: which tokens are trained, and the coefficient of the entropy bonus.

The bonus itself is `- coeff * aggregate(entropy)` in `learners.step.update`. Entropies are in nats per token.
Guarantees: no gradient; values outside the mask have no effect; pure.
Example: entropies 0.1, 2.0, 0.3, 1.0, 0.2 with share 0.2 keep only the second token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from learners.algorithms.tensors import masked


class EntropyCoeff(NamedTuple):
    """`coeff`: state for the next step; `active`: the coefficient to use, 0 while the entropy is high enough."""

    coeff: float
    active: float


def entropy_threshold(values: Tensor, *, share: float) -> float:
    """Return the lowest of the highest `share` of values `[n]`, at least one value; infinite for none. It is one of the
    values, so their order does not matter.
    """
    if values.numel() == 0:
        return float("inf")
    # 0.29 * 100 is 28.999999999999996 in floating point, but 29 values are meant.
    kept = min(max(1, int(values.numel() * share + 1e-6)), values.numel())
    return float(values.topk(kept).values[-1])


def high_entropy(entropy: Tensor, mask: Tensor, *, share: float = 0.2) -> Tensor:
    """The `share` of trained tokens with the highest entropy, bool, any shape (arXiv 2506.01939: 0.2 of them suffice).

    Looks at the whole batch: call it once, before the batch is cut. At least one token where there is any; tokens with
    the entropy of the last one kept are kept too.
    """
    values = masked(entropy.detach(), mask)
    return mask & (values >= entropy_threshold(values[mask], share=share))


def next_entropy_coeff(
    coeff: float, entropy: float, *, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> EntropyCoeff:
    """Adaptive entropy control (arXiv 2505.22312): the coefficient grows by `step` while the measured mean `entropy` is
    below `target`, else shrinks by it, within [low, high]; it is used only while the entropy is below."""
    below = entropy < target
    found = min(max(coeff + (step if below else -step), low), high)
    return EntropyCoeff(found, found if below else 0.0)
