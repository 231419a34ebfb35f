"""Log-probs and entropy with the vocabulary split over tensor places, without whole logits. Like
`learners.models.logprobs`.

Guarantees:
1. at most `chunk_tokens` rows of a slice of the logits exist at a time, in forward and backward;
2. every tensor place gets the same bits, and the whole gradient of the hidden states;
3. padding rows after the vocabulary have no probability and no gradient;
4. log-probs are of `softmax(logits / temperature)`, computed in float32.

The gradient of the head is that of the own slice and is not reduced.
Example: 2 places with the logits (0, 1) and (2, -1): the places reduce the maximum, 2, and the sum of exponents below
it, 0.135 + 0.368 + 1 + 0.050 = 1.553; log-sum-exp is 2 + log 1.553 = 2.440 on both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learners.models.logprobs import TokenNumbers


class Slice(NamedTuple):
    """The rows of the head on this place: `rows` rows from `start` on; further rows are padding."""

    start: int
    rows: int
    group: Any  # of the tensor places; None: only one


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    return logits if temperature == 1.0 else logits / temperature


def _agree(values: Tensor, group: Any, *, largest: bool = False) -> Tensor:
    """Sum (or maximum) over the tensor places, in place."""
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return values


def _own(targets: Tensor, part: Slice) -> tuple[Tensor, Tensor]:
    """Return which targets lie in this slice, and their columns in it (0 for others)."""
    inside = (targets >= part.start) & (targets < part.start + part.rows)
    return inside, torch.where(inside, targets - part.start, 0)


def _pass(
    hidden: Tensor, weight: Tensor, targets: Tensor, part: Slice, *, temperature: float, chunk: int, squares: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return log-probs, entropies, logsumexp and (with `squares`) sums of squares, `[N]` each."""
    found = []
    for start in range(0, targets.numel(), chunk):
        at = slice(start, start + chunk)
        logits = _logits(hidden[at], weight[: part.rows], temperature)
        top = _agree(logits.max(-1).values, part.group, largest=True)
        inside, columns = _own(targets[at], part)
        picked = torch.where(inside, logits.gather(-1, columns[:, None]).squeeze(-1), 0.0)
        scaled = (logits - top[:, None]).exp_()
        norms = torch.linalg.vector_norm(scaled, dim=-1).square() if squares else torch.zeros_like(top)
        total = scaled.sum(-1)
        sums = _agree(torch.stack((total, scaled.mul_(logits).sum(-1), picked, norms)), part.group)
        lse = top + sums[0].log()
        found.append(torch.stack((sums[2] - lse, lse - sums[1] / sums[0], lse, sums[3] / sums[0].square())))
    every = torch.cat(found, dim=1) if found else torch.zeros(4, 0, device=hidden.device)
    return every[0], every[1], every[2], every[3] if squares else None


class _SlicedLogprobs(torch.autograd.Function):
    """Forward stores logsumexp and entropy; backward recomputes the softmax of the slice, chunk by chunk."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes by position
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, part: Slice, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, lse, _ = _pass(
            hidden, weight, targets, part, temperature=temperature, chunk=chunk, squares=False
        )
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.part, ctx.temperature, ctx.chunk = part, temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        part, own = ctx.part, weight[: ctx.part.rows]
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, targets.numel(), ctx.chunk):
            at = slice(start, start + ctx.chunk)
            logs = _logits(hidden[at], own, ctx.temperature).sub_(lse[at, None])  # log-softmax
            # d logprob / d logit = onehot - p;  d entropy / d logit = -p (log p + entropy)
            grad = logs.exp().neg_()
            logs.add_(entropy[at, None]).mul_(grad_entropy[at, None]).add_(grad_logprobs[at, None])
            grad.mul_(logs)
            inside, columns = _own(targets[at], part)
            grad.scatter_add_(-1, columns[:, None], torch.where(inside, grad_logprobs[at], 0.0)[:, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            narrow = grad.to(hidden.dtype)
            grad_hidden[at] = (narrow @ own).float()
            grad_weight[: part.rows] += (narrow.T @ hidden[at]).float()
        grad_hidden = _agree(grad_hidden, part.group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None, None


def sliced_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, part: Slice, *, temperature: float = 1.0, chunk_tokens: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of each distribution, both `[N]`. Collective over tensor
    places.

    `hidden` `[N, H]`, the same on every place; `weight` `[rows of this place, H]`; `targets` int64 `[N]`.
    """
    result: tuple[Tensor, Tensor] = _SlicedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, part, temperature, chunk_tokens
    )
    return result


@torch.no_grad()
def sliced_numbers(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    part: Slice,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    squares: bool = False,
) -> TokenNumbers:
    """Like `sliced_logprobs`, without gradient; with `squares` also the sums of squared probabilities. Collective."""
    logprobs, entropy, _, sums = _pass(
        hidden, weight, targets, part, temperature=temperature, chunk=chunk_tokens, squares=squares
    )
    return TokenNumbers(logprobs, entropy, sums)
