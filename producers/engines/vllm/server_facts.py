"""Inspects a vLLM server before it gets weights; refusals contain the command that starts a suitable one.

Guarantees:
1. nothing is assumed: developer routes, the worker extension and the backend of `weight_transfer`, the model's shape
   and dtype, the longest sample, the recorded log-probs, and whether its workers read this host's files are all queried
   or tested;
2. an unsuitable server is `handshake.mismatch` or `config.conflict`, with the command that starts a suitable one.

Example: the log-prob of the likeliest token is requested with `top_k = 1`, at temperature 1 and 0.5: 0 and 0 are
"processed" ones (after the cut), equal ones below 0 "raw" (before the temperature), a larger second one is of the full
softmax after temperature.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.errors import UNREADABLE, ConfigError, HandshakeError, WorkError
from producers.engines.http import HttpClient
from producers.engines.model_files import weights_dtype
from producers.engines.staged_weights import PREFIX, SHARED_MEMORY
from producers.engines.vllm.args import CHUNKED

CALL_S = 60.0
#: Fields of a model's configuration that must agree.
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --worker-extension-cls "
    'producers.engines.vllm.weight_transfer.HeldWeights --weight-transfer-config \'{"backend": "asyncrl"}\', asyncrl '
    "installed in its environment"
)


class ServerFacts(msgspec.Struct, frozen=True):
    """A suitable server. `logprobs` is full, raw or processed; its workers can read the files in `folders`."""

    workers: int
    device: str
    max_samples: int
    kv_tokens: int
    priority: bool
    logprobs: str
    folders: tuple[Path, ...]


class _Model(msgspec.Struct):
    shape: dict[str, int | str | bool]
    dtype: str
    device: str


async def rpc(client: HttpClient, method: str, *args: str, timeout_s: float = CALL_S) -> list[Any]:
    """The answers of all workers to a call of the worker extension."""
    body = {"method": method, "args": list(args), "timeout": timeout_s}
    answer = await client.post("/collective_rpc", body, timeout_s=timeout_s)
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or not results:
        raise WorkError("engine.broken", f"{method}: no answer of any worker", where=client.url)
    return results


async def inspect(client: HttpClient, config: Config) -> ServerFacts:
    """All facts. Raises ConfigError or HandshakeError on an unsuitable server, WorkError without an answer."""
    settings = await _settings(client)
    try:
        model, cache = settings["model_config"], settings["cache_config"]
        scheduler, parallel = settings["scheduler_config"], settings["parallel_config"]
        longest = int(model["max_model_len"])
        max_samples, policy = int(scheduler["max_num_seqs"]), str(scheduler["policy"])
        kv_tokens, parts = int(cache.get("kv_cache_size_tokens") or 0), int(parallel["data_parallel_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise WorkError("engine.broken", f"/server_info lacks {error}", where=client.url) from None
    if parts != 1:
        what = f"{client.url} serves with data parallelism {parts}: its parts could not be updated as one"
        raise ConfigError("config.conflict", what, where="producers.url", remedy="one server per part")
    needed = config.data.max_prompt_tokens + config.longest_response
    if longest < needed:
        raise ConfigError(
            "config.conflict",
            f"{client.url}: its max_model_len = {longest} is below data.max_prompt_tokens + max_new_tokens = {needed}",
            where="producers.url",
            remedy=f"start it with --max-model-len {needed}",
        )
    workers = await _same_model(client, config)
    if workers[0].device == "cpu" and scheduler.get(CHUNKED):
        what = f"{client.url} computes prompts in pieces: on a CPU it dies where one is of a request with a seed"
        raise ConfigError(
            "config.conflict", what, where="producers.url", remedy="start it with --no-enable-chunked-prefill"
        )
    return ServerFacts(
        len(workers),
        workers[0].device,
        max_samples,
        kv_tokens,
        policy == "priority",
        await _logprobs(client),
        await _shared_folders(client, (SHARED_MEMORY, config.run_dir / "scratch")),
    )


async def _settings(client: HttpClient) -> dict[str, Any]:
    try:
        answer = await client.get("/server_info", params={"config_format": "json"}, timeout_s=CALL_S)
        settings = answer["vllm_config"]
        if not isinstance(settings, dict):
            raise TypeError("vllm_config")
    except WorkError as error:
        if getattr(error, "status", 0) not in (404, 405):
            raise
        raise ConfigError(
            "config.conflict",
            f"{client.url} has no developer routes: weights could not be updated",
            where="producers.url",
            remedy=START,
        ) from None
    except (KeyError, TypeError) as error:
        raise WorkError("engine.broken", f"/server_info is no vLLM's: {error}", where=client.url) from None
    backend = (settings.get("weight_transfer_config") or {}).get("backend")
    if backend != "asyncrl":
        raise ConfigError(
            "config.conflict",
            f"{client.url} takes weights by {backend or 'nothing'}, not by asyncrl",
            where="producers.url",
            remedy=START,
        )
    return settings


async def _same_model(client: HttpClient, config: Config) -> list[_Model]:
    """The models of the workers, if they are this one."""
    try:
        workers = msgspec.convert(await rpc(client, "asyncrl_model"), list[_Model])
    except (WorkError, *UNREADABLE) as error:
        raise ConfigError(
            "config.conflict",
            f"{client.url}: its workers lack the extension of asyncrl ({error})",
            where="producers.url",
            remedy=START,
        ) from None
    mine = msgspec.json.decode((Path(config.model.path) / "config.json").read_bytes())
    mine = mine.get("text_config", mine)
    dtype = weights_dtype(config)
    for worker in workers:
        differ = [
            f"{key} {worker.shape[key]} there, {mine[key]} here"
            for key in SHAPE
            if key in mine and key in worker.shape and mine[key] != worker.shape[key]
        ]
        if worker.dtype != dtype:
            differ.append(f"dtype {worker.dtype} there, {dtype} here")
        if differ:
            raise HandshakeError(
                "handshake.mismatch", f"{client.url} serves another model: {'; '.join(differ)}", where="producers.url"
            )
    return workers


async def _logprobs(client: HttpClient) -> str:
    """Enable the full softmax, and test with two requests what is recorded."""
    with contextlib.suppress(WorkError):  # an older extension; tested below
        await rpc(client, "asyncrl_full_softmax")
    await client.post("/resume", timeout_s=CALL_S)  # an earlier client may have died in a pause
    plain, sharp = [await _likeliest(client, temperature) for temperature in (1.0, 0.5)]
    if plain == sharp == 0.0:
        return "processed"
    return "full" if sharp > plain else "raw"


async def _likeliest(client: HttpClient, temperature: float) -> float:
    body = {
        "token_ids": [1],
        "cache_salt": secrets.token_hex(8),
        "sampling_params": {
            "temperature": temperature,
            "top_k": 1,
            "max_tokens": 1,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        },
    }
    try:
        answer = await client.post("/inference/v1/generate", body, timeout_s=CALL_S)
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])
    except WorkError as error:
        if getattr(error, "status", 0) not in (404, 405):
            raise
        raise ConfigError(
            "config.conflict", f"{client.url} has no /inference/v1/generate", where="producers.url", remedy=START
        ) from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise WorkError("engine.broken", f"no log-prob in its answer: {error}", where=client.url) from None


async def _shared_folders(client: HttpClient, folders: Sequence[Path]) -> tuple[Path, ...]:
    """The folders whose files every worker can read."""
    seen = []
    for folder in folders:
        token = secrets.token_hex(16)
        path = folder / f"{PREFIX}{os.getuid()}-{os.getpid()}-token-{token[:8]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(token)
            if set(await rpc(client, "asyncrl_token", str(path))) == {token}:
                seen.append(folder)
        except OSError:
            continue
        finally:
            path.unlink(missing_ok=True)
    return tuple(seen)
