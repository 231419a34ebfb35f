"""Draws one token per row from logits, for all rows at once. It has no state and no random generator.

Guarantees:
1. a row's token is a function of its logits, its settings and its uniform number: it does not depend on the other rows
   (up to the float noise of the forward pass);
2. the log-prob is that of the full temperature-scaled softmax in float32, also if top-k or top-p restricted the set;
   the learner recomputes this number without knowing the restriction;
3. a token outside the restricted set is never drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor, uniforms: Tensor, temperature: Tensor, *, top_p: Tensor | None = None, top_k: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens int64 `[N]` and log-probs float32 `[N]`.

    Args:
        logits: `[N, V]`.
        uniforms: float64 `[N]` in [0, 1): the place in the cumulative distribution.
        temperature: float32 `[N]`, above 0.
        top_p: float32 `[N]`, 1 is off; None where no row cuts.
        top_k: int64 `[N]`, 0 is off; None where no row cuts.
    """
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    weights = logprobs.exp()
    if top_p is not None or top_k is not None:
        weights = weights.masked_fill(~_keep_mask(weights, top_p, top_k), 0.0)
    # float64: with a vocabulary of 150 k the float32 sum would move the borders by far more than a token's share.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # `right`: the first entry above the target, which has a weight above 0. 1 - 2^-40 keeps the target below the sum.
    target = cumulative[:, -1:] * uniforms[:, None].clamp(max=1.0 - 2.0**-40)
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _keep_mask(weights: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """Which entries may be drawn, bool `[N, V]`. top-k first, then the nucleus of what is left, renormalised."""
    ordered, places = weights.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        ranks = torch.arange(ordered.shape[1], device=ordered.device)
        keep = (ranks < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        left = ordered * keep
        share = left / left.sum(-1, keepdim=True)
        before = share.cumsum(-1) - share  # the mass above an entry: the first one is always kept
        keep = keep & ((before < top_p[:, None]) | (top_p[:, None] >= 1.0))
    return torch.zeros_like(keep).scatter(1, places, keep)
