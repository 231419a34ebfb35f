"""Settings of the vllm engine, and what of it needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from asyncrl.config import Config, dump, parse
from asyncrl.engine import GenRequest
from asyncrl.errors import AsyncRLError
from producers.engines.vllm.args import KV_BLOCK, LEAST_KV_BYTES, arguments, kv_bytes, logprobs_problem
from producers.engines.vllm.base import unfit_logprobs

KNOWN = {
    "model", "trust_remote_code", "dtype", "max_num_seqs", "max_model_len", "generation_config", "max_logprobs",
    "skip_tokenizer_init", "disable_log_stats", "enable_log_requests", "scheduling_policy", "logprobs_mode",
    "worker_extension_cls", "weight_transfer_config", "enforce_eager", "max_num_batched_tokens",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "tensor_parallel_size", "load_format",
    "enable_chunked_prefill",
}  # fmt: skip
SHAPE = {"num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}


def config_of(*, sampling: str = "", more: str = "", path: str = "nowhere") -> Config:
    return parse(f"""
[model]
path = "{path}"
dtype = "bfloat16"
[data]
path = "unused.jsonl"
max_prompt_tokens = 100
[sampling]
max_new_tokens = 28
{sampling}
[producers]
engine = "vllm"
slots = 16
{more}
[[reward]]
function = "unused:unused"
""")


def made(config: Config, **more: Any) -> dict[str, Any]:
    return arguments(config, known=KNOWN, **({"cpu": False} | more))


def test_settings_get_the_names_of_vllm() -> None:
    found = made(config_of())
    assert found["max_num_seqs"] == 16 and found["max_model_len"] == 128 and found["dtype"] == "bfloat16"
    assert found["scheduling_policy"] == "priority" and "enforce_eager" not in found
    assert made(config_of(more='dtype = "float16"'))["dtype"] == "float16"


def test_engine_args_win_and_survive_the_resolved_file() -> None:
    config = config_of(more="engine_args = { tensor_parallel_size = 2, scheduling_policy = 'fcfs' }")
    again = parse(dump(config))
    assert again.producers.engine_args == {"tensor_parallel_size": 2, "scheduling_policy": "fcfs"}
    found = made(again, cpu=True)
    assert found["tensor_parallel_size"] == 2 and found["scheduling_policy"] == "fcfs" and found["enforce_eager"]


def test_prompts_are_computed_whole_on_a_cpu() -> None:
    assert made(config_of(), cpu=True)["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in made(config_of())
    chunked = config_of(more="engine_args = { enable_chunked_prefill = true }")
    assert made(chunked)["enable_chunked_prefill"] is True
    with pytest.raises(AsyncRLError, match="dies where it computes the prompt") as caught:
        made(chunked, cpu=True)
    assert caught.value.code == "config.conflict"


def test_arguments_that_vllm_does_not_have_are_named_with_the_nearest() -> None:
    with pytest.raises(AsyncRLError, match="did you mean 'tensor_parallel_size'") as caught:
        made(config_of(more="engine_args = { tensor_paralel_size = 2 }"))
    assert caught.value.code == "config.unknown_key" and caught.value.where.endswith("tensor_paralel_size")
    with pytest.raises(AsyncRLError, match=r"follows from producers\.slots") as caught:
        made(config_of(more="engine_args = { max_num_seqs = 2 }"))
    assert caught.value.code == "config.conflict"


def test_an_older_vllm_is_not_given_what_it_lacks() -> None:
    found = arguments(config_of(), known=KNOWN - {"max_logprobs"}, cpu=False)
    assert "max_logprobs" not in found and "model" in found


def test_kv_on_a_cpu_is_that_of_all_slots_within_the_free_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config = config_of(path=str(tmp_path))
    per_token = 2 * 40 * 8 * 64 * 2
    assert kv_bytes(config, item_bytes=2, free_bytes=1 << 40) == (16 + 2) * KV_BLOCK * per_token
    assert kv_bytes(config, item_bytes=2, free_bytes=100 << 20) == LEAST_KV_BYTES
    assert made(config, cpu=True)["kv_cache_memory_bytes"] == (16 + 2) * KV_BLOCK * per_token
    own = made(config_of(path=str(tmp_path), more="engine_args = { gpu_memory_utilization = 0.2 }"), cpu=True)
    assert "kv_cache_memory_bytes" not in own
    assert kv_bytes(config_of(), item_bytes=2, free_bytes=1 << 40) == 1 << 30


@pytest.mark.parametrize(
    ("sampling", "mode", "possible"),
    [
        ("", "processed_logprobs", True),
        ("temperature = 0.7", "processed_logprobs", True),
        ("top_p = 0.9", "raw_logprobs", True),
        ("min_p = 0.1", "raw_logprobs", True),
        ("greedy_baseline = true", "raw_logprobs", True),
        ("top_k = 20\ntemperature = 0.7", "raw_logprobs", False),
    ],
)
def test_the_logprobs_of_vllm_that_come_nearest(sampling: str, mode: str, possible: bool) -> None:
    config = config_of(sampling=sampling + '\ntruncation = "biased"')
    assert made(config)["logprobs_mode"] == mode
    problem = logprobs_problem(config.sampling)
    assert (problem is None) == possible
    assert problem is None or ("top_k" in problem.message and problem.code == "config.conflict")


def test_log_probs_of_evaluations_may_be_any() -> None:
    greedy = GenRequest("1:1", np.array([1], np.int32), (0,), 0, 4, top_k=1)
    warm = replace(greedy, top_k=0, temperature=0.7)
    assert "after the cut" in unfit_logprobs(greedy, "processed_logprobs")
    assert "before the temperature" in unfit_logprobs(warm, "raw_logprobs")
    for request, mode in ((greedy, "processed_logprobs"), (warm, "raw_logprobs")):
        assert unfit_logprobs(replace(request, trained=False), mode) == ""
