"""What a forward pass of a model costs in floating-point operations, from the numbers of its config.json.

Pure. Guarantees:
1. counted is what the model must do, whatever the kernels do: products with weights (2 operations per element and
   token) and attention's scores and sums (2 each per pair of tokens, head and dimension). Norms, rotations, softmax,
   embedding look-ups and recomputed activations count nothing;
2. attention is causal, within one sample, within its window: `t` keys for the t-th token, at most the window. Work
   between samples of one packed row does not exist. This is about half of the convention of PaLM (arXiv 2204.02311,
   appendix B: 12 L H Q T per token and step), which counts the scores that causality masks;
3. of a mixture's experts the active ones count, of the head the tokens that are predicted;
4. a backward pass costs twice its forward pass (`TRAINING`: both together are 3 forward passes), once the products with
   weights that are frozen; LoRA's own products (rank / width of the rest) count nothing;
5. an architecture that is not in `FAMILIES` is a ValueError, never a guess. Those that are agree with
   `torch.utils.flop_counter` on tiny models.

Example: Qwen2.5-0.5B (24 layers of 14,909,440 elements, tied head of 151,936 x 896), one sample of 100 tokens, 40 of
them predicted: 2 * 357,826,560 * 100 + 2 * 136,134,656 * 40 + 24 * 4 * 14 * 64 * 5050 = 8.29e10 operations forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Forward and backward pass, in forward passes.
TRAINING = 3

#: What stands in the feed-forward part, by `model_type`: gated (three matrices), plain (two), moe (see `_experts`).
FAMILIES: dict[str, str] = {
    "llama": "gated", "mistral": "gated", "qwen2": "gated", "qwen3": "gated", "gemma": "gated", "gemma2": "gated",
    "gemma3_text": "gated", "phi3": "gated", "glm4": "gated", "granite": "gated", "olmo2": "gated", "olmo3": "gated",
    "smollm3": "gated", "cohere": "gated",
    "gpt_neox": "plain", "starcoder2": "plain", "phi": "plain",
    "mixtral": "moe", "qwen2_moe": "moe", "qwen3_moe": "moe", "olmoe": "moe", "gpt_oss": "moe", "glm4_moe": "moe",
    "deepseek_v3": "moe",
}  # fmt: skip


class Layer(NamedTuple):
    """One layer: elements of the matrices that a token passes; heads * dimension of scores and of values; window."""

    weights: int
    scores: int
    values: int
    window: int = 0  # keys that a token sees, itself included; 0: all before it


class Costs(NamedTuple):
    """A model. `head`: elements of the output head."""

    layers: tuple[Layer, ...]
    head: int

    @property
    def weights(self) -> int:
        """Elements that a predicted token passes: the active parameters without embeddings and norms."""
        return self.head + sum(layer.weights for layer in self.layers)

    def forward(self, lengths: Sequence[int], *, predicted: int) -> int:
        """Operations of one forward pass over samples of these lengths, `predicted` tokens of which pass the head."""
        sizes = list(lengths)
        tokens = sum(sizes)
        pairs = {
            window: sum(attention_pairs(size, window) for size in sizes)
            for window in {one.window for one in self.layers}
        }
        attention = sum(2 * (one.scores + one.values) * pairs[one.window] for one in self.layers)
        return attention + self._products(tokens, predicted)

    def training(self, lengths: Sequence[int], *, predicted: int, frozen: bool = False) -> int:
        """Operations of a forward and a backward pass; `frozen`: no weight has a gradient, as below LoRA's adapters."""
        whole = TRAINING * self.forward(lengths, predicted=predicted)
        return whole - frozen * self._products(sum(lengths), predicted)

    def _products(self, tokens: int, predicted: int) -> int:
        """Of one forward pass with all weights."""
        return 2 * sum(one.weights for one in self.layers) * tokens + 2 * self.head * predicted


def attention_pairs(length: int, window: int = 0) -> int:
    """Pairs of a token and a key that it sees, in a causal sample: `sum(min(t, window) for t in 1..length)`.

    >>> attention_pairs(4), attention_pairs(4, 2)
    (10, 7)
    """
    inside = min(length, window) if window else length
    return inside * (inside + 1) // 2 + (length - inside) * inside


def model_costs(config: Mapping[str, Any], *, scorer: bool = False) -> Costs:
    """The costs of a model by its config.json (as `PretrainedConfig.to_dict` gives it, a text model's or with one).

    `scorer`: with a head of one number in the place of the vocabulary.

    Raises:
        ValueError: the architecture, or a kind of layer in it, is not known here.
    """
    config = config.get("text_config") or config
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"the operations of model_type {kind!r} are not known")
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
    """Heads with grouped keys and values: elements of the four matrices, and the width of scores and values."""
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    wide = int(config.get("head_dim") or hidden // heads)
    return 2 * hidden * wide * (heads + groups), heads * wide, heads * wide


def _latent_attention(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), keys and values unfolded as in training."""
    heads, rank = int(config["num_attention_heads"]), int(config["kv_lora_rank"])
    turned, value = int(config["qk_rope_head_dim"]), int(config["v_head_dim"])
    query = int(config["qk_nope_head_dim"]) + turned
    narrow = config.get("q_lora_rank")
    asked = int(narrow) * (hidden + heads * query) if narrow else hidden * heads * query
    kept = hidden * (rank + turned) + rank * heads * (query - turned + value)
    return asked + kept + heads * value * hidden, heads * query, heads * value


def _feed_forward(config: Mapping[str, Any], hidden: int, number: int) -> int:
    """Elements that a token passes in the feed-forward part of layer `number`."""
    family = FAMILIES[str((config.get("text_config") or config).get("model_type"))]
    if family == "moe" and _is_sparse(config, number):
        return _experts(config, hidden)
    return (2 if family == "plain" else 3) * hidden * int(config["intermediate_size"])


def _is_sparse(config: Mapping[str, Any], number: int) -> bool:
    """Whether the layer is a mixture: `decoder_sparse_step` and `mlp_only_layers` of Qwen, `first_k_dense_replace` of
    DeepSeek; all layers elsewhere."""
    if number < int(config.get("first_k_dense_replace") or 0) or number in (config.get("mlp_only_layers") or ()):
        return False
    return (number + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _experts(config: Mapping[str, Any], hidden: int) -> int:
    """Router, active experts and shared ones."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(int(config[name]) for name in names if config.get(name))
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) * inner
    gate = 0
    if of_qwen := int(config.get("shared_expert_intermediate_size") or 0):
        shared, gate = of_qwen, hidden
    active = int(config["num_experts_per_tok"]) * inner
    return hidden * experts + 3 * hidden * (active + shared) + gate


def _windows(config: Mapping[str, Any], count: int) -> list[int]:
    """The window of every layer, 0 for full attention.

    Raises:
        ValueError: a layer attends in another way.
    """
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    kinds = config.get("layer_types")
    if not kinds:
        return [window] * count
    if odd := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"the operations of layers of type {', '.join(sorted(odd))} are not known")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
