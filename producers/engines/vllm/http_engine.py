"""The vllm_http engine: a vLLM server behind a URL, used by its token and developer routes.

It needs no torch if the server reads this host's files. One producer per server (`producers.url`), which alone brings
weights there. Guarantees, besides those of `base`:
1. the server is inspected before it is used (`server_facts`); an unsuitable one is refused with the remedy;
2. weights come from the staged file if the server's workers can read it, else through a process group in which this
   process is rank 0 (`group_sender`);
3. before the end of a sample a delta has versions only if no commit happened since it was submitted; after one, the
   rest waits for the spans at the end;
4. every call has a deadline. A server that dies, is replaced by another, answers 5xx or garbage is `engine.broken`.
The developer routes have no authentication: the server must listen at a private address.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities, EngineHealth, PauseMode
from asyncrl.errors import AsyncRLError, ConfigError, WorkError
from asyncrl.images.model_inputs import open_inputs
from producers.engines.group_sender import GroupSender
from producers.engines.http import HttpClient, Refused
from producers.engines.served import sample_seed
from producers.engines.served_images import check_prompt, collapse, content_parts, encode_images
from producers.engines.staged_weights import StagedVersion, StagedWeights
from producers.engines.vllm.args import logprobs_problem
from producers.engines.vllm.base import (
    CALL_LIMIT_S,
    Sample,
    VLLMBase,
    join_digests,
    swap_limit_s,
    update_info,
)
from producers.engines.vllm.server_facts import ServerFacts, inspect, rpc

LOOK_EVERY_S = 2.0
LOOK_LIMIT_S = 30.0  # a server that is silent for longer is dead
MODES = {"raw": "raw_logprobs", "processed": "processed_logprobs"}


class VLLMHTTPEngine(VLLMBase):
    """Made by name with the resolved configuration: `find("asyncrl.engines", "vllm_http")(config)`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, tag=f"-{secrets.token_hex(4)}")
        if not config.producers.url:
            raise ConfigError(
                "config.missing", "engine vllm_http needs the address of its server", where="producers.url"
            )
        self._client: HttpClient | None = None
        self._server: ServerFacts | None = None
        self._group: GroupSender | None = None
        self._watching: asyncio.Task[None] | None = None
        self._kv_used = 0.0
        self._preempted = 0
        self._busy_s = 0.0

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Inspect the server; the version is -1 until the first update is committed."""
        self._images = open_inputs(self._config)
        self._client = HttpClient(self._config.producers.url[0])
        await self._wait_reachable()
        server = self._server = await inspect(self._client, self._config)
        self._full_softmax = server.logprobs == "full"
        self._logprobs_mode = MODES.get(server.logprobs, "")
        if not self._full_softmax and (problem := logprobs_problem(self._config.sampling)):
            raise problem
        if server.folders:
            self._staged = StagedWeights(server.folders[-1], folders=server.folders)
        await self._open_channel(server)
        self._watching = asyncio.create_task(self._watch())

    async def _wait_reachable(self) -> None:
        """Wait for the server, which may still load its model."""
        assert self._client is not None
        deadline = time.monotonic() + self._config.run.hang_timeout_s / 2
        while True:
            try:
                await self._client.get("/health", timeout_s=CALL_LIMIT_S)
                return
            except Refused:  # it answers
                return
            except WorkError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(LOOK_EVERY_S)

    async def _open_channel(self, server: ServerFacts) -> None:
        info: dict[str, Any] = {}
        init = asyncio.ensure_future(asyncio.sleep(0))
        if not server.folders:
            backend = self._config.weightsync.collective_backend
            backend = backend if backend != "auto" else "nccl" if server.device == "cuda" else "gloo"
            self._group = GroupSender(
                f"asyncrl-{secrets.token_hex(4)}",
                workers=server.workers,
                backend=backend,
                host=self._config.weightsync.collective_host,
                timeout_s=CALL_LIMIT_S,
            )
            port = await self._group.listen()
            info = {
                "group": self._group.name,
                "master_address": self._group.host,
                "master_port": port,
                "rank_offset": 1,
                "world_size": self._group.size,
                "backend": backend,
                "timeout_s": CALL_LIMIT_S,
            }
            init = asyncio.ensure_future(self._group.join())  # bounded: by timeout_s above
        try:
            # bounded: both have a limit of their own
            await asyncio.gather(
                init, self._post("/init_weight_transfer_engine", {"init_info": info}, timeout_s=2 * CALL_LIMIT_S)
            )
        finally:
            init.cancel()

    async def close(self, *, grace_s: float) -> None:
        """Drop the samples and leave the server running."""
        self._begin_close()
        self._forget(None)
        if self._watching is not None:
            self._watching.cancel()
        client, self._client = self._client, None
        group, self._group = self._group, None
        if client is not None:
            with suppress(AsyncRLError, TimeoutError):
                await asyncio.wait_for(client.post("/shutdown_weight_transfer_engine", timeout_s=grace_s), grace_s)
            await client.close()
        if group is not None:
            await group.close()
        self._staged.close()

    def health(self) -> EngineHealth:
        """A snapshot; any thread."""
        detail = self._failure.message if self._failure is not None else self._dead()
        samples, places = len(self._samples), self._server.max_samples if self._server is not None else 0
        running = min(samples, places)
        return EngineHealth(
            alive=not detail,
            version=self._version,
            running=running,
            waiting=samples - running,
            generated_tokens=self._generated,
            busy_s=self._busy_s,
            swap_s=self._swap_s,
            detail=detail,
            kv_used=self._kv_used,
            paused=self._paused,
            preempted=self._preempted,
        )

    def capabilities(self) -> EngineCapabilities:
        self._alive()
        assert self._server is not None
        return EngineCapabilities(
            "vllm_http",
            max_samples=self._server.max_samples,
            max_tokens=self._max_len,
            kv_tokens=self._server.kv_tokens,
            priority=self._server.priority,
            images=self._images is not None,
        )

    def _dead(self) -> str:
        return "the engine was not started" if self._client is None or self._server is None else ""

    async def _post(
        self, path: str, body: Any = None, *, params: Mapping[str, str] | None = None, timeout_s: float = CALL_LIMIT_S
    ) -> Any:
        """A call; its failure breaks the engine."""
        assert self._client is not None
        try:
            return await self._client.post(path, body, params=params, timeout_s=timeout_s)
        except WorkError as error:
            raise self._fail(f"{error.where or path}: {error.message}") from None

    async def _watch(self) -> None:
        """Check periodically that the server lives, and read its cache metrics."""
        assert self._client is not None
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._busy_s += LOOK_EVERY_S if self._samples and not self._paused else 0.0
            try:
                text = await self._client.get("/metrics", timeout_s=LOOK_LIMIT_S)
            except Refused:
                continue  # it lives, without metrics
            except WorkError as error:
                self._fail(f"the server does not answer: {error.message}")
                return
            self._kv_used = metric(str(text), "vllm:kv_cache_usage_perc")
            self._preempted = int(metric(str(text), "vllm:num_preemptions_total"))

    # ------------------------------------------------------------ samples

    async def _decode(self, sample: Sample) -> None:
        assert self._client is not None
        request = sample.request
        try:
            if request.images and self._images is not None:
                await asyncio.to_thread(encode_images, self._images, request)
            events = self._client.stream("/inference/v1/generate", self._body(sample), idle_s=self._idle_s)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if request.images and not sample.tokens and "error" not in event:
                        check_prompt(event.get("prompt_token_ids"), request.prompt_ids.tolist(), where=sample.name)
                    self._take_output(sample, event)
            if not sample.ended:
                self._fail(f"{sample.name}: the server ended the stream before the sample")
        except Refused as error:
            sample.outbox.put_nowait(
                WorkError("sample.invalid", f"the server refuses the request: {error.text}", where=sample.name)
            )
        except WorkError as error:
            if error.code == "sample.invalid":
                sample.outbox.put_nowait(error)
            else:
                self._fail(error.message)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            self._fail(f"{sample.name}: not a vLLM answer", error)

    @property
    def _idle_s(self) -> float:
        return self._config.run.hang_timeout_s  # a waiting sample is silent until it gets a place

    def _body(self, sample: Sample) -> dict[str, Any]:
        request, ids, more = sample.request, sample.request.prompt_ids.tolist(), {}
        if request.images and self._images is not None:
            ids = collapse(self._images, request, (), where=sample.name)
            more = {"content_parts": content_parts(request, self._labels.current), "return_token_ids": True}
        return {
            **more,
            "request_id": sample.name,
            "token_ids": ids,
            "stream": True,
            "cache_salt": self._labels.current,
            "priority": request.priority if self._server.priority else 0,  # type: ignore[union-attr]
            "sampling_params": {
                "n": 1,
                "seed": sample_seed(request.seed, sample.index),
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "min_p": request.min_p,
                "max_tokens": request.max_new_tokens,
                "stop_token_ids": list(request.stop_ids),
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": 0,
            },
        }

    def _take_output(self, sample: Sample, event: Any) -> None:
        if "error" in event:
            raise WorkError("engine.broken", f"the server reports {str(event['error'])[:300]}", where=sample.name)
        for choice in event.get("choices", ()):
            content = (choice.get("logprobs") or {}).get("content") or ()
            sample.take(
                [int(token) for token in choice.get("token_ids") or ()], [float(entry["logprob"]) for entry in content]
            )
            self._generated += len(content)
            if choice.get("finish_reason") is not None:
                spans = [
                    (str(span["version"]), int(span["start"]), int(span["end"]))
                    for span in choice.get("weight_versions") or ()
                ]
                self._finish(sample, spans, choice["finish_reason"])
            elif sample.is_due(len(sample.tokens)) and sample.label == self._labels.current:
                spans = [(sample.label, 0, len(sample.tokens))]
                sample.hand_on_runs(self._labels.runs(spans, len(sample.tokens), where=sample.name), "")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Decode nothing from now on; see `asyncrl.engine.Engine`."""
        self._alive()
        if mode == "abort":
            await self.abort(None)
        if mode == "wait":  # it takes as long as the longest sample
            limit_s = self._config.run.hang_timeout_s
            await self._post("/pause", params={"mode": "wait", "clear_cache": "false"}, timeout_s=limit_s)
        await self._post("/pause", params={"mode": "keep", "clear_cache": "false"})
        self._paused = True

    async def resume(self) -> None:
        self._alive()
        await self._post("/resume")
        self._paused = False

    # ------------------------------------------------------------ weights

    async def _swap(self, staged: StagedVersion, label: str) -> str:
        clear = "true" if self._recompute else "false"
        await self._post("/pause", params={"mode": "keep", "clear_cache": clear})
        await self._post("/start_weight_update")
        path = "" if self._group is not None else str(staged.path)
        info = {"update_info": update_info(staged.manifest, staged.tensors, path=path)}
        sending = asyncio.ensure_future(self._send(staged))
        try:
            # bounded: both have a limit of their own, and that of the commit ends it
            await asyncio.gather(sending, self._post("/update_weights", info, timeout_s=swap_limit_s(staged.manifest)))
        finally:
            sending.cancel()
        await self._post("/finish_weight_update", {"weight_version": label})
        assert self._client is not None
        held = await rpc(self._client, "asyncrl_held")
        digest = join_digests(held, buckets=len(staged.manifest.bucket_bytes))
        self._set_current(staged.manifest, label)
        if not self._paused:
            await self._post("/resume")
        return digest

    async def _send(self, staged: StagedVersion) -> None:
        """Send the buckets through the group, if there is one."""
        if self._group is not None:
            for number in range(len(staged.starts)):
                await self._group.send(staged.bucket(number))

    async def _checksums_now(self) -> Any:
        assert self._client is not None
        return await self._client.post("/weight_checker", {"action": "checksum"}, timeout_s=CALL_LIMIT_S)


def metric(text: str, name: str) -> float:
    """The sum of a metric's values in Prometheus' text form; 0 without it."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((f"{name} ", f"{name}{{")):
            with suppress(ValueError):
                total += float(line.rpartition(" ")[2])
    return total
