"""Operations of a model by its config: against sums by hand and against PyTorch's own counter on tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from learners.profiling.flops import FAMILIES, TRAINING, Costs, attention_pairs, model_costs

QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
SHARED = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "gpt_neox": {"num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_moe": EXPERTS | {"head_dim": 16, "decoder_sparse_step": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "glm4_moe": SHARED | {"head_dim": 16},
    "deepseek_v3": SHARED | {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                             "v_head_dim": 10, "num_key_value_heads": 4},
}  # fmt: skip
TOKENS = 12


def tiny(family: str) -> tuple[Any, Any]:
    """A model of the family with random weights, and its costs."""
    config = AutoConfig.for_model(family, **(TINY | OWN.get(family, {})))
    config._experts_implementation = "eager"  # products of the active experts alone, as the counter can see them
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager"), model_costs(config.to_dict())


def counted(model: Any, *, backward: bool = False) -> int:
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def unmasked(costs: Costs) -> int:
    """One forward pass where attention computes the scores that it masks away, as eager attention does."""
    body = sum(2 * one.weights * TOKENS + 2 * (one.scores + one.values) * TOKENS**2 for one in costs.layers)
    return body + 2 * costs.head * TOKENS


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_known_family_agrees_with_pytorchs_counter(family: str) -> None:
    model, costs = tiny(family)
    assert counted(model) == unmasked(costs)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_training_is_three_forward_passes(family: str) -> None:
    model, costs = tiny(family)
    assert counted(model, backward=True) == TRAINING * unmasked(costs)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_frozen_weights_have_no_gradient_to_pay_for(family: str) -> None:
    """As below adapters: everything passes a gradient on, no weight takes one."""
    model, costs = tiny(family)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    products = costs.training([TOKENS], predicted=TOKENS) - costs.training([TOKENS], predicted=TOKENS, frozen=True)
    assert products == 2 * costs.weights * TOKENS
    assert counted(model, backward=True) == TRAINING * unmasked(costs) - products


def test_a_dense_model_by_hand() -> None:
    costs = model_costs(QWEN_05B)
    layer = 896 * 896 + 2 * 896 * 128 + 896 * 896 + 3 * 896 * 4864  # query, keys and values, output, three matrices
    assert layer == 14_909_440 and {one.weights for one in costs.layers} == {layer} and len(costs.layers) == 24
    assert costs.head == 151_936 * 896  # tied: the head's product is made although it has no weights of its own
    assert costs.weights == 493_961_216
    body, head, attention = 2 * 357_826_560 * 100, 2 * 136_134_656 * 40, 24 * 4 * 14 * 64 * 5050
    assert costs.forward([100], predicted=40) == body + head + attention == 82_890_465_280


def test_of_a_mixture_the_active_experts_count() -> None:
    costs = model_costs(QWEN_30B_A3B)
    attention = 2048 * 128 * (32 + 4 + 4 + 32)
    assert costs.layers[0].weights == attention + 2048 * 128 + 8 * 3 * 2048 * 768
    assert 3.0e9 < costs.weights < 3.1e9  # with the embeddings 3.3e9: the "A3B" of its name
    assert model_costs(QWEN_30B_A3B | {"num_experts_per_tok": 4}).weights < costs.weights


def test_packed_samples_pay_for_their_own_pairs_alone() -> None:
    costs = model_costs(QWEN_05B)
    one, three = costs.forward([300], predicted=30), costs.forward([100, 100, 100], predicted=30)
    assert one - three == 24 * 4 * 14 * 64 * (300 * 301 // 2 - 3 * 5050)
    assert costs.forward([], predicted=0) == 0


@pytest.mark.parametrize(("length", "window"), [(1, 0), (7, 0), (7, 3), (7, 7), (7, 9), (0, 3)])
def test_pairs_are_those_of_the_mask(length: int, window: int) -> None:
    places = torch.arange(length)
    apart = places[:, None] - places[None]
    seen = (apart >= 0) & (apart < (window or length + 1))
    assert attention_pairs(length, window) == int(seen.sum())


def test_windows_are_taken_layer_by_layer() -> None:
    kinds = ["sliding_attention", "full_attention"] * 12
    costs = model_costs(QWEN_05B | {"use_sliding_window": True, "sliding_window": 64, "layer_types": kinds})
    assert [one.window for one in costs.layers] == [64, 0] * 12
    less = model_costs(QWEN_05B).forward([200], predicted=1) - costs.forward([200], predicted=1)
    assert less == 12 * 4 * 14 * 64 * (attention_pairs(200) - attention_pairs(200, 64))
    assert {one.window for one in model_costs(QWEN_05B).layers} == {0}  # use_sliding_window = false


def test_a_scorer_has_a_head_of_one_number() -> None:
    assert model_costs(QWEN_05B, scorer=True).head == 896


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="'mamba2'"):
        model_costs({"model_type": "mamba2"})
    with pytest.raises(ValueError, match="linear_attention"):
        model_costs(QWEN_05B | {"layer_types": ["linear_attention"] * 24})
    assert model_costs({"model_type": "a_pair_of_eyes", "text_config": QWEN_05B}) == model_costs(QWEN_05B)
