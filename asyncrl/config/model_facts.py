"""What a model's config.json says of its architecture. Pure: no file is read and nothing is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Model = Mapping[str, Any]  # a config.json; empty: not known


def count_experts(model: Model) -> int:
    """Experts of a layer; 0 for a dense model."""
    inner = model.get("text_config") or model
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((found for name in names if isinstance(found := inner.get(name), int) and found > 0), 0)


def experts_shape(model: Model) -> tuple[int, int, int]:
    """Experts of a layer, layers (also those without experts), experts that each token goes through; 0 if unknown.

    >>> experts_shape({"num_experts": 128, "num_hidden_layers": 48, "num_experts_per_tok": 8})
    (128, 48, 8)
    """
    inner = model.get("text_config") or model
    return count_experts(model), inner.get("num_hidden_layers") or 0, inner.get("num_experts_per_tok") or 0


def list_senses(model: Model) -> list[str]:
    """Inputs other than token ids.

    >>> list_senses({"model_type": "qwen2_vl", "vision_config": {}})
    ['vision']
    """
    return [name for name in ("vision", "audio") if model.get(f"{name}_config") is not None]


#: Vision-language models with positions by time, height and width, and all those of the learner and the hf engine.
MROPE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TILE_MODELS = ("llava", "internvl")  # images in squares, positions as of text
VISION_MODELS = (*MROPE_MODELS, *TILE_MODELS)
#: Models whose tokens of an image also see those behind them, which rows of causal attention do not reproduce.
BOTH_WAYS = ("gemma3", "paligemma")


#: Models with layers that keep other state than K and V of every token, or with positions made of the padding mask.
CACHE_MODELS = (
    "bloom", "deepseek_v32", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2", "nemotron_h",
    "qwen3_next",
)  # fmt: skip


def find_state(model: Model) -> str:
    """Why the hf engine decodes a model with transformers' own cache; empty: it does not, as far as is known.

    >>> find_state({"model_type": "lfm2"})
    "model_type 'lfm2'"
    """
    kind = model.get("model_type")
    return f"model_type {kind!r}" if kind in CACHE_MODELS else ""


def find_senses(model: Model, families: tuple[str, ...] = ()) -> str:
    """Inputs other than token ids of a model of these types; without types, of one that is not in VISION_MODELS."""
    senses, kind = list_senses(model), model.get("model_type")
    right = kind in families if families else kind not in VISION_MODELS
    ways = ", attended to in both directions" if kind in BOTH_WAYS else ""
    return f"{' and '.join(senses)} inputs{ways}" if senses and right else ""


MEGATRON_MODELS = ("llama", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe", "deepseek_v3")
ROPE_TYPES = ("default", "linear", "llama3")  # frequencies independent of the length of a row
#: Fields that scale the logits behind the head.
HEAD_SCALES = ("logits_scaling", "logit_scale")
#: Fields of soft caps, `cap tanh(x / cap)`, of the logits behind the head and of attention scores.
HEAD_CAP, ATTENTION_CAP = "final_logit_softcapping", "attn_logit_softcapping"
#: Fields of the families above that Megatron's layers follow with one value alone.
_FIXED: dict[str, Any] = {
    "mlp_bias": False,
    "use_sliding_window": False,
    "router_jitter_noise": 0.0,
    "rope_interleave": True,
}


def find_variant(model: Model) -> str:
    """What a decoder has beyond those that Megatron's layers are built for; empty: nothing."""
    for name, right in _FIXED.items():
        if model.get(name, right) != right:
            return f"{name} = {model[name]!r}"
    kind = model.get("model_type")
    activation = "gelu_pytorch_tanh" if kind == "gemma" else "silu"
    if model.get("hidden_act", activation) != activation:
        return f"hidden_act = {model['hidden_act']!r}"
    if model.get("use_bidirectional_attention"):
        return "use_bidirectional_attention = true"
    if kind != "qwen2" and model.get("attention_bias", False):
        return "attention_bias = true"
    if kind == "mixtral" and model.get("sliding_window"):
        return f"sliding_window = {model['sliding_window']}"
    if set(model.get("layer_types") or ()) - {"full_attention"}:
        return "layer_types other than full_attention"
    if kind == "deepseek_v3" and (found := _find_routing_variant(model)):
        return found
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    known = (*ROPE_TYPES, "yarn") if model.get("kv_lora_rank") else ROPE_TYPES
    return "" if rope_type in known else f"rope type {rope_type!r}"


def _find_routing_variant(model: Model) -> str:
    """Megatron-core scores a group of experts by its best `num_experts_per_tok // topk_group`, transformers by its best
    two; it always normalises; and transformers has its own epsilon in the norms of latent vectors.
    """
    groups, chosen = model.get("n_group") or 1, model.get("topk_group") or 1
    if groups != chosen and (model.get("num_experts_per_tok") or 0) // chosen != 2:
        return f"num_experts_per_tok = {model.get('num_experts_per_tok')} with topk_group = {chosen}, not twice as many"
    if not model.get("norm_topk_prob", True):
        return "norm_topk_prob = false"
    return "" if model.get("rms_norm_eps", 1e-6) == 1e-6 else f"rms_norm_eps = {model['rms_norm_eps']}, not 1e-6"


def find_head_scale(model: Model) -> str:
    """How a model scales its logits after the head; empty: not at all."""
    inner = model.get("text_config") or model
    return next((f"{name} = {inner[name]}" for name in HEAD_SCALES if inner.get(name) not in (None, 1.0)), "")


def find_cap(model: Model, name: str) -> float | None:
    """The soft cap `HEAD_CAP` or `ATTENTION_CAP` of a model."""
    found: float | None = (model.get("text_config") or model).get(name)
    return found
