"""Sequences in a packed row, and causal attention of a part of the row to all tokens before it.

Blockwise in memory on a CPU, and by torch's kernels on CUDA: no scores of the whole row exist. Elsewhere torch builds a
dense mask of the part.
Example: of a row with sequences of 3 and 5 tokens the part 4..7 is 4 queries of the second sequence, whose first token
is key 3: query 4 sees the keys 3 and 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from asyncrl.errors import AsyncRLError

_LENGTHS = "_asyncrl_lengths"


def sequence_lengths(position_ids: Tensor) -> list[int]:
    """Return the lengths of the sequences of one row of positions `[1, W]`; a sequence ends where positions do not rise
    by one. Of several rows `[R, W]` each must be one sequence: `[W]`.

    Raises:
        AsyncRLError: `internal`: one of several rows has more than one sequence, or the shape is wrong.
    """
    if position_ids.dim() != 2:
        raise AsyncRLError("internal", f"positions of shape {tuple(position_ids.shape)}")
    width = position_ids.shape[1]
    cuts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if position_ids.shape[0] > 1:
        if bool(cuts.any()):
            raise AsyncRLError("internal", "several sequences in one of several rows")
        return [width]
    ends = [*(cuts[0].nonzero().flatten() + 1).tolist(), width]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def cached_lengths(positions: Tensor) -> list[int]:
    """Cache `sequence_lengths` for all layers with the same positions, to read the device once."""
    known: list[int] | None = getattr(positions, _LENGTHS, None)
    if known is None:
        known = sequence_lengths(positions)
        setattr(positions, _LENGTHS, known)
    return known


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], start: int, *, scale: float | None
) -> Tensor:
    """Attend from the tokens `start ..` of a row, `[R, H, n, D]`, to its keys `[R, K, W, D]`; sequences do not see each
    other. Return `[R, n, H, D]`.
    """
    stop, end = start + query.shape[2], 0
    queries, keys = [], [0]
    for length in lengths:
        begin, end = end, end + length
        if end <= start:
            keys[0] = end
        elif begin < stop:
            queries.append(min(end, stop) - max(begin, start))
            keys.append(min(end, stop) - begin)
    # Use split and cat: each slice would have a gradient of the size of the whole row.
    keys.append(key.shape[2] - sum(keys))
    held = (torch.split(heads, keys, dim=2)[1:-1] for heads in (key, value))
    parts = zip(torch.split(query, queries, dim=2), *held, strict=True)
    return torch.cat([attend_last(*part, scale=scale) for part in parts], dim=2).transpose(1, 2)


def attend_last(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Return causal attention `[R, H, n, D]` of the last n tokens of a sequence to its tokens."""
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        found: Tensor = _LastOnCpu.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
        return found
    groups = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    mask: Any = causal_lower_right(query.shape[2], key.shape[2])  # by a kernel on CUDA
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


class _LastOnCpu(torch.autograd.Function):
    """Torch's kernel for a CPU knows no causal mask at the end of the keys: attention to earlier keys and to the own
    ones are two calls, and their results are merged by logsumexp (arXiv 2310.01889). The kernel's backward takes the
    merged result for each.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        earlier = key.shape[2] - query.shape[2]
        result, total = kernel(query, key[:, :, earlier:], value[:, :, earlier:], 0.0, True, scale=scale)
        if earlier:
            other, its = kernel(query, key[:, :, :earlier], value[:, :, :earlier], scale=scale)
            own, total = total, torch.logaddexp(total, its)
            shares = ((part - total).exp_()[..., None] for part in (own, its))
            result = (result * next(shares) + other * next(shares)).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        ctx.scale = scale
        found: Tensor = result
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, result, total = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        earlier = key.shape[2] - query.shape[2]
        parts = [
            kernel(grad, query, key[:, :, cut], value[:, :, cut], result, total, 0.0, causal, scale=ctx.scale)
            for cut, causal in ((slice(earlier), False), (slice(earlier, None), True))
            if causal or earlier
        ]
        own, keys, values = zip(*parts, strict=True)
        return sum(own[1:], own[0]), torch.cat(keys, 2), torch.cat(values, 2), None
