"""Attention over packed rows: the kernel for each device.

With `model.attn_implementation` "auto", in half precision: on CUDA flash-attn if installed, otherwise "varlen"; the
fused operators of torch_npu on an NPU (like flash-attn named "flash_attention_2" in transformers). Elsewhere it is
"sdpa" one sequence at a time. The "sdpa" of transformers uses a dense mask over the whole row, so its cost grows with
the square of the row. "varlen" is torch's own CUDA kernel (`torch.nn.attention.varlen`); "auto" takes it for heads that
the kernel has, on devices that it has. For a model that caps its attention scores (Gemma-2) "auto" is flash-attn from
2.6 on, otherwise "eager" with a dense mask; kernels without a cap are refused. Guarantees of
"auto" and "varlen":
1. every sequence gets the result that it has alone in a row, by the same kernel (`scaled_dot_product_attention`,
   causal);
2. a layer that needs more than causal attention inside a sequence (a window, chunks, padding) gets transformers' dense
   mask and "sdpa";
3. a model that does not pass positions to its attention is refused;
4. the check at the start compares packed rows with single sequences under transformers' plain "sdpa" (`plain`), so it
   also finds kernels that are wrong for both.

It does not support generation with a cache.
Example: a row of 8192 tokens in 40 sequences of about 200: 40 x 200^2 / 2 = 0.8 million scores per head instead of 67.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.model_facts import ATTENTION_CAP
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.device import Device
from learners.models import sequence_parallel as sequence
from learners.models.segments import cached_lengths

#: The name in transformers. It contains "sdpa", so transformers refuses models without that support.
BY_SEQUENCE = "sdpa_by_sequence"
VARLEN = "sdpa_varlen"
#: The name in `model.attn_implementation`.
VARLEN_SETTING = "varlen"
FLASH = "flash_attention_2"
#: Heads of torch's kernel have at most this size, a multiple of 8.
WIDEST = 256


def select_kernel(wanted: str, device: Device, dtype: str, *, capped: bool = False) -> str:
    """Return the attention with which transformers loads a model. `dtype`: of compute, by its name in the settings;
    `capped`: the model caps its attention scores.

    Raises:
        ConfigError: `config.conflict`: the device or the dtype has no such kernel.
    """
    if wanted == VARLEN_SETTING:
        why = ""
        if not device.supports("varlen_attention") or dtype == "float32":
            why = f"a CUDA device and half precision, not {device} and {dtype}"
        elif "window_size" not in _varlen_options():
            why = f"torch 2.11 or later, not {torch.__version__}"
        if why:
            raise ConfigError("config.conflict", f"{VARLEN_SETTING!r} needs {why}", where="model.attn_implementation")
        return "sdpa"
    if wanted != "auto":
        return wanted
    flash = device.supports("flash_attention") and importlib.util.find_spec("flash_attn") is not None
    fused = device.supports("fused_attention")
    if capped:
        from transformers.utils.import_utils import is_flash_attn_greater_or_equal

        flash, fused = flash and is_flash_attn_greater_or_equal("2.6.0"), False
    if dtype != "float32" and (flash or fused):
        return FLASH
    return "eager" if capped else "sdpa"


def kernel_by_sequence(device: Device, dtype: str) -> str:
    """Return how a model that was loaded with "sdpa" attends under "auto": by torch's kernel where that runs."""
    able = dtype != "float32" and device.varlen_ok and "window_size" in _varlen_options()
    return VARLEN if able else BY_SEQUENCE


def _varlen_options() -> frozenset[str]:
    """Return the names of the parameters of this torch's kernel; none before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return _parameters(varlen_attn)


@cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: heads `[R, H, W, D]` to `[R, W, H, D]`.

    Raises:
        AsyncRLError: `learner.packing`: the model does not pass its positions.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if attention_mask is None and _is_causal(module, given):  # a vision tower is not, and splits itself
        positions = given.get("position_ids")
        if positions is None:
            why = f"{type(module).__name__} passes no positions: set model.attn_implementation = 'sdpa'"
            raise AsyncRLError("learner.packing", why)
        lengths = cached_lengths(positions)
        if len(lengths) > 1:
            # Use split and cat: each slice would have a gradient of the size of the whole row.
            parts = zip(*(torch.split(heads, lengths, dim=2) for heads in (query, key, value)), strict=True)
            return torch.cat([sdpa(module, q, k, v, None, **given)[0] for q, k, v in parts], dim=1), None
    result: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **given)
    return result


def _is_causal(module: Any, given: dict[str, Any]) -> bool:
    found = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if found is None else found)


def attend_varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Like `attend`, with one call of torch's kernel for all sequences of a row, where the kernel can."""
    from torch.nn.attention.varlen import varlen_attn

    other = given.get("dropout") or given.get("softcap") or not _is_causal(module, given)
    other = other or query.shape[-1] > WIDEST or query.shape[-1] % 8 or value.shape[-1] != query.shape[-1]
    if attention_mask is not None or given.get("position_ids") is None or query.shape[0] > 1 or other:
        return attend(module, query, key, value, attention_mask, **given)
    lengths = cached_lengths(given["position_ids"])
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=query.device).cumsum(0, dtype=torch.int32)
    groups = query.shape[1] // key.shape[1]
    shared: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}
    if groups > 1 and "enable_gqa" not in _parameters(varlen_attn):  # torch 2.11
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
        shared = {}
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
        **shared,
    )
    return found[None], None


def mask(*, local_size: int | None = None, use_vmap: bool = False, **given: Any) -> Tensor | None:
    """Implement transformers' mask interface: None for causal attention inside sequences, otherwise the dense mask of
    "sdpa".
    """
    from transformers.masking_utils import sdpa_mask

    two_sided = given.get("allow_is_bidirectional_skip", False)
    if local_size is None and not use_vmap and not two_sided and given.get("attention_mask") is None:
        return None
    result: Tensor | None = sdpa_mask(local_size=local_size, use_vmap=use_vmap, **given)
    return result


def install(model: Any, name: str = BY_SEQUENCE) -> bool:
    """Let a model loaded with "sdpa" attend by sequence. Return whether it supports that."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not getattr(model, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(name, attend_varlen if name == VARLEN else attend)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    return bool(model.config._attn_implementation == name)


@contextmanager
def plain(model: Any) -> Iterator[None]:
    """Use transformers' own "sdpa" ("eager" with capped scores) for single sequences in this block, if it can be."""
    before = model.config._attn_implementation
    inner, split = before.removeprefix(sequence.PREFIX), before.startswith(sequence.PREFIX)
    capped = getattr(model.config.get_text_config(), ATTENTION_CAP, None) is not None
    able = not split if capped else getattr(model, "_supports_sdpa", False)
    if inner not in {BY_SEQUENCE, VARLEN, FLASH, "flex_attention"} or not able:
        yield
        return
    name = "eager" if capped else "sdpa"
    model.set_attn_implementation(sequence.register_attention(name) if split else name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
