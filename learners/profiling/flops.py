"""Floating-point operations of a model's forward pass, from its config.json. Pure.

Guarantees:
1. only necessary work counts: products with weights (2 operations per element and token) and attention's scores and
   sums (2 each per pair of tokens, head and dimension). Norms, rotations, softmax, embeddings and recomputation count
   nothing;
2. attention is causal, inside one sample and its window. This is about half of PaLM's convention (arXiv 2204.02311,
   appendix B: 12 L H Q T per token and step), which counts masked scores;
3. of a mixture only the active experts count, of the head only predicted tokens;
4. a backward pass costs two forward passes (`TRAINING`: both together are 3), one with frozen weights; LoRA's own
   products count nothing;
5. an architecture outside `FAMILIES` raises ValueError. The others agree with `torch.utils.flop_counter` on tiny
   models.

Example: Qwen2.5-0.5B (24 layers of 14,909,440 elements, tied head of 151,936 x 896), one sample of 100 tokens, 40
predicted: 2 * 357,826,560 * 100 + 2 * 136,134,656 * 40 + 24 * 4 * 14 * 64 * 5050 = 8.29e10 operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Forward and backward pass, in forward passes.
TRAINING = 3

#: Kind of the feed-forward part by `model_type`: gated (three matrices), plain (two), moe (see `_experts`).
FAMILIES: dict[str, str] = {
    "llama": "gated", "mistral": "gated", "qwen2": "gated", "qwen3": "gated", "gemma": "gated", "gemma2": "gated",
    "gemma3_text": "gated", "phi3": "gated", "glm4": "gated", "granite": "gated", "olmo2": "gated", "olmo3": "gated",
    "smollm3": "gated", "cohere": "gated",
    "gpt_neox": "plain", "starcoder2": "plain", "phi": "plain",
    "mixtral": "moe", "qwen2_moe": "moe", "qwen3_moe": "moe", "olmoe": "moe", "gpt_oss": "moe", "glm4_moe": "moe",
    "deepseek_v3": "moe",
}  # fmt: skip


class Layer(NamedTuple):
    """One layer: elements of the matrices that a token uses; heads * dimension of scores and of values; window."""

    weights: int
    scores: int
    values: int
    window: int = 0  # keys that a token sees, with itself; 0: no limit


class Costs(NamedTuple):
    """Costs of a model. `head`: elements of the output head."""

    layers: tuple[Layer, ...]
    head: int

    @property
    def weights(self) -> int:
        """Elements that a predicted token uses: active parameters without embeddings and norms."""
        return self.head + sum(layer.weights for layer in self.layers)

    def forward(self, lengths: Sequence[int], *, predicted: int) -> int:
        """Return operations of one forward pass over samples of these lengths; `predicted` tokens use the head."""
        sizes = list(lengths)
        tokens = sum(sizes)
        pairs = {
            window: sum(attention_pairs(size, window) for size in sizes)
            for window in {one.window for one in self.layers}
        }
        attention = sum(2 * (one.scores + one.values) * pairs[one.window] for one in self.layers)
        return attention + self._products(tokens, predicted)

    def training(self, lengths: Sequence[int], *, predicted: int, frozen: bool = False) -> int:
        """Return operations of forward and backward; `frozen`: no weight has a gradient, as below LoRA adapters."""
        whole = TRAINING * self.forward(lengths, predicted=predicted)
        return whole - frozen * self._products(sum(lengths), predicted)

    def _products(self, tokens: int, predicted: int) -> int:
        """Return operations of products with weights in one forward pass."""
        return 2 * sum(one.weights for one in self.layers) * tokens + 2 * self.head * predicted


def attention_pairs(length: int, window: int = 0) -> int:
    """Count pairs of a token and a key it sees in a causal sample: `sum(min(t, window) for t in 1..length)`.

    >>> attention_pairs(4), attention_pairs(4, 2)
    (10, 7)
    """
    inside = min(length, window) if window else length
    return inside * (inside + 1) // 2 + (length - inside) * inside


def model_costs(config: Mapping[str, Any], *, scorer: bool = False) -> Costs:
    """Return the costs of a model from its config.json (as `PretrainedConfig.to_dict` returns it). `scorer`: with a
    scalar head instead of the vocabulary.

    Raises:
        ValueError: the architecture or a kind of layer is unknown.
    """
    config = config.get("text_config") or config
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"the operations of model_type {kind!r} are unknown")
    hidden, count = int(config["hidden_size"]), int(config["num_hidden_layers"])
    windows = _windows(config, count)
    attention = _latent_attention if config.get("kv_lora_rank") else _attention
    weights, scores, values = attention(config, hidden)
    layers = (
        Layer(weights + _feed_forward(config, hidden, number), scores, values, windows[number])
        for number in range(count)
    )
    return Costs(tuple(layers), hidden * (1 if scorer else int(config["vocab_size"])))


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Return elements of the four matrices, and the width of scores and values, with grouped keys and values."""
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    wide = int(config.get("head_dim") or hidden // heads)
    return 2 * hidden * wide * (heads + groups), heads * wide, heads * wide


def _latent_attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with keys and values unfolded as in training."""
    heads, rank = int(config["num_attention_heads"]), int(config["kv_lora_rank"])
    turned, value = int(config["qk_rope_head_dim"]), int(config["v_head_dim"])
    query = int(config["qk_nope_head_dim"]) + turned
    narrow = config.get("q_lora_rank")
    asked = int(narrow) * (hidden + heads * query) if narrow else hidden * heads * query
    kept = hidden * (rank + turned) + rank * heads * (query - turned + value)
    return asked + kept + heads * value * hidden, heads * query, heads * value


def _feed_forward(config: Mapping[str, Any], hidden: int, number: int) -> int:
    """Return elements that a token uses in the feed-forward part of layer `number`."""
    family = FAMILIES[str((config.get("text_config") or config).get("model_type"))]
    if family == "moe" and _is_sparse(config, number):
        return _experts(config, hidden)
    return (2 if family == "plain" else 3) * hidden * int(config["intermediate_size"])


def _is_sparse(config: Mapping[str, Any], number: int) -> bool:
    """Whether the layer is a mixture: `decoder_sparse_step` and `mlp_only_layers` of Qwen, `first_k_dense_replace` of
    DeepSeek; otherwise all layers.
    """
    if number < int(config.get("first_k_dense_replace") or 0) or number in (config.get("mlp_only_layers") or ()):
        return False
    return (number + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _experts(config: Mapping[str, Any], hidden: int) -> int:
    """Return elements of router, active and shared experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(int(config[name]) for name in names if config.get(name))
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) * inner
    gate = 0
    if shared_size := int(config.get("shared_expert_intermediate_size") or 0):
        shared, gate = shared_size, hidden
    active = int(config["num_experts_per_tok"]) * inner
    return hidden * experts + 3 * hidden * (active + shared) + gate


def _windows(config: Mapping[str, Any], count: int) -> list[int]:
    """Return the window of every layer, 0 for full attention.

    Raises:
        ValueError: a layer uses another kind of attention.
    """
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    kinds = config.get("layer_types")
    if not kinds:
        return [window] * count
    if odd := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"the operations of layers of type {', '.join(sorted(odd))} are not known")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
