"""Arguments and results shared by all estimators, corrections and losses.

There are two layouts, which are never mixed:
- the whole batch, padded, `[S, T]` (S samples, T the longest response): rewards, advantages, filters. Operations across
rows are done here, once, before the split into ranks and micro-batches;
- flat tokens, `[N]`, of whole sequences, with each token's sequence in `sequences` (0-based, ascending, contiguous; a
sequence may have no trained token): log-probs, corrections, losses.

In both, values outside the mask, NaN included, have no effect on results.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rollouts(NamedTuple):
    """A whole batch for estimators; float64, on the CPU. A field that an estimator needs must not be None."""

    rewards: Tensor  # [S, T]: token rewards; an outcome score is on the last trained token
    mask: Tensor  # [S, T] bool: the policy sampled this token and it is trained
    groups: Tensor  # [S] int64: number of the sample's prompt group; rows need not be adjacent
    values: Tensor | None = None  # [S, T]: the critic's predictions
    bootstrap: Tensor | None = None  # [S]: value after the last token of a truncated response, else 0
    baselines: Tensor | None = None  # [S]: score of the greedy response (ReMax)
    parts: Tensor | None = None  # [D, S]: named components of the reward (GDPO)
    proximal: Tensor | None = None  # [S, T]: log-probs at the start of the step
    behaviour: Tensor | None = None  # [S, T]: log-probs recorded at sampling time
    square_sums: Tensor | None = None  # [S, T]: sum over the vocabulary of pi^2 (optimal token baseline)
    lengths: Tensor | None = None  # [S] int64: response tokens, tool output included (overlong penalty)
    process: Tensor | None = None  # [S, T]: implicit process rewards (PRIME)


class Estimate(NamedTuple):
    """`advantages` `[S, T]`, 0 outside the mask; `returns` `[S, T]`: the critic's targets, if there are any."""

    advantages: Tensor
    returns: Tensor | None = None


class LossInputs(NamedTuple):
    """Inputs of a loss, all `[N]`: log-probs of the sampled token under three policies, advantage, bool mask."""

    current: Tensor  # carries the gradient
    proximal: Tensor  # under the learner's weights at the start of the step
    behaviour: Tensor  # recorded by the generator at sampling time
    advantages: Tensor
    mask: Tensor  # bool
    sequences: Tensor  # int64
    weights: Tensor | None = None  # from the correction; multiplied into the loss, no gradient
    chosen: Tensor | None = None  # bool: tokens that the loss's `choose` selected in the whole mini-batch


class TokenLoss(NamedTuple):
    """`loss` `[N]` with gradient, 0 outside the mask; `clipped` `[N]` bool: the loss clipped or masked this token."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor | None = None  # [N] bool: the dual clip bounded a negative advantage (PPO)
    gated: Tensor | None = None  # [N] bool: a smooth weight changed this token's gradient by more than 1 %


class Correction(NamedTuple):
    """`weights` `[N]`, 0 outside the mask; `keep` `[N]` bool: False if the token is rejected from the loss."""

    weights: Tensor
    keep: Tensor
    truncated: Tensor | None = None  # [N] bool: the bounds changed this token's weight, possibly to 0
