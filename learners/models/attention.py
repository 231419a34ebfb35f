"""Attention over packed rows by device: which kernel serves rows of several sequences, and what it is checked against.

Where `model.attn_implementation` is
"auto": flash-attn on CUDA where it is installed, the fused operators of torch_npu on an NPU (both under transformers'
name "flash_attention_2", in half precision), else "sdpa" one sequence at a time; transformers' own "sdpa" gives a
packed row a dense mask over the whole row: its cost grows with the square of the row, not of the sequences. "varlen"
is torch's own kernel for CUDA in half precision (`torch.nn.attention.varlen`). Guarantees, of "auto" and "varlen":
1. every sequence gets what it would get alone in a row, by the same kernel (`scaled_dot_product_attention`, causal);
2. a layer that asks for more than causal attention inside a sequence (a window, chunks, padding) gets transformers'
   dense mask and "sdpa", exact as before;
3. a model that does not tell its attention the positions is refused, not wrongly computed;
4. the check at the start compares packed rows with single sequences under transformers' plain "sdpa" (`plain`), so that
   a kernel that is wrong for both is found too.
It does not serve generation: with a cache, transformers' "sdpa" is right.

Example: a row of 8192 tokens in 40 sequences of about 200: 40 x 200^2 / 2 = 0.8 million scores per head instead of 67.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.device import Device
from learners.models import sequence_parallel as sequence

#: The name to transformers. It holds "sdpa", so that models without that support are refused by transformers itself.
BY_SEQUENCE = "sdpa_by_sequence"
VARLEN = "sdpa_varlen"
#: What `model.attn_implementation` calls it.
VARLEN_SETTING = "varlen"
FLASH = "flash_attention_2"
_LENGTHS = "_asyncrl_lengths"


def select_kernel(wanted: str, device: Device, dtype: str) -> str:
    """The attention that transformers loads a model with. `dtype`: of compute, by the name in the settings.

    Raises:
        ConfigError: `config.conflict`, where the device or the dtype has no such kernel.
    """
    if wanted == VARLEN_SETTING:
        if not device.supports("varlen_attention") or dtype == "float32":
            why = f"{VARLEN_SETTING!r} needs a CUDA device and half precision, not {device} and {dtype}"
            raise ConfigError("config.conflict", why, where="model.attn_implementation")
        return "sdpa"
    if wanted != "auto":
        return wanted
    flash = device.supports("flash_attention") and importlib.util.find_spec("flash_attn") is not None
    return FLASH if dtype != "float32" and (flash or device.supports("fused_attention")) else "sdpa"


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
        lengths = _cached_lengths(positions)
        if len(lengths) > 1:
            # One split and one cat: slices would each have a gradient of the size of the whole row.
            parts = zip(*(torch.split(heads, lengths, dim=2) for heads in (query, key, value)), strict=True)
            return torch.cat([sdpa(module, q, k, v, None, **given)[0] for q, k, v in parts], dim=1), None
    result: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **given)
    return result


def _cached_lengths(positions: Tensor) -> list[int]:
    """`sequence_lengths`, asked of the device once for all layers that are given the same positions."""
    known: list[int] | None = getattr(positions, _LENGTHS, None)
    if known is None:
        known = sequence_lengths(positions)
        setattr(positions, _LENGTHS, known)
    return known


def attend_varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """As `attend`, by one call of torch's kernel for all sequences of a row."""
    from torch.nn.attention.varlen import varlen_attn

    if attention_mask is not None or given.get("position_ids") is None or query.shape[0] > 1 or given.get("dropout"):
        return attend(module, query, key, value, attention_mask, **given)
    lengths = _cached_lengths(given["position_ids"])
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
    query, key, value = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))  # [W, H, D]
    longest = max(lengths)
    found: Any = varlen_attn(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=given.get("scaling"),
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found[None], None


def mask(*, local_size: int | None = None, use_vmap: bool = False, **given: Any) -> Tensor | None:
    """transformers' mask interface: none where attention is causal inside sequences, else the dense one of "sdpa"."""
    from transformers.masking_utils import sdpa_mask

    two_sided = given.get("allow_is_bidirectional_skip", False)
    if local_size is None and not use_vmap and not two_sided and given.get("attention_mask") is None:
        return None
    result: Tensor | None = sdpa_mask(local_size=local_size, use_vmap=use_vmap, **given)
    return result


def install(model: Any, name: str = BY_SEQUENCE) -> bool:
    """Let a model that was loaded with "sdpa" attend by sequence; whether it can (else it stays as it is)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not getattr(model, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(name, attend_varlen if name == VARLEN else attend)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    return bool(model.config._attn_implementation == name)


@contextmanager
def plain(model: Any) -> Iterator[None]:
    """Single sequences by transformers' own "sdpa" in this block, where that computes what the model asks for."""
    before = model.config._attn_implementation
    inner = before.removeprefix(sequence.PREFIX)
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if inner not in {BY_SEQUENCE, VARLEN, FLASH, "flex_attention"} or capped or not getattr(model, "_supports_sdpa", 0):
        yield
        return
    model.set_attn_implementation(sequence.wrapped("sdpa") if before.startswith(sequence.PREFIX) else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
