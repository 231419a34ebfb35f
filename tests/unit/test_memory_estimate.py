"""The estimate of memory: parameters against the model classes, parts against sums by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vision_models import vision_folder

from asyncrl.config import Config, parse
from asyncrl.preflight.machine import Machine, find_missing, look_at_machine
from asyncrl.preflight.memory import RoleMemory, estimate, format_bytes
from asyncrl.preflight.model_shape import model_shape
from asyncrl.process_plan.plan import TARGETS

GIB = 1 << 30
QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
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
OWN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_moe": EXPERTS | {"head_dim": 16, "decoder_sparse_step": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def made(**settings: object) -> Config:
    values = {"model.path": '"m"', "data.path": '"d.jsonl"', "reward": '[{function = "x:y"}]', **settings}
    return parse("", overrides=[f"{key}={value}" for key, value in values.items()])


def parts(config: Config, role: str, place: str, model: dict[str, Any], *, accelerator: bool = True) -> dict[str, int]:
    [one] = [
        one
        for one in estimate(config, model, TARGETS["all"], accelerator=accelerator)
        if (one.role, one.place) == (role, place)
    ]
    assert one.total_bytes == sum(part.bytes for part in one.parts)
    return {part.name: part.bytes for part in one.parts}


@pytest.mark.parametrize("kind", OWN)
def test_parameters_are_those_of_the_model_classes(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **TINY | OWN[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    exact = sum(parameter.numel() for parameter in model.parameters())
    shape = model_shape(config.to_dict())
    assert shape is not None and abs(shape.parameters - exact) <= 0.02 * exact, (shape.parameters, exact)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_models_that_see_images_count_tower_and_projector(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = vision_folder(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    seen = {name: size for name, size in sizes.items() if ".visual." in name}
    joined = sum(size for name, size in seen.items() if "merger" in name)
    values = json.loads((folder / "config.json").read_text())
    shape = model_shape(values)
    assert shape is not None and shape.parameters == pytest.approx(sum(sizes.values()), rel=0.02)
    assert shape.tower == pytest.approx(sum(seen.values()) - joined, rel=0.03)
    assert shape.projector == pytest.approx(joined, rel=0.03)
    whole = parts(made(), "learner", "device", values)
    frozen = parts(made(**{"learner.vision.tower": "false"}), "learner", "device", values)
    assert whole["weights"] == frozen["weights"]
    assert whole["gradients"] - frozen["gradients"] == 4 * shape.tower


def test_the_example_of_the_module() -> None:
    shape = model_shape(QWEN_05B)
    assert shape is not None and round(shape.parameters / 1e6) == 494
    config = made(**{"learner.ranks": 4, "learner.packing": "true"})
    held = parts(config, "learner", "device", QWEN_05B)
    assert abs(held["weights"] + held["gradients"] + held["optimizer"] - 1.84 * GIB) < 0.01 * GIB
    keys_values = parts(config, "producer", "device", QWEN_05B)["K/V"]
    assert keys_values == 64 * (1024 + 1024) * 24 * 2 * (2 * 64) * 2


def test_rows_beyond_the_heads_gather_keys_and_values() -> None:
    """Of the 2 heads of K/V each is whole on 2 of 4 ranks; the width of one head is 64, twice for K and V."""
    four = {"learner.ranks": 4, "learner.parallel.sequence": 4, "learner.gradient_checkpointing": "true"}
    found = parts(made(**four), "learner", "device", QWEN_05B)
    assert found["gathered keys and values"] == 2 * made().learner.micro_batch_tokens * 128 * 2
    for fewer in ({"learner.ranks": 2, "learner.parallel.sequence": 2}, {"learner.parallel.sequence": 1}):
        assert "gathered keys and values" not in parts(made(**(four | fewer)), "learner", "device", QWEN_05B)


def test_what_settings_change() -> None:
    plain = parts(made(), "learner", "device", QWEN_05B)
    assert (
        parts(made(**{"learner.gradient_checkpointing": "true"}), "learner", "device", QWEN_05B)["activations"]
        < 0.2 * plain["activations"]
    )
    assert parts(made(**{"learner.optim.name": '"adamw_8bit"'}), "learner", "device", QWEN_05B)["optimizer"] < (
        0.3 * plain["optimizer"]
    )
    adapters = parts(made(**{"learner.lora.rank": 8}), "learner", "device", QWEN_05B)
    assert 0.5 * plain["weights"] < adapters["weights"] < 0.52 * plain["weights"], "the base is in bfloat16"
    assert adapters["optimizer"] < 0.02 * plain["optimizer"]
    critic = parts(made(**{"learner.algorithm.advantage": '"gae"'}), "learner", "device", QWEN_05B)
    assert critic["critic"] == plain["weights"] + plain["gradients"] + plain["optimizer"]
    reference = parts(made(**{"learner.algorithm.kl.where": '"loss"'}), "learner", "device", QWEN_05B)
    assert reference["reference"] * 2 == plain["weights"]
    base = {"learner.lora.rank": 8, "learner.algorithm.kl.where": '"loss"'}
    assert "reference" not in parts(made(**base), "learner", "device", QWEN_05B), "it is the model without adapters"
    prime = {"learner.algorithm.advantage": '"prime"'}
    for more, count in (({}, 1), ({"learner.algorithm.kl.where": '"loss"', "sampling.temperature": 0.5}, 2)):
        found = parts(made(**prime, **more), "learner", "device", QWEN_05B)
        assert found["reference"] == count * reference["reference"]
    halved = parts(made(**{"learner.logprob_chunk_tokens": 512}), "learner", "device", QWEN_05B)
    assert plain["logits chunk"] - halved["logits chunk"] == 3 * 512 * 151936 * 4
    assert "weights to come" not in parts(made(**{"weightsync.in_place": "true"}), "producer", "device", QWEN_05B)
    held_out = {"evaluation.path": '"h"', "evaluation.samples": 4, "evaluation.lane": '"second_weights"'}
    usual, beside = (parts(made(**more), "producer", "device", QWEN_05B) for more in ({}, held_out))
    assert beside["measured weights"] == usual["weights"] and 2 * beside["held-out K/V"] == usual["K/V"]
    assert beside.keys() - usual.keys() == {"measured weights", "held-out K/V"}
    offloaded = made(**{"learner.cpu_offload": "true"})
    assert "optimizer" in parts(offloaded, "learner", "host", QWEN_05B)
    assert "optimizer" not in parts(offloaded, "learner", "device", QWEN_05B)
    assert "optimizer" in parts(made(), "learner", "host", QWEN_05B, accelerator=False)


def test_embeddings_are_shared_as_the_family_does() -> None:
    sizes = {key: value for key, value in QWEN_05B.items() if key not in ("tie_word_embeddings", "model_type")}
    gemma, llama = (model_shape({**sizes, "model_type": kind}) for kind in ("gemma", "llama"))
    assert gemma is not None and llama is not None
    assert llama.parameters - gemma.parameters == QWEN_05B["vocab_size"] * QWEN_05B["hidden_size"]


def test_an_unknown_model_is_not_guessed() -> None:
    assert model_shape({"model_type": "mamba", "hidden_size": 8}) is None
    assert estimate(made(), {}, TARGETS["all"], accelerator=False) == []


def test_what_the_machine_lacks() -> None:
    memory = estimate(made(**{"learner.ranks": 2}), QWEN_05B, TARGETS["all"], accelerator=True)
    small = Machine(2, GIB, {"cuda": 1, "npu": 0}, GIB, 1 << 20)
    said = " | ".join(find_missing(made(**{"learner.ranks": 2}), TARGETS["all"], small, memory))
    assert "2 ranks and 1 producer share 1 cuda device" in said
    assert "of host memory: this machine has 1.0 GiB" in said and "/dev/shm" in said and "for checkpoints" in said
    staged = 2 * 2 * 494_032_768  # two versions in half precision, whatever the number of ranks
    for ranks in (1, 2):
        found = estimate(made(**{"learner.ranks": ranks}), QWEN_05B, TARGETS["all"], accelerator=True)
        tight = Machine(64, 512 * GIB, {"cuda": 8, "npu": 0}, 900 * GIB, int(0.9 * staged))
        assert any("of /dev/shm" in text for text in find_missing(made(), TARGETS["all"], tight, found)), ranks
    large = Machine(64, 512 * GIB, {"cuda": 8, "npu": 0}, 900 * GIB, 256 * GIB)
    assert list(find_missing(made(), TARGETS["all"], large, memory)) == []
    wanted = made(**{"learner.device": '"npu"'})
    assert list(find_missing(wanted, TARGETS["all"], large, [])) == [
        "learner.device = 'npu': this machine shows no npu devices"
    ]


def test_files_of_engines_count_where_they_copy_the_weights() -> None:
    """By `auto` and `local` an engine of this host maps the learner's versions."""
    each = 2 * 2 * 494_032_768  # two versions in half precision
    room = Machine(64, 512 * GIB, {"cuda": 8, "npu": 0}, 900 * GIB, int(2.5 * each))
    for transport, engine, lacks in (
        ("auto", "vllm", False),
        ("direct", "vllm", False),
        ("stream", "vllm", True),
        ("stream", "hf", False),
    ):
        words = {"weightsync.transport": f'"{transport}"', "producers.engine": f'"{engine}"', "producers.count": 2}
        given = made(**words, **{"weightsync.in_place": "true"})
        memory = estimate(given, QWEN_05B, TARGETS["all"], accelerator=True)
        said = [text for text in find_missing(given, TARGETS["all"], room, memory) if "of /dev/shm" in text]
        assert len(said) == lacks, (transport, engine)
        assert not lacks or format_bytes(3 * each) in said[0]


def test_this_machine_is_read_from_files(tmp_path: Any) -> None:
    dev = tmp_path / "dev"
    (dev / "shm").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci0", "davinci_manager"):
        (dev / name).touch()
    (tmp_path / "meminfo").write_text("MemTotal:        1024 kB\nMemFree: 1 kB\n")
    machine = look_at_machine(tmp_path / "not" / "yet", dev=dev, meminfo=tmp_path / "meminfo")
    assert machine.devices == {"cuda": 2, "npu": 1} and machine.accelerator == "cuda"
    assert machine.memory_bytes == 1 << 20 and machine.disk_free_bytes > 0 and machine.cores >= 1


def test_sizes_are_shown_in_units() -> None:
    assert [format_bytes(size) for size in (10, 2048, 5 << 20, int(1.8 * GIB))] == ["10 B", "2 KiB", "5 MiB", "1.8 GiB"]
    assert RoleMemory("buffer", "host", 1, ()).total_bytes == 0


def test_a_reference_that_is_renewed_lies_in_the_checkpoints() -> None:
    rows = {"learner.mode": '"dpo"', "producers.engine": '"dataset"', "sampling.group_size": 2}
    sizes = [
        parts(made(**rows, **{"learner.preference.iteration": every}), "run folder", "disk", QWEN_05B)["checkpoints"]
        for every in (0, 4)
    ]
    assert sizes[1] == pytest.approx(sizes[0] * 16 / 12)


def test_an_engine_of_several_devices_splits_its_weights_and_stages_them_on_the_host() -> None:
    of_two = {"producers.engine": "vllm", "producers.engine_args.tensor_parallel_size": 2, "producers.count": 3}
    alone, split = (parts(made(**settings), "producer", "device", QWEN_05B) for settings in ({}, of_two))
    assert split["weights"] * 2 == alone["weights"] and split["K/V"] * 2 == alone["K/V"]
    assert "weights to come" in alone and "weights to come" not in split, "a file in host memory"
    assert parts(made(**of_two), "producer", "host", QWEN_05B)["weights to come"] == 2 * alone["weights"]
    counts = {
        (one.role, one.place): one.count for one in estimate(made(**of_two), QWEN_05B, TARGETS["all"], accelerator=True)
    }
    assert counts["producer", "device"] == 6 and counts["producer", "host"] == 3


def test_ranks_of_all_hosts_share_the_states() -> None:
    one, two = (made(**{"learner.ranks": 8, "cluster.learner_hosts": hosts}) for hosts in (1, 2))
    states = [parts(config, "learner", "device", QWEN_05B) for config in (one, two)]
    assert states[1]["optimizer"] * 2 == states[0]["optimizer"]
    assert states[1]["published tensors"] == 3 * 151936 * 896 * 2, "the embedding, in bfloat16, gathered on rank 0"
    assert "published tensors" not in states[0], "ranks of one host write their rows"


def test_quantised_matrices_take_a_byte_where_versions_wait() -> None:
    settings = {"learner.ranks": 2, "weightsync.encoding": "delta"}
    plain, small = (made(**settings, **more) for more in ({}, {"weightsync.dtype": "int8"}))
    embedding, every = 151936 * 896, model_shape(QWEN_05B).parameters  # type: ignore[union-attr]
    assert parts(plain, "learner", "host", QWEN_05B)["staged versions"] == every * 2
    sent = embedding * 2 + (every - embedding)
    assert parts(small, "learner", "host", QWEN_05B)["staged versions"] == sent
    assert parts(small, "producer", "host", QWEN_05B)["codes"] == 2 * sent
    assert "published tensors" in parts(small, "learner", "device", QWEN_05B), "gathered on rank 0"


def test_transport_direct_keeps_buckets_on_both_sides() -> None:
    direct = {"weightsync.transport": "direct", "weightsync.in_place": "true", "learner.ranks": 2}
    embedding = 151936 * 896 * 2  # in bfloat16: larger than a bucket
    large = direct | {"weightsync.bucket_bytes": 1 << 30}
    for settings, bucket in ((direct, embedding), (large, 1 << 30)):
        learner = parts(made(**settings), "learner", "device", QWEN_05B)
        assert learner["buckets"] == 3 * bucket and "published tensors" not in learner
        further = max(64 << 20, int(settings.get("weightsync.bucket_bytes", 0)))
        assert parts(made(**settings), "producer", "device", QWEN_05B)["buckets"] == 2 * bucket + further, "two send"
    of_two = direct | {"producers.engine": "vllm", "producers.engine_args.tensor_parallel_size": 2}
    worker = parts(made(**of_two), "producer", "device", QWEN_05B)
    assert worker["buckets"] == 3 * embedding + (64 << 20), "each worker receives whole buckets"
    assert worker["incomplete layers"] == embedding, "the largest unit"
    assert parts(made(**direct | {"learner.ranks": 1}), "learner", "device", QWEN_05B)["buckets"] == 3 * embedding
    assert "buckets" not in parts(made(), "learner", "device", QWEN_05B)
