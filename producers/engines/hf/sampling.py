"""Draws one token per row from logits, for all rows at once. It has no state and no random generator.

Guarantees:
1. a row's token is a function of its logits, its settings and its uniform number: it does not depend on the other rows
   (up to the float noise of the forward pass);
2. the log-prob is that of the full temperature-scaled softmax in float32, also if a cut restricted the set; with
   `exact` it is that of the softmax over the restricted set, which the result holds;
3. a token outside the restricted set is never drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.runtime.device import Device

UNIT = 2.0**40  # of weights as whole numbers


def uniform_dtype(kind: str) -> torch.dtype:
    """The dtype of random numbers on a type of devices: NPUs do not compute in float64."""
    return torch.float64 if Device(kind).supports("float64") else torch.int64


class Cut(NamedTuple):
    """What restricts the draws of each row, `[N]` each."""

    top_p: Tensor  # float32; 1: off
    top_k: Tensor  # int64; 0: off
    min_p: Tensor  # float32; 0: off


class Drawn(NamedTuple):
    tokens: Tensor  # int64 [N]
    logprobs: Tensor  # float32 [N]
    kept: Tensor | None = None  # bool [N, V]: entries that could be drawn; None without a cut


def sample(
    logits: Tensor, uniforms: Tensor, temperature: Tensor, *, cut: Cut | None = None, exact: Tensor | None = None
) -> Drawn:
    """Draw a token for each row.

    Args:
        logits: `[N, V]`.
        uniforms: `[N]`, the place in the cumulative distribution: float64 in [0, 1), or on devices without float64
            int64 in units of 2^-31 (`uniform_dtype`).
        temperature: float32 `[N]`, above 0.
        cut: None where no row is restricted.
        exact: bool `[N]`, rows whose log-prob is that of the softmax over what `cut` left; None: no row.
    """
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    weights = logprobs.exp()
    kept = None if cut is None else _keep_mask(weights, cut)
    if kept is not None:
        weights = weights.masked_fill(~kept, 0.0)
    cumulative, target = _cumulate(weights, uniforms[:, None])
    # `right`: the first entry above the target, which has a weight above 0.
    tokens = torch.searchsorted(cumulative, target, right=True)
    drawn = logprobs.gather(1, tokens)[:, 0]
    if exact is not None and kept is not None:
        mass = cumulative[:, -1] / (1 if cumulative.is_floating_point() else UNIT)  # that the cut left
        over = (drawn - mass.log()).clamp(max=0.0).to(drawn.dtype)
        drawn = torch.where(exact & ~kept.all(-1), over, drawn)
    return Drawn(tokens[:, 0], drawn, kept)


def _cumulate(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative weights `[N, V]` and the place in them `[N, 1]`, which is below the last. With a vocabulary of 150 k
    the sum in float32 would move the borders by far more than a token's share: they are in float64, or in whole numbers
    (without rounding; a weight below 2^-40 is 0).
    """
    if uniforms.is_floating_point():
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return cumulative, cumulative[:, -1:] * uniforms.clamp(max=1.0 - 2.0**-40)
    cumulative = (weights * UNIT).to(torch.int64).cumsum(-1)
    high, low = cumulative[:, -1:] >> 20, cumulative[:, -1:] & 0xFFFFF  # the product itself has more than 63 bits
    return cumulative, (high * uniforms + (low * uniforms >> 20)) >> 11


def _keep_mask(weights: Tensor, cut: Cut) -> Tensor:
    """Which entries may be drawn, bool `[N, V]`. min-p first, then top-k, then the nucleus of what is left,
    renormalised: the order of vLLM.
    """
    ordered, places = weights.sort(dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    top_p, top_k, min_p = (setting[:, None] for setting in cut)
    keep = ((ranks < top_k) | (top_k == 0)) & (ordered >= min_p * ordered[:, :1])
    left = ordered * keep
    share = left / left.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share  # the mass above an entry: the first one is always kept
    keep = keep & ((before < top_p) | (top_p >= 1.0))
    return torch.zeros_like(keep).scatter(1, places, keep)
