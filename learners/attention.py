"""Attention over a packed row one sequence at a time, for devices without a kernel for rows of several sequences.

Installed by `learners.backends.fsdp2.load_model` where `model.attn_implementation` is "auto" and the device is a CPU.
transformers' own "sdpa" gives a packed row a dense mask over the whole row: its cost grows with the square of the row,
not of the sequences. Guarantees:
1. every sequence gets what it would get alone in a row, by the same kernel (`scaled_dot_product_attention`, causal);
2. a layer that asks for more than causal attention inside a sequence (a window, chunks, padding) gets transformers'
   dense mask and "sdpa", exact as before;
3. a model that does not tell its attention the positions is refused, not wrongly computed.
It does not serve generation: with a cache, transformers' "sdpa" is right.

Example: a row of 8192 tokens in 40 sequences of about 200: 40 x 200^2 / 2 = 0.8 million scores per head instead of 67.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import AsyncRLError

#: The name to transformers. It holds "sdpa", so that models without that support are refused by transformers itself.
BY_SEQUENCE = "sdpa_by_sequence"


def sequence_lengths(position_ids: Tensor) -> list[int]:
    """Lengths of the sequences of one row of positions `[1, W]`; a sequence ends where the next is not one more.

    Of several rows `[R, W]` each must be one sequence: `[W]`.

    Raises:
        AsyncRLError: `internal`, where one of several rows has more than one sequence, or the shape is another.
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


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: heads `[R, H, W, D]` to `[R, W, H, D]`.

    Raises:
        AsyncRLError: `learner.packing`, where the model does not hand on its positions.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if attention_mask is None:
        positions = given.get("position_ids")
        if positions is None:
            why = f"{type(module).__name__} hands no positions on: set model.attn_implementation = 'sdpa'"
            raise AsyncRLError("learner.packing", why)
        lengths = sequence_lengths(positions)
        if len(lengths) > 1:
            # One split and one cat: slices would each have a gradient of the size of the whole row.
            parts = zip(*(torch.split(heads, lengths, dim=2) for heads in (query, key, value)), strict=True)
            return torch.cat([sdpa(module, q, k, v, None, **given)[0] for q, k, v in parts], dim=1), None
    result: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **given)
    return result


def mask(*, local_size: int | None = None, use_vmap: bool = False, **given: Any) -> Tensor | None:
    """transformers' mask interface: none where attention is causal inside sequences, else the dense one of "sdpa"."""
    from transformers.masking_utils import sdpa_mask

    two_sided = given.get("allow_is_bidirectional_skip", False)
    if local_size is None and not use_vmap and not two_sided and given.get("attention_mask") is None:
        return None
    result: Tensor | None = sdpa_mask(local_size=local_size, use_vmap=use_vmap, **given)
    return result


def install(model: Any) -> bool:
    """Let a model that was loaded with "sdpa" attend by sequence; whether it can (else it stays as it is)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not getattr(model, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(BY_SEQUENCE, attend)
    AttentionMaskInterface.register(BY_SEQUENCE, mask)
    model.set_attn_implementation(BY_SEQUENCE)
    return bool(model.config._attn_implementation == BY_SEQUENCE)
