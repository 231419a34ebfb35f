"""Log-probs and entropy of a causal language model, computed in chunks: the whole logits never exist.

Guarantees:
1. at most `chunk_tokens` rows of logits exist at a time, in forward and backward. Only logsumexp, entropy and (on
   request) the sum of squared probabilities are stored, `[N]` each, and for the backward pass the softmax of the last
   chunks, up to `KEPT_BYTES`;
2. the gradient (to hidden states, head weight and bias) equals that of the full computation, also through the entropy;
3. log-probs are of `softmax(logits / temperature)`, in float32 or wider; with a `cap` (Gemma-2, arXiv 2408.00118) the
   logits become `cap tanh(logits / cap)` before that;
4. a target with a support (the ids that it was drawn from) has the log-prob of the softmax over these, and so has the
   sum of squares; entropies are of the full softmax. Other targets of the chunk have the same bits as without;
5. no 2D attention mask and no cache are passed: with either, packed rows are silently wrong in transformers;
6. log-probs and entropies have the same bits with and without squares, which never have a gradient.

With tensor parallelism each rank computes the logits of its own rows of the head (`split_logprobs`): equal up to
rounding. Heads that scale their logits are refused (`policy_model.check_head`).
Example: probabilities 0.5, 0.25, 0.25 and target 0: log-prob -0.693, entropy 1.040, sum of squares 0.375.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learners.models.support import Supports, add_support_gradient, mask_supported, renormalise, sum_rows
from learners.models.vocabulary import Vocabulary

#: Bytes of softmaxes stored from the forward pass of a micro-batch for its backward pass.
KEPT_BYTES = 128 << 20


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, cap: float | None) -> Tensor:
    """`[n, V]` in float32 or wider, capped and divided by the temperature."""
    logits = nn.functional.linear(hidden, weight, bias)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    return logits if temperature == 1.0 else logits / temperature


def _slope(logits: Tensor, temperature: float, cap: float | None) -> Tensor | None:
    """Return the derivative of the cap, `1 - tanh^2`, at the results of `_logits`; None without a cap."""
    return None if cap is None else (logits * (temperature / cap)).square_().neg_().add_(1)


def _undo_logits(grad: Tensor, slope: Tensor | None, temperature: float) -> None:
    """Make the gradient of the results of `_logits` that of the head's own logits, in place."""
    if temperature != 1.0:
        grad.div_(temperature)
    if slope is not None:
        grad.mul_(slope)


class TokenNumbers(NamedTuple):
    """Numbers of each target, `[N]` in float32 or wider, without gradient."""

    logprobs: Tensor
    entropy: Tensor  # nats
    square_sums: Tensor | None  # sum over the vocabulary of p^2, 1 / V .. 1; None: not requested


def _split_pass(  # noqa: PLR0917 - as `_pass`
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    split: Vocabulary,
    *,
    squares: bool = False,
    support: Supports | None = None,
    cap: float | None = None,
) -> _Chunks:
    """Like `_pass`, from this rank's part of the logits."""
    shares: list[Tensor] = []
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs, entropy, lse = (torch.empty(targets.numel(), dtype=wide, device=hidden.device) for _ in range(3))
    square_sums = torch.empty_like(lse) if squares else None
    for start in range(0, targets.numel(), chunk):
        part = slice(start, start + chunk)
        logits = _logits(hidden[part], weight, None, temperature, cap)
        top = split.sum(logits.amax(-1), dist.ReduceOp.MAX)
        mine, places = split.own(targets[part], weight.shape[0])
        sums = [mine * logits.gather(-1, places[:, None]).squeeze(-1)]  # the target's logit, from its rank
        weights = (logits - top[:, None]).exp_()
        sums.append(weights.sum(-1))
        if squares:
            sums.append(torch.linalg.vector_norm(weights, dim=-1).square())
        sums.append(weights.mul_(logits).sum(-1))
        target, total, *square, weighted = split.sum(torch.stack(sums))
        lse[part] = top + total.log()
        held = None if support is None else support.part(part)
        over, share = renormalise(logits, held, lse[part], split)
        shares.append(share)
        logprobs[part] = target - over
        entropy[part] = lse[part] - weighted / total
        if square_sums is not None:
            square_sums[part] = square[0] / total.square()
            if held is not None:
                of_support = sum_rows(share.square(), held, split)
                square_sums[part] = torch.where(held.counts > 0, of_support, square_sums[part])
    return _Chunks(logprobs, entropy, lse, square_sums, [], torch.cat(shares) if support else None)


class _Chunks(NamedTuple):
    """Results of a pass over the chunks, `[N]` each; `kept`: the softmaxes `[n, V]` of the last chunks; `shares`:
    probabilities `[K]` of the supports' ids.
    """

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor
    square_sums: Tensor | None
    kept: list[Tensor]
    shares: Tensor | None = None


def _pass(  # noqa: PLR0917 - as torch passes them to the function below
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk: int,
    *,
    squares: bool = False,
    kept_bytes: int = 0,
    support: Supports | None = None,
    cap: float | None = None,
) -> _Chunks:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs, entropy, lse = (torch.empty(targets.numel(), dtype=wide, device=hidden.device) for _ in range(3))
    square_sums = torch.empty_like(lse) if squares else None
    again = targets.numel() - max(
        kept_bytes // max(weight.shape[0] * lse.itemsize, 1), 1
    )  # rows before this one are recomputed
    kept: list[Tensor] = []
    shares: list[Tensor] = []
    for start in range(0, targets.numel(), chunk):
        part = slice(start, start + chunk)
        logits = _logits(hidden[part], weight, bias, temperature, cap)
        softmax = logits.softmax(-1)
        # The largest entry is at least 1 / V: no precision is lost, and no second exp is needed.
        lse[part] = logits.amax(-1) - softmax.amax(-1).log_()
        held = None if support is None else support.part(part)
        over, share = renormalise(logits, held, lse[part])
        shares.append(share)
        logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - over
        if square_sums is not None:
            # A norm does not copy its input, unlike a square.
            square_sums[part] = torch.linalg.vector_norm(softmax, dim=-1).square()
            if held is not None:
                square_sums[part] = torch.where(held.counts > 0, sum_rows(share.square(), held), square_sums[part])
        entropy[part] = lse[part] - logits.mul_(softmax).sum(-1)
        if kept_bytes and (start >= again or start + chunk >= targets.numel()):
            kept.append(softmax)
        del logits, softmax  # free memory before the next chunk
    return _Chunks(logprobs, entropy, lse, square_sums, kept, torch.cat(shares) if support else None)


class _SplitLogprobs(torch.autograd.Function):
    """Like `_ChunkedLogprobs`, with this rank's rows of the vocabulary. Every rank of the group has the same hidden
    states and loss: the gradient of hidden states is summed over them.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        split: Vocabulary,
        support: Supports | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        found = _split_pass(hidden, weight, targets, temperature, chunk, split, support=support, cap=cap)
        ctx.save_for_backward(hidden, weight, targets, found.lse, found.entropy, found.shares)
        ctx.temperature, ctx.chunk, ctx.split, ctx.support, ctx.cap = temperature, chunk, split, support, cap
        return found.logprobs, found.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy, shares = ctx.saved_tensors
        up = mask_supported(grad_logprobs, ctx.support)
        grad_hidden = torch.empty(hidden.shape, dtype=lse.dtype, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        for start in range(0, targets.numel(), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logs = _logits(hidden[part], weight, None, ctx.temperature, ctx.cap)
            slope = _slope(logs, ctx.temperature, ctx.cap)
            logs.sub_(lse[part, None])
            grad = logs.exp().neg_()  # as in `_ChunkedLogprobs`
            logs.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(up[part, None])
            grad.mul_(logs)
            del logs
            if ctx.support is not None:
                held = ctx.support.part(part)
                add_support_gradient(grad, held, grad_logprobs[part], shares, ctx.split)
            mine, places = ctx.split.own(targets[part], weight.shape[0])
            grad.scatter_add_(-1, places[:, None], (mine * grad_logprobs[part])[:, None])
            _undo_logits(grad, slope, ctx.temperature)
            grad_hidden[part] = grad.to(weight.dtype) @ weight
            grad_weight += grad.to(hidden.dtype).T @ hidden[part]
        whole = ctx.split.sum(grad_hidden).to(hidden.dtype)
        return whole, grad_weight.to(weight.dtype), *[None] * 6


def split_logprobs(
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    split: Vocabulary,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    squares: bool = False,
    support: Supports | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor] | TokenNumbers:
    """Like `chunked_logprobs`, or `token_numbers` with `squares`, from this rank's `rows` of the head. Collective.

    Neither the head nor a row of logits is ever whole. Each chunk needs two reductions over the ranks, the backward
    pass one of `[N, H]`.
    """
    if squares:
        with torch.no_grad():
            found = _split_pass(
                hidden, rows, targets, temperature, chunk_tokens, split, squares=True, support=support, cap=cap
            )
        return TokenNumbers(found.logprobs, found.entropy, found.square_sums)
    result: tuple[Tensor, Tensor] = _SplitLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, rows, targets, temperature, chunk_tokens, split, support, cap
    )
    return result


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward stores logsumexp, entropy and the softmax of the last chunks; backward recomputes the others in place."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        kept_bytes: int,
        support: Supports | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy gradient costs nothing
        found = _pass(
            hidden, weight, bias, targets, temperature, chunk, kept_bytes=kept_bytes, support=support, cap=cap
        )
        ctx.save_for_backward(hidden, weight, bias, targets, found.lse, found.entropy, found.shares, *found.kept)
        ctx.temperature, ctx.chunk, ctx.support, ctx.cap = temperature, chunk, support, cap
        return found.logprobs, found.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, shares, *kept = ctx.saved_tensors
        chunks = -(-targets.numel() // ctx.chunk)
        up = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        full = mask_supported(up, ctx.support)
        grad_hidden = torch.empty_like(hidden)
        # A frozen head (LoRA) saves the product and the memory.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=lse.dtype, device=weight.device)
        for number in range(chunks):
            part, known = slice(number * ctx.chunk, (number + 1) * ctx.chunk), number - chunks + len(kept)
            held = None if ctx.support is None else ctx.support.part(part)
            # d logprob / d logit = onehot - p
            slope = None
            if grad_entropy is None and held is not None and held.every and ctx.cap is None:
                grad = lse.new_zeros(held.counts.numel(), weight.shape[0])  # p is 0 outside the supports
            elif grad_entropy is None and known >= 0:
                grad = kept[known] * -full[part, None]
            else:
                logs = _logits(hidden[part], weight, bias, ctx.temperature, ctx.cap)
                slope = _slope(logs, ctx.temperature, ctx.cap)
                logs.sub_(lse[part, None])  # log-softmax
                if grad_entropy is None:
                    grad = logs.exp_().mul_(-full[part, None])
                else:  # d entropy / d logit = -p (log p + entropy); in two buffers of [n, V]
                    grad = logs.exp().neg_()
                    grad.mul_(logs.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(full[part, None]))
                del logs
            add_support_gradient(grad, held, up[part], shares)
            grad.scatter_add_(-1, targets[part, None], up[part, None])
            _undo_logits(grad, slope, ctx.temperature)
            narrow = grad.to(weight.dtype)
            grad_hidden[part] = (narrow @ weight).to(hidden.dtype)
            if grad_weight is None:
                pass
            elif narrow.dtype == grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(narrow.T, hidden[part])
            else:
                grad_weight += (grad.to(hidden.dtype).T @ hidden[part]).to(lse.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad, narrow, slope  # before the next ones are made
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 6,
        )


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    support: Supports | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of each distribution, both `[N]`.

    `hidden` `[N, H]`, `weight` `[V, H]`, `targets` int64 `[N]`; `support`: what each target was drawn from; `cap`: of
    the logits, which the backward pass then recomputes.
    """
    kept_bytes = KEPT_BYTES if torch.is_grad_enabled() and cap is None else 0
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, chunk_tokens, kept_bytes, support, cap
    )
    return result


@torch.no_grad()
def token_numbers(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    squares: bool = False,
    support: Supports | None = None,
    cap: float | None = None,
) -> TokenNumbers:
    """Like `chunked_logprobs`, without gradient; with `squares` also the sums for the optimal token baseline, of
    `softmax(logits / temperature)` (arXiv 2602.17616).
    """
    found = _pass(hidden, weight, bias, targets, temperature, chunk_tokens, squares=squares, support=support, cap=cap)
    return TokenNumbers(found.logprobs, found.entropy, found.square_sums)


def gather_whole(tensor: Tensor) -> Tensor:
    """Return a tensor that is not split over tensor or expert ranks, with gradient. Collective if it is split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
