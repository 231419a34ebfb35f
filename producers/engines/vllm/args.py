"""Settings of the vllm engine: from the configuration to vLLM's `AsyncEngineArgs`.

Guarantees:
1. `arguments` is pure: a name that vLLM does not have is refused here, with the nearest one;
2. settings that asyncrl needs (`OURS`) cannot be set in `[producers.engine_args]`; all others can, and override the
   defaults;
3. on a CPU prompts are computed whole: vLLM draws a token at the end of each piece of a prompt and rolls it back, which
   the random numbers of a CPU cannot ("CPU Generator does not use offset"): its engine dies of a request with a seed;
4. log-probs are those of the full softmax after temperature: `choose_logprobs_mode` gives vLLM's nearest mode,
   `logprobs_problem` the reason if none fits (while the workers' sampler is not changed).
Only `engine_argument_names` and the command import vLLM.

Example: `slots = 64`, `max_prompt_tokens = 64`, `max_new_tokens = 112` become `max_num_seqs = 64`,
`max_model_len = 176`; on a CPU also `enforce_eager` and room for K/V of 64 samples of that length.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config, SamplingConfig
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.images.model_inputs import open_inputs
from producers.engines.model_files import weights_dtype
from producers.engines.vllm.images import engine_arguments

TABLE = "producers.engine_args"
#: Arguments with a meaning for the run, with the setting that they follow from.
OURS = {
    "model": "model.path", "dtype": "producers.dtype", "max_num_seqs": "producers.slots",
    "max_model_len": "data.max_prompt_tokens + max_new_tokens", "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "the engine itself", "worker_extension_cls": "the engine itself",
    "logprobs_mode": "the engine itself", "max_logprobs": "the engine itself", "generation_config": "the engine itself",
    "data_parallel_size": "producers.count", "enable_lora": "the engine itself",
}  # fmt: skip
KV_BLOCK = 128  # tokens of a block of K/V on a CPU
LEAST_KV_BYTES = 64 << 20
UNKNOWN_KV_BYTES = 1 << 30  # if the shape cannot be read
MOST_KV_SHARE = 0.4  # of the free memory
LEAST_BATCHED_TOKENS = 2048
CHUNKED = "enable_chunked_prefill"


def choose_logprobs_mode(sampling: SamplingConfig) -> str:
    """vLLM's `logprobs_mode` nearest to the full softmax after temperature for the requests of this run."""
    return "raw_logprobs" if cuts(sampling) else "processed_logprobs"


def cuts(sampling: SamplingConfig) -> str:
    """The setting that restricts the drawn tokens; empty without one."""
    chosen = {
        "top_p": sampling.top_p < 1,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0,
        "greedy_baseline": sampling.greedy_baseline,
    }
    return next((name for name, on in chosen.items() if on), "")


def logprobs_problem(sampling: SamplingConfig) -> AsyncRLError | None:
    """Why no mode of vLLM gives the full softmax after temperature for this run (`config.conflict`)."""
    what = cuts(sampling)
    if not what or sampling.temperature == 1:
        return None
    return ConfigError(
        "config.conflict",
        f"this vLLM cannot record log-probs of the full softmax with sampling.{what} and "
        f"sampling.temperature = {sampling.temperature:g}: its raw ones are before the temperature, its processed ones "
        "after the cut",
        where="sampling",
        remedy="set sampling.temperature = 1, or no restriction; or engine = hf",
    )


def arguments(config: Config, *, known: Collection[str], cpu: bool, free_bytes: int = 1 << 62) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`, without the weight transfer configuration, which is an object.

    `known` are the argument names of this vLLM; `free_bytes` is the free memory of a CPU host.

    Raises:
        ConfigError: `config.unknown_key`, `config.conflict`.
    """
    given = dict(config.producers.engine_args)
    for error in problems(given, known):
        raise error
    producers = config.producers
    longest = config.data.max_prompt_tokens + config.longest_response
    made: dict[str, Any] = {
        "model": config.model.path, "trust_remote_code": config.model.trust_remote_code,
        "dtype": weights_dtype(config),
        "max_num_seqs": producers.slots, "max_model_len": longest, "generation_config": "vllm", "max_logprobs": 1,
        "disable_log_stats": True, "enable_log_requests": False,
        "scheduling_policy": "priority", "logprobs_mode": choose_logprobs_mode(config.sampling),
        "worker_extension_cls": "producers.engines.vllm.weight_transfer.HeldWeights",
    }  # fmt: skip
    made |= engine_arguments(open_inputs(config))
    if config.cluster.devices == "turns" and not cpu:  # on a CPU a sleeping vLLM keeps its memory
        made["enable_sleep_mode"] = True
    if cpu:
        if given.get(CHUNKED):
            what = f"vLLM on a CPU dies where it computes the prompt of a seeded request in pieces ({CHUNKED})"
            raise ConfigError("config.conflict", what, where=f"{TABLE}.{CHUNKED}", remedy="leave it out")
        made |= {
            "enforce_eager": True,
            "max_num_batched_tokens": max(LEAST_BATCHED_TOKENS, longest, producers.slots),
            CHUNKED: False,
        }
        if not {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"} & set(given):
            made["kv_cache_memory_bytes"] = kv_bytes(
                config, item_bytes=4 if made["dtype"] == "float32" else 2, free_bytes=free_bytes
            )
    return {name: value for name, value in made.items() if name in known} | given


def problems(given: dict[str, Any], known: Collection[str]) -> Iterator[AsyncRLError]:
    """Problems of `[producers.engine_args]`, by names alone."""
    for name in given:
        where = f"{TABLE}.{name}"
        if name in OURS:
            yield ConfigError(
                "config.conflict", f"{name} cannot be set here: it follows from {OURS[name]}", where=where
            )
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield ConfigError("config.unknown_key", f"vLLM has no engine argument {name!r}{hint}", where=where)


def kv_bytes(config: Config, *, item_bytes: int, free_bytes: int) -> int:
    """K/V of all slots at full length on a CPU, in whole blocks, at most `MOST_KV_SHARE` of the free memory."""
    try:
        shape = msgspec.json.decode((Path(config.model.path) / "config.json").read_bytes())
        shape = shape.get("text_config", shape)
        heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        per_token = int(2 * shape["num_hidden_layers"] * heads * width * item_bytes)
    except (OSError, KeyError, TypeError, *UNREADABLE):
        return min(UNKNOWN_KV_BYTES, int(MOST_KV_SHARE * free_bytes))
    longest = config.data.max_prompt_tokens + config.longest_response
    blocks = config.producers.slots * -(-longest // KV_BLOCK) + 2  # one is vLLM's own
    return max(LEAST_KV_BYTES, min(blocks * KV_BLOCK * per_token, int(MOST_KV_SHARE * free_bytes)))


def engine_argument_names() -> set[str]:
    """The names of this vLLM's engine arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {item.name for item in dataclasses.fields(AsyncEngineArgs)}


def main() -> int:
    """Read a resolved configuration; print the problems of its engine arguments, [code, message, where] per line."""
    from asyncrl.config import parse

    config = parse(sys.stdin.read())
    for error in problems(dict(config.producers.engine_args), engine_argument_names()):
        print(msgspec.json.encode((error.code, error.message, error.where)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
