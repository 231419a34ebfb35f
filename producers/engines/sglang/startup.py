"""Checks whether an SGLang server fits a run, before anything is generated, and checks requests.

Every refusal is `config.conflict` with the argument of the server to change, except a missing address and another
model. Guarantees:
1. a server with wrong token versions is refused: with overlap scheduling SGLang pauses in place while a step is under
   way, and labels the token of that step with the new weights. `recompute` retracts running requests, which takes the
   step's result in first;
2. a server that would serve K/V of one salt to another is refused: three requests probe that.
"""

from __future__ import annotations

import socket
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncrl.config import Config
from asyncrl.engine import GenRequest
from asyncrl.errors import ConfigError, HandshakeError, WorkError
from producers.engines.group_sender import GroupSender
from producers.engines.http import HttpClient
from producers.engines.model_files import weights_dtype
from producers.engines.request_checks import request_problem
from producers.engines.sglang.control_api import CALL_S, ServerFacts, answer_as
from producers.engines.sglang.responses import Answer

PROBE_PAGES = 4  # of the prefix cache
PROBE_TOKENS = 32  # at least


def server_url(config: Config) -> str:
    """The address of this producer's server. Raises `config.missing`."""
    urls = config.producers.url
    if len(urls) != 1:
        what = "the address of the server is missing" if not urls else "one server per producer process"
        raise ConfigError("config.missing", what, where="producers.url", remedy='set it to ["http://host:30000"]')
    return urls[0]


def address_towards(url: str) -> str:
    """The address of this host on the way to the server."""
    parts = urlsplit(url)
    try:
        place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(place[0], socket.SOCK_DGRAM) as probe:
            probe.connect(place[4])  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError("config.network", f"{url}: {error}", where="producers.url") from None


def make_group(config: Config, name: str, *, workers: int, url: str) -> GroupSender:
    """The process group that weights are sent in."""
    backend = {"cuda": "nccl", "npu": "hccl"}.get(config.producers.device.partition(":")[0], "gloo")
    return GroupSender(
        name,
        workers=workers,
        backend=backend,
        host=address_towards(url),
        timeout_s=config.weightsync.timeout_s,
        device=config.producers.device if backend != "gloo" else "",
    )


def check_server(found: ServerFacts, config: Config, *, architecture: str, where: str) -> None:
    """Raise `config.conflict` if its arguments contradict the run, `handshake.mismatch` for another model."""
    name = weights_dtype(config)
    longest = config.data.max_prompt_tokens + config.longest_response
    problems = [
        (found.dp_size != 1 or found.pp_size != 1, f"dp_size = {found.dp_size}, pp_size = {found.pp_size}: weights go "
         "to tensor-parallel workers of one replica", "start one server per producer, without --dp-size and --pp-size"),
        (found.dtype not in (name, "auto"), f"its dtype is {found.dtype}, the run's is {name}",
         f"start it with --dtype {name}"),
        (found.max_req_input_len + 1 < longest, f"it takes {found.max_req_input_len} tokens, data.max_prompt_tokens + "
         f"max_new_tokens = {longest}", "start it with a larger --context-length"),
        (config.producers.kv_at_swap == "keep" and not found.disable_overlap_schedule,
         "with overlap scheduling a pause in place leaves a step under way, whose tokens get the label of the new "
         "weights", 'start it with --disable-overlap-schedule, or set producers.kv_at_swap = "recompute"'),
    ]  # fmt: skip
    for wrong, what, remedy in problems:
        if wrong:
            raise ConfigError("config.conflict", f"SGLang {found.version}: {what}", where=where, remedy=remedy)
    own = _architecture(config)
    if architecture and own and architecture != own:
        raise HandshakeError("handshake.mismatch", f"it serves {architecture}, model.path is {own}", where=where)


def _architecture(config: Config) -> str:
    shape: Any = msgspec.json.decode((Path(config.model.path) / "config.json").read_bytes())
    named = shape.get("architectures") or [""]
    return str(named[0])


async def check_prefixes(client: HttpClient, found: ServerFacts, *, vocab: int) -> None:
    """Probe that a prompt with one salt is not served from K/V of another."""
    length = min(max(PROBE_TOKENS, PROBE_PAGES * found.page_size) + 1, found.max_req_input_len - 1)
    prompt = [(7 * place + 3) % max(vocab, 1) for place in range(length)] if vocab else [1] * length
    cached = []
    own = uuid.uuid4().hex  # an earlier producer may have left probes in the cache
    for salt in (f"{own}/1", f"{own}/1", f"{own}/2"):
        body = {
            "input_ids": prompt,
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": salt,
            "cache_salt": salt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        }
        answer: Answer = answer_as(await client.post("/generate", body, timeout_s=CALL_S), Answer, client.url)
        cached.append(answer.meta_info.cached_tokens)
    if cached[2] and not found.disable_radix_cache:
        raise ConfigError(
            "config.conflict",
            f"SGLang {found.version}: {cached[2]} of {length} prompt tokens came from the prefix "
            "cache of another salt: after new weights prompts would meet K/V of the old ones",
            where=client.url,
            remedy="start it with --disable-radix-cache",
        )


def check_request(
    request: GenRequest, config: Config, *, vocab: int, taken: bool, version: int, images: bool = False
) -> None:
    """Raise `sample.invalid` for an unsupported request; `taken`: its id is in use, `images`: the model sees them."""
    problem = request_problem(request, config, vocab=vocab, taken=taken, version=version, images=images)
    if not problem and request.top_k == 1 and request.temperature != 1:
        problem = f"top_k = 1 at temperature {request.temperature:g}: SGLang's log-probs are of temperature 1 then"
    if problem:
        raise WorkError("sample.invalid", problem, where=request.id)
