"""Tiny models of many families, for the tests of the hf engine. `CASES`: model type -> how the engine decodes it, and
what makes it tiny. What they have in common stands in `COMMON`; windows and chunks are of 16 tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB, WINDOW = 40, 16
SLOTS, CACHES, REFUSED = "slots", "caches", "refused"
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


class Case(NamedTuple):
    """`way`: slots, caches or refused. `what`: of what kind of layers, for the table of the documentation."""

    way: str
    what: str
    settings: dict[str, Any]


_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_OLD = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
_HALF_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}


def _mixed(kind: str, other: str = "full_attention") -> dict[str, Any]:
    return {"layer_types": [kind, other] * 2}


CASES: dict[str, Case] = {
    "llama": Case(SLOTS, "full attention", {}),
    "qwen3": Case(SLOTS, "full attention", {}),
    "gpt2": Case(SLOTS, "full attention, learned positions", _OLD),
    "gpt_neox": Case(SLOTS, "full attention", {}),
    "opt": Case(SLOTS, "full attention, learned positions", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mpt": Case(SLOTS, "full attention, ALiBi", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    "gemma": Case(SLOTS, "full attention", {}),
    "phi": Case(SLOTS, "full attention", {}),
    "olmo2": Case(SLOTS, "full attention", {}),
    "glm4": Case(SLOTS, "full attention", {}),
    "smollm3": Case(SLOTS, "full attention, some layers without positions", {}),
    "granite": Case(SLOTS, "full attention", {}),
    "mistral": Case(SLOTS, "sliding window", {"sliding_window": WINDOW}),
    "phi3": Case(SLOTS, "sliding window", {"sliding_window": WINDOW}),
    "qwen2": Case(
        SLOTS, "full, and a window behind max_window_layers",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "gemma2": Case(SLOTS, "full and sliding, capped scores", {"sliding_window": WINDOW}),
    "gemma3_text": Case(SLOTS, "full and sliding", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "olmo3": Case(SLOTS, "full and sliding", {"sliding_window": WINDOW}),
    "cohere2": Case(SLOTS, "full and sliding", {"sliding_window": WINDOW}),
    "gemma3n_text": Case(
        SLOTS, "full and sliding, K and V shared between layers",
        _HALF_SLIDING | {
            "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
            "num_kv_shared_layers": 2, "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
        },
    ),
    "llama4_text": Case(
        SLOTS, "full and chunked, mixture of experts",
        _mixed("chunked_attention") | {
            "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64, "moe_layers": [1],
        },
    ),
    "gpt_oss": Case(SLOTS, "full and sliding, sinks, mixture of experts", _HALF_SLIDING | {"num_local_experts": 4}),
    "qwen3_moe": Case(SLOTS, "full attention, mixture of experts", _EXPERTS),
    "mixtral": Case(SLOTS, "full attention, mixture of experts", {"num_local_experts": 4}),
    "deepseek_v2": Case(SLOTS, "latent attention (MLA), mixture of experts", _MLA),
    "deepseek_v3": Case(SLOTS, "latent attention (MLA), mixture of experts", _MLA),
    "deepseek_v32": Case(
        CACHES, "latent attention with an indexer, mixture of experts",
        _MLA | {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "bloom": Case(CACHES, "full attention, ALiBi made of the padding mask", {"n_head": 4, "n_layer": 2}),
    "qwen3_next": Case(
        CACHES, "gated delta net and full, mixture of experts",
        _mixed("linear_attention") | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    "falcon_h1": Case(
        CACHES, "Mamba-2 beside attention in every layer", _MAMBA2 | {"mamba_d_ssm": 64, "num_hidden_layers": 2}
    ),
    "granitemoehybrid": Case(
        CACHES, "Mamba-2 and full, mixture of experts",
        _mixed("mamba", "attention") | _MAMBA2 | {"num_local_experts": 2, "shared_intermediate_size": 16},
    ),
    "jamba": Case(
        CACHES, "Mamba and full, mixture of experts",
        {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 8},
    ),
    "lfm2": Case(CACHES, "short convolutions and full", _mixed("conv")),
    "nemotron_h": Case(
        CACHES, "Mamba-2, full, and layers that are an MLP alone",
        {"layers_block_type": ["mamba", "attention", "mlp", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
         "ssm_state_size": 8, "n_groups": 1},
    ),
    "mamba": Case(CACHES, "Mamba alone", {"state_size": 4}),
    "mamba2": Case(
        CACHES, "Mamba-2 alone",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    ),
    "recurrent_gemma": Case(
        REFUSED, "recurrent states that stand in the model, not in a cache",
        {"lru_width": 32, "attention_window_size": WINDOW, "block_types": ("recurrent", "attention")},
    ),
    "rwkv": Case(REFUSED, "recurrent states in a list of its own", {"attention_hidden_size": 32}),
    "t5": Case(REFUSED, "an encoder-decoder", {}),
    "gemma3": Case(REFUSED, "takes images", {}),
}  # fmt: skip


def config_of(kind: str) -> Any:
    """The configuration of a tiny model of that type."""
    return CONFIG_MAPPING[kind](**{**COMMON, **CASES[kind].settings})


def model_of(kind: str, *, seed: int) -> PreTrainedModel:
    """A random one, as the engine loads it: "sdpa" where the model can."""
    shape = config_of(kind)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
        except ValueError:
            model = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
    return model.requires_grad_(False).eval()
