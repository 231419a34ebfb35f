"""Entropy of the policy: the selection of high-entropy tokens, and the coefficient of the entropy bonus.

The bonus itself is `- coeff * aggregate(entropy)` in `learners.step.update`. Entropies are in nats per token.
Guarantees: no gradient; values outside the mask have no effect; functions are pure.
Example: from the entropies 0.1, 2.0, 0.3, 1.0, 0.2, the share 0.2 keeps only the second token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from learners.algorithms.tensors import masked


class EntropyCoeff(NamedTuple):
    """`coeff`: the state for the next step; `active`: the coefficient to use, 0 while the entropy is high enough."""

    coeff: float
    active: float


def entropy_threshold(values: Tensor, *, share: float) -> float:
    """Return the smallest of the highest `share` of values `[n]`, at least one value; infinity if there are none.

    The threshold is one of the values, so their order does not matter.
    """
    if values.numel() == 0:
        return float("inf")
    # 0.29 * 100 is 28.999999999999996 in floating point, but 29 values are meant.
    kept = min(max(1, int(values.numel() * share + 1e-6)), values.numel())
    return float(values.topk(kept).values[-1])


def high_entropy(entropy: Tensor, mask: Tensor, *, share: float = 0.2) -> Tensor:
    """Mark the highest `share` of trained tokens by entropy, bool, any shape (arXiv 2506.01939: 0.2 of them suffice).

    Call it once on the whole batch, before the split. It keeps at least one token if there is any, and all tokens whose
    entropy equals the lowest one kept.
    """
    values = masked(entropy.detach(), mask)
    return mask & (values >= entropy_threshold(values[mask], share=share))


def next_entropy_coeff(
    coeff: float, entropy: float, *, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> EntropyCoeff:
    """Raise the coefficient by `step` if the mean `entropy` is below `target`, else lower it, within [low, high]; it is
    active only while the entropy is below the target (adaptive entropy control, arXiv 2505.22312).
    """
    below = entropy < target
    found = min(max(coeff + (step if below else -step), low), high)
    return EntropyCoeff(found, found if below else 0.0)
