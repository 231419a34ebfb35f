"""Where Hugging Face tensors lie in Megatron-core's parameters: every element once, both ways, in every layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl import config
from asyncrl.config.rules import learner
from asyncrl.errors import AsyncRLError, ConfigError, ConfigErrors
from learners.backends.megatron.checkpoint import Store, host_shard, pieces
from learners.backends.megatron.families import Experts, Facts, Latent, read_facts
from learners.backends.megatron.mapping import (
    check_layout,
    find_holder,
    intersect,
    merge_parts,
    rank_buffers,
    rank_parameters,
    slices,
    stage_layers,
    tensor_shapes,
    tensor_sources,
    translate,
)
from learners.backends.megatron.model import stages_text
from learners.backends.megatron.weights import assemble
from learners.gang.topology import Topology
from weightsync.plan.buckets import volume

MODELS = {
    "qwen3": Facts(4, 8, 8, 4, 4, 12, 13, tied=True, qk_norm=True),
    "qwen2": Facts(4, 8, 8, 4, 2, 12, 13, qkv_bias=True),
    "llama": Facts(4, 8, 4, 4, 2, 12, 16),
    "mixtral": Facts(4, 8, 4, 4, 2, 12, 16, experts=Experts(4, 2, 12)),
    "deepseek": Facts(
        4, 8, 4, 4, 6, 12, 16,
        experts=Experts(4, 2, 8, dense=(0, 2), shared=16, groups=2, bias=True), latent=Latent(6, 5, 4, 2, 3),
    ),
}  # fmt: skip
PLACES = [
    (1, 1, 1),
    (2, 1, 1),
    (4, 1, 1),
    (1, 2, 1),
    (1, 4, 2),
    (2, 2, 1),
    (2, 2, 2),
    (4, 2, 1),
    (1, 1, 4, 2),
    (2, 1, 2, 4),
    (2, 2, 2, 2),
]  # tensor, stages, shares, expert places
every_model = pytest.mark.parametrize("name", sorted(MODELS))
every_place = pytest.mark.parametrize("place", PLACES, ids=str)


def topology(place: tuple[int, ...], rank: int = 0) -> Topology:
    tensor, pipeline, shares, expert = (*place, 1)[:4]
    return Topology(rank, tensor * pipeline * shares, tensor=tensor, pipeline=pipeline, expert=expert)


def weights(facts: Facts) -> dict[str, torch.Tensor]:
    """Every element of every tensor is another number."""
    made, start = {}, 1
    for name, shape in tensor_shapes(facts).items():
        made[name] = torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).view(shape)
        start += made[name].numel()
    return made


def parameters(facts: Facts, place: Topology, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        local.name: assemble(local, lambda part: start[part.name][slices(part.box)])
        for local in rank_parameters(facts, place)
    }


@every_model
@every_place
def test_every_element_comes_in_and_goes_out_once(name: str, place: tuple[int, ...]) -> None:
    """The parts of all ranks cover every element exactly once."""
    facts, start = MODELS[name], weights(MODELS[name])
    shapes = tensor_shapes(facts)
    every = topology(place)
    held = {rank: parameters(facts, every.peer(rank), start) for rank in range(every.size)}
    sources = tensor_sources(facts, every)
    assert list(sources) == list(shapes)
    for tensor, parts in sources.items():
        found, times = torch.zeros(shapes[tensor]), torch.zeros(shapes[tensor], dtype=torch.int64)
        for one in parts:
            found[slices(one.part.box)] = held[one.rank][one.parameter][slices(one.part.local)]
            times[slices(one.part.box)] += 1
        assert bool((times == 1).all()) and torch.equal(found, start[tensor]), tensor


@every_model
def test_only_padding_of_the_vocabulary_is_left_free(name: str) -> None:
    facts, start = MODELS[name], weights(MODELS[name])
    for rank in range(4):
        for local in rank_parameters(facts, topology((4, 1, 1), rank)):
            whole = assemble(local, lambda part: start[part.name][slices(part.box)])
            free = int((whole == 0).sum())
            assert free == whole.numel() - sum(volume(part.box) for part in local.parts)
            padded = 3 * facts.hidden if facts.vocab == 13 and rank == 3 and local.shape[0] == 4 else 0
            if "embedding" in local.name or "output_layer" in local.name:
                assert free == padded
            else:
                assert free == 0


def test_biases_of_routers_are_of_the_sparse_layers() -> None:
    assert [one.parts[0].name for one in rank_buffers(MODELS["deepseek"], topology((1, 2, 1), 1))] == [
        "model.layers.3.mlp.gate.e_score_correction_bias"
    ]
    assert not rank_buffers(MODELS["mixtral"], topology((1, 1, 1)))


def test_query_key_and_value_heads_interleave_by_group() -> None:
    """The example of the module, and what a file gets of it."""
    facts = Facts(1, 16, 4, 2, 8, 16, 16)
    local = next(
        one for one in rank_parameters(facts, topology((2, 1, 1), 1)) if one.name.endswith("linear_qkv.weight")
    )
    said = [(part.name.split(".")[-2], part.box[0], part.local[0]) for part in local.parts]
    assert said == [("q_proj", (16, 32), (0, 16)), ("k_proj", (8, 16), (16, 24)), ("v_proj", (8, 16), (24, 32))]
    wide = next(one for one in rank_parameters(facts, topology((1, 1, 1))) if one.name.endswith("linear_qkv.weight"))
    assert [(name.split(".")[-2], box[0]) for name, box, _ in merge_parts(wide)] == [
        ("q_proj", (0, 32)),
        ("k_proj", (0, 16)),
        ("v_proj", (0, 16)),
    ]


def test_stages_may_have_unequal_numbers_of_layers() -> None:
    facts = MODELS["qwen3"]._replace(layers=5)
    places = [topology((1, 3, 2), rank) for rank in (0, 2, 4)]
    assert [list(stage_layers(facts, place)) for place in places] == [[0, 1], [2, 3], [4]]
    assert stages_text(facts, topology((2, 3, 2))) == "Ett|tt|tL" and stages_text(facts, topology((1, 5, 1))) is None


def test_fused_norms_have_other_names_and_the_same_parts() -> None:
    facts = MODELS["qwen3"]
    plain, fused = rank_parameters(facts, topology((1, 1, 1))), rank_parameters(facts, topology((1, 1, 1)), fused=True)
    assert [one.parts for one in plain] == [one.parts for one in fused]
    moved = {one.name for one in fused} - {one.name for one in plain}
    assert "decoder.layers.3.mlp.linear_fc1.layer_norm_weight" in moved and len(moved) == 8


NAMES = json.loads((Path(__file__).parent / "mbridge_names.json").read_text())  # of mbridge 0.15.1, Apache-2.0
BRIDGED = MODELS | {
    "qwen3": MODELS["qwen3"]._replace(tied=False),
    "qwen3_moe": MODELS["mixtral"]._replace(qk_norm=True),
    "deepseek_v3": MODELS["deepseek"],
}


@pytest.mark.parametrize("family", NAMES)
def test_names_of_transformer_engines_layers_are_those_of_mbridge(family: str) -> None:
    """They are built on GPUs alone. Experts have one name in transformers and many in the files."""

    def blank(name: str) -> str:
        return re.sub(r"(layers\.|experts\.|weight)\d+", r"\1{}", name)

    def in_transformers(name: str) -> str:
        name = name.replace("block_sparse_moe", "mlp")
        name = re.sub(r"experts\.\{\}\.(gate_proj|up_proj|w1|w3)\.weight", "experts.gate_up_proj", name)
        return re.sub(r"experts\.\{\}\.(down_proj|w2)\.weight", "experts.down_proj", name)

    facts, place = BRIDGED[family], topology((1, 1, 1))
    ours = {
        blank(local.name): {blank(part.name) for part in local.parts}
        for local in (*rank_parameters(facts, place, fused=True), *rank_buffers(facts, place))
    }
    assert ours == {name: set(map(in_transformers, theirs)) for name, theirs in NAMES[family].items()}


@every_model
@pytest.mark.parametrize(
    "places",
    [((2, 2, 1), (1, 1, 1)), ((1, 1, 1), (4, 2, 1)), ((4, 1, 1), (2, 2, 2)), ((2, 1, 2, 4), (1, 2, 2, 2))],
    ids=str,
)
def test_a_checkpoint_goes_from_any_layout_to_any_other(name: str, places: Any, tmp_path: Any) -> None:
    facts, start = MODELS[name], weights(MODELS[name])
    writer, reader = topology(places[0]), topology(places[1])
    for rank in range(writer.size):
        boxes = []
        for local in rank_parameters(facts, writer.peer(rank)):
            if not local.copy and find_holder(local, writer.peer(rank))[0] == 0:
                whole = parameters(facts, writer.peer(rank), start)[local.name]
                boxes += pieces(local, {"model": whole, "exp_avg": -whole})
        steps = {f"step/{tensor}": torch.tensor(7.0) for tensor in start}
        host_shard(boxes, rank=rank, extra={"cpu": torch.tensor([rank])}, steps=steps).save(tmp_path)
    store = Store(tmp_path)
    for rank in range(reader.size):
        wanted = parameters(facts, reader.peer(rank), start)
        for local in rank_parameters(facts, reader.peer(rank)):
            assert assemble(local, lambda part: store.read("model", part)).equal(wanted[local.name])
            assert assemble(local, lambda part: store.read("exp_avg", part)).equal(-wanted[local.name])
    assert store.step("model.norm.weight") == 7.0
    assert store.extra(rank=0, ranks=writer.size)["cpu"].tolist() == [0]
    assert store.extra(rank=0, ranks=writer.size + 1) == {}
    store.close()
    (tmp_path / "shard_00000.safetensors").unlink()
    with pytest.raises(AsyncRLError, match="are not in") as caught:
        short = Store(tmp_path)
        for rank in range(reader.size):
            for local in rank_parameters(facts, reader.peer(rank)):
                assemble(local, lambda part: short.read("model", part))
    assert caught.value.code == "learner.checkpoint"


def test_a_damaged_file_is_said(tmp_path: Any) -> None:
    (tmp_path / "shard_00000.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(AsyncRLError) as caught:
        Store(tmp_path)
    assert caught.value.code == "learner.checkpoint"


def test_boxes() -> None:
    assert intersect(((0, 4), (2, 6)), ((3, 8), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 8),)) is None
    assert translate(((3, 4), (2, 3)), ((0, 4), (2, 6)), ((10, 14), (0, 4))) == ((13, 14), (0, 1))


JSON = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def test_facts_of_a_config() -> None:
    assert read_facts(JSON) == Facts(4, 64, 4, 2, 32, 96, 100, tied=True, qk_norm=True)
    bare = {**JSON, "model_type": "llama", "num_key_value_heads": None, "head_dim": None}
    assert read_facts(bare) == Facts(4, 64, 4, 4, 16, 96, 100, tied=True)
    gemma = {name: value for name, value in JSON.items() if name != "tie_word_embeddings"} | {"model_type": "gemma"}
    assert read_facts(gemma) == Facts(4, 64, 4, 2, 32, 96, 100, tied=True, gemma=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt_oss"}, "builds llama, qwen2, qwen3"),
        ({"model_type": "mixtral", "sliding_window": 64}, "sliding_window = 64"),
        ({"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}, "topk_group = 2"),
        ({"model_type": "deepseek_v3", "norm_topk_prob": False}, "norm_topk_prob"),
        ({"model_type": "deepseek_v3", "rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gemma", "hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "bidirectional"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic"}}, "dynamic"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_facts({**JSON, **change})


DEEPSEEK = JSON | {
    "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def test_facts_of_experts() -> None:
    facts = read_facts(DEEPSEEK)
    assert facts.latent == Latent(0, 16, 8, 4, 8, scale=(40.0, 1.0))
    assert facts.experts == Experts(
        8, 4, 24, dense=(0,), shared=48, groups=4, chosen_groups=2, sigmoid=True, scale=2.5, bias=True, float32=True
    )
    found = read_facts(JSON | {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False,
    }).experts  # fmt: skip
    assert found == Experts(8, 2, 24, dense=(0, 2, 3), normalised=False)


def test_experts_are_whole_on_the_ranks_of_their_place() -> None:
    """4 ranks, tensor = 2: expert places alternate, and so do the holders of the same expert."""
    facts = MODELS["mixtral"]
    ranks = [topology((2, 1, 2, 2), rank) for rank in range(4)]
    held = [[one for one in rank_parameters(facts, place) if one.expert] for place in ranks]
    first = [[part.box[0] for part in one[0].parts] for one in held]
    assert first == [[(0, 1), (0, 1)], [(2, 3), (2, 3)]] * 2 and held[0][0].shape == (24, 8)
    assert [find_holder(one[0], place) for one, place in zip(held, ranks, strict=True)] == [(0, 2)] * 2 + [(1, 2)] * 2


@pytest.mark.parametrize(("place", "says"), [((4, 1, 1), "num_key_value_heads = 2"), ((1, 5, 1), "num_hidden_layers")])
def test_a_model_that_does_not_divide_is_refused(place: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_layout(read_facts(JSON), topology(place))
    check_layout(read_facts(JSON), topology((2, 2, 1)))


@pytest.mark.parametrize(("place", "says"), [((1, 1, 3, 3), "8 experts do not divide"), ((8, 1, 1), "shared experts")])
def test_experts_that_do_not_divide_are_refused(place: tuple[int, ...], says: str) -> None:
    facts = read_facts(DEEPSEEK | {"num_attention_heads": 8, "n_shared_experts": 1, "moe_intermediate_size": 20})
    with pytest.raises(ConfigError, match=says):
        check_layout(facts, topology(place))


# ---------------------------------------------------------------- settings


TOML = """
model.path = "m"
data.source = "a:b"
learner.backend = "megatron"
learner.ranks = 4
[[reward]]
function = "a:b"
"""


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("model.dtype=float16", "bfloat16"),
        ("learner.cpu_offload=true", "cpu_offload"),
        ("learner.optim.name=muon", "no muon"),
        ("learner.compile=true", "compile"),
        ("learner.critic.name=muon", "adamw alone"),
        ("learner.algorithm.advantage=prime", "process"),
        ("learner.megatron.sequence_parallel=true", "tensor is 1"),
        ("learner.parallel.replicate=2", "cannot split so"),
        ("learner.parallel.sequence=2", "cannot split so"),
    ],
)
def test_settings_that_the_backend_does_not_do_are_refused(extra: str, says: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        config.parse(TOML, overrides=[extra])
    assert any(says in error.message + error.remedy for error in caught.value.errors), caught.value.errors
    with_fsdp2 = ["learner.backend=fsdp2", extra]
    if "parallel" not in extra and "prime" not in extra:
        assert config.parse(TOML, overrides=with_fsdp2).learner.backend == "fsdp2"


def test_there_are_layers_enough_and_inner_widths_divide() -> None:
    made = config.parse(TOML, overrides=["learner.parallel.tensor=2", "learner.parallel.pipeline=2"])
    model = {**JSON, "num_hidden_layers": 1, "intermediate_size": 95}
    said = [message for _, message, *_ in learner.model_problems(made, model)]
    assert len(said) == 2 and "num_hidden_layers = 1" in "".join(said) and "intermediate_size = 95" in "".join(said)
    assert not list(learner.model_problems(made, JSON))
    said = [message for _, message, *_ in learner.model_problems(made, DEEPSEEK)]
    assert len(said) == 1 and "learner.megatron.sequence_parallel = true alone" in said[0]
    split = ["learner.parallel.tensor=2", "learner.megatron.sequence_parallel=true"]
    assert not list(learner.model_problems(config.parse(TOML, overrides=split), DEEPSEEK))
    wide = DEEPSEEK | {"moe_intermediate_size": 25}
    assert [m for _, m, *_ in learner.model_problems(config.parse(TOML, overrides=split), wide)] == [
        "learner.parallel.tensor = 2: moe_intermediate_size = 25 of the model does not divide by it"
    ]
    whole = config.parse(TOML, overrides=[*split, "learner.parallel.expert=4"])
    assert not list(learner.model_problems(whole, wide))
