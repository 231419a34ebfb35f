"""Log-probs and entropy of a causal language model, computed in chunks: the whole logits never exist.

Guarantees:
1. at most `chunk_tokens` rows of logits exist at a time, in forward and backward. Only logsumexp, entropy and (on
   request) the sum of squared probabilities are stored, `[N]` each, and for the backward pass the softmax of the last
   chunks, up to `KEPT_BYTES`;
2. the gradient (to hidden states, head weight and bias) equals that of the full computation, also through the entropy;
3. log-probs are of `softmax(logits / temperature)`, in float32 or wider;
4. no 2D attention mask and no cache are passed: with either, packed rows are silently wrong in transformers;
5. log-probs and entropies have the same bits with and without squares, which never have a gradient.

With tensor parallelism each rank computes the logits of its own rows of the head (`split_logprobs`): equal up to
rounding. Heads that change their logits (soft caps, scales) are refused (`policy_model.check_head`).
Example: probabilities 0.5, 0.25, 0.25 and target 0: log-prob -0.693, entropy 1.040, sum of squares 0.375.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Bytes of softmaxes stored from the forward pass of a micro-batch for its backward pass.
KEPT_BYTES = 128 << 20


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """`[n, V]` in float32 or wider, divided by the temperature."""
    logits = nn.functional.linear(hidden, weight, bias)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


class TokenNumbers(NamedTuple):
    """Numbers of each target, `[N]` in float32 or wider, without gradient."""

    logprobs: Tensor
    entropy: Tensor  # nats
    square_sums: Tensor | None  # sum over the vocabulary of p^2, 1 / V .. 1; None: not requested


class Vocabulary(NamedTuple):
    """The rows of an output head on this rank: from `start` on, of the vocabulary split over `group`."""

    group: Any
    start: int

    def sum(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the ranks, in place."""
        dist.all_reduce(values, op, group=self.group)  # bounded: the timeout of the group
        return values

    def own(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return which targets `[n]` lie on this rank, and their places in its `count` rows (0 for others)."""
        places = targets - self.start
        mine = (places >= 0) & (places < count)
        return mine, torch.where(mine, places, 0)


def _split_pass(  # noqa: PLR0917 - as `_pass`
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    split: Vocabulary,
    *,
    squares: bool = False,
) -> _Chunks:
    """Like `_pass`, from this rank's part of the logits."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs, entropy, lse = (torch.empty(targets.numel(), dtype=wide, device=hidden.device) for _ in range(3))
    square_sums = torch.empty_like(lse) if squares else None
    for start in range(0, targets.numel(), chunk):
        part = slice(start, start + chunk)
        logits = _logits(hidden[part], weight, None, temperature)
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
        logprobs[part] = target - lse[part]
        entropy[part] = lse[part] - weighted / total
        if square_sums is not None:
            square_sums[part] = square[0] / total.square()
    return _Chunks(logprobs, entropy, lse, square_sums, [])


class _Chunks(NamedTuple):
    """Results of a pass over the chunks, `[N]` each; `kept`: the softmaxes `[n, V]` of the last chunks."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor
    square_sums: Tensor | None
    kept: list[Tensor]


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
) -> _Chunks:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs, entropy, lse = (torch.empty(targets.numel(), dtype=wide, device=hidden.device) for _ in range(3))
    square_sums = torch.empty_like(lse) if squares else None
    again = targets.numel() - max(
        kept_bytes // max(weight.shape[0] * lse.itemsize, 1), 1
    )  # rows before this one are recomputed
    kept: list[Tensor] = []
    for start in range(0, targets.numel(), chunk):
        part = slice(start, start + chunk)
        logits = _logits(hidden[part], weight, bias, temperature)
        softmax = logits.softmax(-1)
        # The largest entry is at least 1 / V: no precision is lost, and no second exp is needed.
        lse[part] = logits.amax(-1) - softmax.amax(-1).log_()
        logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - lse[part]
        if square_sums is not None:
            # A norm does not copy its input, unlike a square.
            square_sums[part] = torch.linalg.vector_norm(softmax, dim=-1).square()
        entropy[part] = lse[part] - logits.mul_(softmax).sum(-1)
        if kept_bytes and (start >= again or start + chunk >= targets.numel()):
            kept.append(softmax)
        del logits, softmax  # free memory before the next chunk
    return _Chunks(logprobs, entropy, lse, square_sums, kept)


class _SplitLogprobs(torch.autograd.Function):
    """Like `_ChunkedLogprobs`, with this rank's rows of the vocabulary. Every rank of the group has the same hidden
    states and loss: the gradient of hidden states is summed over them.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes by position
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, split: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, lse, *_ = _split_pass(hidden, weight, targets, temperature, chunk, split)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.chunk, ctx.split = temperature, chunk, split
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.empty(hidden.shape, dtype=lse.dtype, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        for start in range(0, targets.numel(), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logs = _logits(hidden[part], weight, None, ctx.temperature).sub_(lse[part, None])
            grad = logs.exp().neg_()  # as in `_ChunkedLogprobs`
            logs.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprobs[part, None])
            grad.mul_(logs)
            del logs
            mine, places = ctx.split.own(targets[part], weight.shape[0])
            grad.scatter_add_(-1, places[:, None], (mine * grad_logprobs[part])[:, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad_hidden[part] = grad.to(weight.dtype) @ weight
            grad_weight += grad.to(hidden.dtype).T @ hidden[part]
        whole = ctx.split.sum(grad_hidden).to(hidden.dtype)
        return whole, grad_weight.to(weight.dtype), None, None, None, None


def split_logprobs(
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    split: Vocabulary,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    squares: bool = False,
) -> tuple[Tensor, Tensor] | TokenNumbers:
    """Like `chunked_logprobs`, or `token_numbers` with `squares`, from this rank's `rows` of the head. Collective.

    Neither the head nor a row of logits is ever whole. Each chunk needs two reductions over the ranks, the backward
    pass one of `[N, H]`.
    """
    if squares:
        with torch.no_grad():
            found = _split_pass(hidden, rows, targets, temperature, chunk_tokens, split, squares=True)
        return TokenNumbers(found.logprobs, found.entropy, found.square_sums)
    result: tuple[Tensor, Tensor] = _SplitLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, rows, targets, temperature, chunk_tokens, split
    )
    return result


def vocabulary_split(weight: Tensor) -> Vocabulary | None:
    """Return how the rows of an output head lie on ranks; None if it is whole or split in another way."""
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        return None
    mesh, rows = weight.device_mesh, weight.shape[0]
    each = -(-rows // mesh.size())
    if each * (mesh.size() - 1) >= rows:  # a rank without a row
        return None
    return Vocabulary(mesh.get_group(), each * mesh.get_local_rank())


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
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy gradient costs nothing
        logprobs, entropy, lse, _, kept = _pass(
            hidden, weight, bias, targets, temperature, chunk, kept_bytes=kept_bytes
        )
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, *kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, *kept = ctx.saved_tensors
        chunks = -(-targets.numel() // ctx.chunk)
        up = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        grad_hidden = torch.empty_like(hidden)
        # A frozen head (LoRA) saves the product and the memory.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=lse.dtype, device=weight.device)
        for number in range(chunks):
            part, known = slice(number * ctx.chunk, (number + 1) * ctx.chunk), number - chunks + len(kept)
            # d logprob / d logit = onehot - p
            if grad_entropy is None and known >= 0:
                grad = kept[known] * -up[part, None]
            else:
                logs = _logits(hidden[part], weight, bias, ctx.temperature).sub_(lse[part, None])  # log-softmax
                if grad_entropy is None:
                    grad = logs.exp_().mul_(-up[part, None])
                else:  # d entropy / d logit = -p (log p + entropy); in two buffers of [n, V]
                    grad = logs.exp().neg_()
                    grad.mul_(logs.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(up[part, None]))
                del logs
            grad.scatter_add_(-1, targets[part, None], up[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
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
            del grad, narrow  # before the next ones are made
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of each distribution, both `[N]`.

    `hidden` `[N, H]`, `weight` `[V, H]`, `targets` int64 `[N]`.
    """
    kept_bytes = KEPT_BYTES if torch.is_grad_enabled() else 0
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, chunk_tokens, kept_bytes
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
) -> TokenNumbers:
    """Like `chunked_logprobs`, without gradient; with `squares` also the sums for the optimal token baseline, of
    `softmax(logits / temperature)` (arXiv 2602.17616).
    """
    found = _pass(hidden, weight, bias, targets, temperature, chunk_tokens, squares=squares)
    return TokenNumbers(found.logprobs, found.entropy, found.square_sums)


def gather_whole(tensor: Tensor) -> Tensor:
    """Return a tensor that is not split over tensor or expert ranks, with gradient. Collective if it is split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
