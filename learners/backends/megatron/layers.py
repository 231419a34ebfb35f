"""The layers of a Megatron-core model: its own, with norms and attention of this project, or TransformerEngine's."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.runtime.device import Device


def has_engine(device: Device) -> bool:
    """Whether layers of TransformerEngine are built."""
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


class Norm(nn.RMSNorm):
    """RMS norm of Megatron-core's local layers. Its own one refuses weights around 0, and rows that are split over
    tensor places: gradients of a slice are summed over them only with this mark.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._around_zero = config.layernorm_zero_centered_gamma

    def forward(self, states: Tensor) -> Tensor:
        if not self._around_zero:
            return super().forward(states)
        weight = 1.0 + self.weight.float()  # in float32, as Gemma's own
        return nn.functional.rms_norm(states.float(), self.normalized_shape, weight, self.eps).type_as(states)


class BySequence(nn.Module):
    """Causal attention of a row, one sequence at a time: `core_attention` of Megatron-core's local layers. Its own
    attention does not take packed rows.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        """Convert heads `[T, H, D]` (keys `[T, G, D]`, values `[T, G, E]`, G divides H) to `[T, H, E]`."""
        ends: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [high - low for low, high in itertools.pairwise(ends)]
        found = []
        for q, k, v in zip(*(torch.split(heads, lengths) for heads in (query, key, value)), strict=True):
            out = nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            found.append(out.transpose(0, 1))
        return torch.cat(found)


def block_spec(settings: Any, device: Device) -> Any:
    """Return this stage's layers: Megatron-core's own with attention by sequence, or those of TransformerEngine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer.identity_op import IdentityOp

    engine = has_engine(device)
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=engine, normalization="RMSNorm")
    if engine:  # not run
        return spec
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = BySequence
        for parts in (layer.submodules, attention):
            for name in vars(parts):
                if name.endswith("layernorm") and getattr(parts, name) is not IdentityOp:
                    setattr(parts, name, Norm)
                elif name.endswith("down_proj"):  # its own split ones lose the gradient of the shared key's other heads
                    setattr(parts, name, Linear)
    return spec
