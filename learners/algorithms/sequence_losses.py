"""Policy losses with the ratio of a whole sequence: GSPO, GMPO, VESPO, TOPR, SPPO.

The packer keeps each sequence in one piece of the batch, so results do not depend on the split. All functions take
`[N]` and return a loss for each token: a row's value is repeated at each of its tokens, so seq-mean-token-mean gives
the row's value. Guarantees: those of `losses`.

Example: for a row with current - proximal = 0.1, 0.3, GSPO's ratio is e^0.2 = 1.2214 for both tokens, VESPO's is e^0.4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learners.algorithms.loss_terms import (
    acting,
    bounds,
    clipped_surrogate,
    either,
    finished,
    gain,
    gap,
    plain_gap,
    refuse,
    trained_logprobs,
)
from learners.algorithms.preference import sppo as squared_errors
from learners.algorithms.tensors import masked, sequence_lengths, sequence_means, sequence_sums
from learners.algorithms.types import LossInputs, TokenLoss

#: GSPO: upper bound of a row's log-ratio; above it the gradient is 0.
GSPO_LIMIT = 10.0
_LEAST, _MOST = math.log(1e-8), 20.0


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """GSPO (arXiv 2507.18071, equations 5 and 7; the token form is equation 14): PPO with the geometric mean ratio.

    `log s = sum of (current - proximal) / length` of the row, clamped to at most 10. Each token has the value of its
    row and the gradient of its own log-prob. Designed for seq-mean-token-mean; with seq-mean-token-sum it is LUSPO
    (arXiv 2602.05261). `clipped` as in PPO.
    """
    bounds("gspo", clip_low, clip_high)
    apart = plain_gap(inputs)
    rows = sequence_means(apart.detach(), inputs.mask, inputs.sequences)[inputs.sequences]
    found = (rows + apart - apart.detach()).clamp(max=GSPO_LIMIT).exp()
    loss, clipped = clipped_surrogate(found, gain(inputs), clip_low=clip_low, clip_high=clip_high)
    return finished(inputs, loss, clipped)


def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """GMPO (arXiv 2507.20673): the geometric mean of clipped ratios; only for seq-mean-token-mean.

    `clip_low`, `clip_high` bound the token's LOG-ratio to [-low, high], pessimistically by the sign of its advantage. A
    row's loss is -(mean advantage) e^(mean bounded log-ratio), times the geometric mean of its weights (w + 1e-10),
    repeated at each of its tokens. `clipped`: the bound took effect.
    """
    if clip_low < 0 or clip_high < 0:
        refuse("gmpo", f"clip_low = {clip_low}, clip_high = {clip_high}: they must not be below 0")
    gained, apart = gain(inputs), gap(inputs)
    sign = gained.sign()
    plain, cut = sign * apart, sign * apart.clamp(-clip_low, clip_high)
    logs = _row_means(inputs, sign * torch.minimum(plain, cut))
    if inputs.weights is not None:
        logs = logs + _row_means(inputs, (masked(inputs.weights.detach(), inputs.mask) + 1e-10).log())
    loss = -(_row_means(inputs, gained) * logs.exp())[inputs.sequences]
    return finished(inputs._replace(weights=None), loss, cut < plain)


def vespo(
    inputs: LossInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> TokenLoss:
    """VESPO (arXiv 2602.10693): `-A phi(w) log p` with a smooth weight of the whole row's ratio, for stale data.

    `log w` is the SUM of the row's log-ratios, plus the logs of its weights if there is a correction (of tokens, not of
    rows), clamped to [log 1e-8, 20]. `phi = exp(lambda + k log w - lambda w)`, 1 at w = 1, without gradient; `k_pos`
    and `lambda_pos` are for advantages >= 0. Tokens of weight 0 are left out of the sum and of the loss.
    """
    gained = gain(inputs)
    counted, logs = inputs.mask, gap(inputs).detach()
    if inputs.weights is not None:
        weights = masked(inputs.weights.detach(), inputs.mask)
        counted = inputs.mask & (weights > 0)
        logs = logs + masked(weights, counted).clamp(math.exp(_LEAST), math.exp(_MOST)).log()
    log_w = sequence_sums(logs, counted, inputs.sequences).clamp(_LEAST, _MOST)[inputs.sequences]
    k, rate = (either(gained >= 0, *pair, log_w) for pair in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    loss = -phi * gained * masked(trained_logprobs(inputs), counted)
    result = finished(inputs._replace(weights=None), loss, inputs.mask & ~counted)
    return result._replace(gated=acting(inputs, phi))


def topr(inputs: LossInputs) -> TokenLoss:
    """TOPR (arXiv 2503.14286): `-A log p`, times min(ratio of the row, 1) if the advantage is negative.

    The ratio is the product over the row of current / proximal, without gradient. The paper uses the ratio to the
    behaviour policy: set proximal = behaviour. `clipped`: a ratio above 1 was reduced to 1.
    """
    gained = gain(inputs)
    logs = sequence_sums(gap(inputs).detach(), inputs.mask, inputs.sequences)[inputs.sequences]
    bad = gained < 0
    taper = torch.where(bad, logs.clamp(min=-20, max=0).exp(), 1.0)
    return finished(inputs, -taper * gained * trained_logprobs(inputs), bad & (logs > 0))


def sppo(inputs: LossInputs, *, eta: float = 1.0) -> TokenLoss:
    """SPPO (arXiv 2405.00675, equation 4.7) as a loss of tokens, for the advantage win_rate; only seq-mean-token-sum.

    `(sum of (current - proximal) - eta A)^2` of the row, divided equally among its tokens; `A`: mean advantage of the
    row. `proximal` is the policy of the last iteration.
    """
    lengths = sequence_lengths(inputs.mask, inputs.sequences)
    errors = squared_errors(
        inputs.current, inputs.proximal, inputs.mask, inputs.sequences, _row_means(inputs, gain(inputs)), eta=eta
    )
    loss = (errors / lengths.clamp(min=1))[inputs.sequences]
    return finished(inputs, loss, torch.zeros_like(inputs.mask))


def _row_means(inputs: LossInputs, values: Tensor) -> Tensor:
    """Return the mean over the trained tokens of each row, `[S]`."""
    return sequence_means(values, inputs.mask, inputs.sequences)
