"""The families of models that the backend megatron builds: what their config.json says, as numbers. Pure.

`FAMILIES` is the table: how a family differs from a Llama. Names of tensors need no table: transformers gives its
parameters the same names in all of them. Variants of a family that Megatron-core has no layers for are refused
(`asyncrl.config.model_facts.find_variant`).

Example: of a Qwen3-MoE with `decoder_sparse_step = 2` and 4 layers, layers 0 and 2 are dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncrl.config.model_facts import MEGATRON_MODELS, count_experts, find_variant
from asyncrl.errors import ConfigError


class Family(NamedTuple):
    """How a family differs from a Llama. `sigmoid`: scores of experts, else softmax; `float32_router`: its scores are
    float32 in any dtype of the model; `gemma`: norms multiply by 1 + their weight, embeddings are scaled by the root
    of their width, the activation is an approximated GELU, the head is the embedding unless config.json says otherwise.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    sigmoid: bool = False
    float32_router: bool = False
    gemma: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(gemma=True),
    "mixtral": Family(),
    "qwen3_moe": Family(qk_norm=True),
    "deepseek_v3": Family(sigmoid=True, float32_router=True),
}


class Experts(NamedTuple):
    """The experts of a sparse layer, and how a router chooses."""

    total: int
    chosen: int
    inner: int
    dense: tuple[int, ...] = ()  # layers without experts
    shared: int = 0  # inner width of the experts that every token goes through
    groups: int = 1
    chosen_groups: int = 1
    sigmoid: bool = False  # else softmax
    normalised: bool = True  # weights of the chosen experts sum to 1
    scale: float = 1.0  # of the weights
    bias: bool = False  # an addition to the scores that decides the choice alone
    float32: bool = False


class Latent(NamedTuple):
    """Widths of multi-head latent attention. `q_rank`: 0 if queries are not compressed; `nope` and `rope`: parts of a
    head without and with rotary positions.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    scale: tuple[float, float] = (1.0, 0.0)  # YaRN's factor and `mscale_all_dim`, which scale the scores


class Facts(NamedTuple):
    """The numbers that decide the layout of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    tied: bool = False  # the head is the embedding
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    gemma: bool = False
    scores: bool = False  # the head gives one number for each token, not logits

    def padded_rows(self, tensor: int) -> int:
        """Return rows of the embedding, rounded up so that every tensor place has the same number."""
        return -(-self.vocab // tensor) * tensor

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense


def read_facts(config: Mapping[str, Any]) -> Facts:
    """Return the facts of a Hugging Face `config.json`.

    Raises:
        ConfigError: `config.model`: what this backend does not support.
    """
    kind = config.get("model_type", "")
    if kind not in MEGATRON_MODELS:
        raise _refusal(kind, f"the backend megatron builds {', '.join(MEGATRON_MODELS)}")
    if variant := find_variant(config):
        raise _refusal(kind, variant)
    heads, family = int(config["num_attention_heads"]), FAMILIES[kind]
    return Facts(
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        mlp=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", family.gemma)),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        experts=_read_experts(config, family),
        latent=_read_latent(config),
        gemma=family.gemma,
    )


def _read_experts(config: Mapping[str, Any], family: Family) -> Experts | None:
    if not (count := count_experts(config)):
        return None
    layers, step = range(int(config["num_hidden_layers"])), int(config.get("decoder_sparse_step") or 1)
    plain = {*(config.get("mlp_only_layers") or ()), *range(int(config.get("first_k_dense_replace") or 0))}
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    return Experts(
        count,
        chosen=int(config["num_experts_per_tok"]),
        inner=inner,
        dense=tuple(layer for layer in layers if layer in plain or (layer + 1) % step),
        shared=inner * int(config.get("n_shared_experts") or 0),
        groups=int(config.get("n_group") or 1),
        chosen_groups=int(config.get("topk_group") or 1),
        sigmoid=family.sigmoid,
        normalised=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        bias=family.sigmoid,
        float32=family.float32_router,
    )


def _read_latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Latent(
        q_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=int(config["kv_lora_rank"]),
        nope=int(config["qk_nope_head_dim"]),
        rope=int(config["qk_rope_head_dim"]),
        value=int(config["v_head_dim"]),
        scale=(float(rope.get("factor") or 1.0), float(rope.get("mscale_all_dim") or 0.0)),
    )


def _refusal(kind: str, why: str) -> ConfigError:
    return ConfigError("config.model", f"model_type {kind!r}: {why}")
