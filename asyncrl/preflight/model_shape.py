"""Sizes of a model that determine its memory, from its config.json. Pure.

Guarantee: parameters are counted as the model classes of transformers lay them out (tests compare them on the meta
device), but for biases. An architecture that is not known gives None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

#: Feed-forward parts of two matrices instead of three.
PLAIN = frozenset({"gpt_neox", "starcoder2", "phi", "gpt2", "opt"})


class Shape(msgspec.Struct, frozen=True):
    """Sizes of a model that determine its memory."""

    hidden: int
    layers: int
    vocabulary: int
    attention: int  # parameters of one layer's attention
    queries: int  # width of q, of k and v together, and of the KV cache per token and layer
    keys_values: int
    cached: int
    feed_forward: tuple[int, ...]  # parameters of each layer's feed-forward part
    active_width: int  # of the feed-forward part that one token uses
    linear: int  # sum of inputs and outputs of one layer's linear parts: adapters grow with it
    tied: bool
    experts: tuple[int, ...]  # parameters of each layer's routed experts, within feed_forward
    common_heads: int  # greatest common divisor of the numbers of query and of K/V heads
    tower: int = 0  # parameters of a vision tower
    projector: int = 0  # of the layers between it and the language part

    @property
    def embedding(self) -> int:
        """vocabulary * hidden, twice if the output head is separate."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Of the whole model: embeddings, layers with two norms each, the last norm, what sees images."""
        norms = (2 * self.layers + 1) * self.hidden
        language = self.embedding + self.layers * self.attention + sum(self.feed_forward) + norms
        return language + self.tower + self.projector

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest unit that is gathered at once: a layer, or the embeddings."""
        return max(self.attention + max(self.feed_forward), self.embedding)


def _ties(model: Mapping[str, Any]) -> bool:
    """Whether a model without the field shares embeddings and head: transformers' default of its family."""
    return str(model.get("model_type", "")).startswith("gemma")


def model_shape(model: Mapping[str, Any]) -> Shape | None:
    """The sizes in a config.json; None for an unknown architecture."""
    vision, kind = model.get("vision_config"), model.get("model_type", "")
    if text := model.get("text_config"):
        model = {"tie_word_embeddings": model.get("tie_word_embeddings", _ties(model))} | text
    try:
        shape = _shape(model)
        if vision is None:
            return shape
        tower, projector = _vision(vision, kind, shape.hidden)
        return msgspec.structs.replace(shape, tower=tower, projector=projector)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _shape(model: Mapping[str, Any]) -> Shape:
    hidden, layers, heads = model["hidden_size"], model["num_hidden_layers"], model["num_attention_heads"]
    width = model["intermediate_size"]
    head = model.get("head_dim") or hidden // heads
    values = model.get("num_key_value_heads") or heads
    queries, keys_values = heads * head, 2 * values * head
    attention, cached = hidden * (2 * queries + keys_values), keys_values
    if model.get("kv_lora_rank"):  # attention over compressed keys and values
        attention, cached = _latent(model, hidden, heads)
    matrices = 2 if model.get("model_type") in PLAIN else 3
    feed_forward = tuple(_feed_forward(model, layer, matrices) for layer in range(layers))
    active = width
    if experts := _experts(model):
        each = model.get("moe_intermediate_size") or width
        active = each * model.get("num_experts_per_tok", experts)
    linear = 4 * hidden + 2 * queries + keys_values + matrices * (hidden + width)
    return Shape(
        hidden,
        layers,
        model["vocab_size"],
        attention,
        queries,
        keys_values,
        cached,
        feed_forward,
        active,
        linear,
        bool(model.get("tie_word_embeddings", _ties(model))),
        _expert_parameters(model),
        math.gcd(heads, values),
    )


def _vision(vision: Mapping[str, Any], kind: str, out: int) -> tuple[int, int]:
    """Parameters of the vision tower and of the projector of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (`kind`); `out`: width
    of the language part. Qwen2-VL calls the width of its tower `embed_dim`.
    """
    width = vision.get("embed_dim") or vision["hidden_size"]
    matrices = 3 if kind.startswith("qwen2_5") else 2
    inner = vision.get("intermediate_size") or vision["mlp_ratio"] * width
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    places = vision.get("num_position_embeddings", 0)
    merged = width * vision["spatial_merge_size"] ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    layer = 4 * width * width + matrices * width * inner + 2 * width
    return vision["depth"] * layer + (patch + places) * width, mergers * merged * (merged + out)


def _experts(model: Mapping[str, Any]) -> int:
    return int(model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts") or 0)


def _latent(model: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Parameters of multi-head latent attention (arXiv 2405.04434), and its cache per token."""
    rank, rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    nope, value = model["qk_nope_head_dim"], model["v_head_dim"]
    query = model.get("q_lora_rank")
    up = heads * (nope + rope)
    queries = hidden * query + query * up if query else hidden * up
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden, rank + rope


def _expert_parameters(model: Mapping[str, Any]) -> tuple[int, ...]:
    """Parameters of the routed experts of each layer; 0 for a dense layer."""
    each = (
        _experts(model) * 3 * model["hidden_size"] * (model.get("moe_intermediate_size") or model["intermediate_size"])
    )
    return tuple(0 if _is_dense(model, layer) else each for layer in range(model["num_hidden_layers"]))


def _is_dense(model: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has one feed-forward part for all tokens."""
    step = model.get("decoder_sparse_step") or 1
    named = layer in (model.get("mlp_only_layers") or ()) or layer < (model.get("first_k_dense_replace") or 0)
    return not _experts(model) or named or (layer + 1) % step != 0


def _feed_forward(model: Mapping[str, Any], layer: int, matrices: int) -> int:
    hidden, experts = model["hidden_size"], _experts(model)
    if _is_dense(model, layer):
        return int(matrices * hidden * model["intermediate_size"])
    each = model.get("moe_intermediate_size") or model["intermediate_size"]
    shared = model.get("shared_expert_intermediate_size") or (model.get("n_shared_experts") or 0) * each
    return int(matrices * hidden * (experts * each + shared) + experts * hidden)
