"""The vllm engine: AsyncLLM in this process, its workers in others, weights by vLLM's own transfer interface.

Guarantees:
1. tokens go in and come out as ids; a sample is one request with its own seed, so the same seed and index give the same
   tokens whatever else is decoded;
2. a version is staged in a file, or lies in a slot that is locked, while generation goes on (`staged_weights`); at the
   commit the engine is paused, the workers load it (`weight_transfer`), and it goes on: no step is between two
   versions;
3. token versions are the spans that vLLM reports, under unique labels; spans that do not cover the tokens are
   `engine.broken`;
4. no new request gets K/V of older weights: the prefix cache is salted with the label, and samples without a token are
   submitted again at a commit; with `kv_at_swap = "recompute"` the cache is emptied and K/V of samples under way is
   computed again;
5. log-probs are those of the full softmax after temperature, if the workers' sampler can record them
   (`samplers`); else a request with other settings is refused;
6. a death of vLLM, and any failure from the beginning of a commit on, is `engine.broken` in all current and later
   calls. The engine's processes end with this one, also if it is killed (`plugin`). `attest` compares vLLM's own
   checksums of its parameters with those after the commit; on a CPU vLLM packs linear layers, which the checksums do
   not cover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities, EngineHealth, PauseMode
from asyncrl.errors import ConfigError, WorkError
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.model_inputs import open_inputs
from asyncrl.runtime.host_facts import free_host_bytes
from asyncrl.wire import Instruction, Manifest, Tensor
from producers.engines.model_files import check_tensors
from producers.engines.served import sample_seed
from producers.engines.staged_weights import StagedVersion
from producers.engines.vllm.args import arguments, engine_argument_names, logprobs_problem
from producers.engines.vllm.base import (
    CALL_LIMIT_S,
    SWAP_LIMIT_S,
    Sample,
    VLLMBase,
    check_dtypes,
    join_digests,
    swap_limit_s,
    update_info,
)
from producers.engines.vllm.images import image_prompt
from producers.engines.vllm.lifecycle import end, engine_processes, prepare
from producers.engines.vllm.stats import Stats
from weightsync.transports.base import TransportError

WORKERS_SHARE = 0.8  # of a transfer's deadline; the rest is for vLLM's own calls


class VLLMSleeping:
    """`asyncrl.engine.Sleeping` by vLLM's sleep mode: weights wait in host memory, K and V are given up."""

    loads_asleep = False

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask

    async def sleep(self) -> None:
        await self._ask("vLLM does not sleep", lambda llm: llm.sleep(level=1), SWAP_LIMIT_S)

    async def wake(self) -> None:
        await self._ask("vLLM does not wake", lambda llm: llm.wake_up(), SWAP_LIMIT_S)


class VLLMEngine(VLLMBase):
    """Made by name with the resolved configuration: `find("asyncrl.engines", "vllm")(config)`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._llm: Any = None
        self._args: dict[str, Any] = {}
        self._children: list[int] = []
        self._stats = Stats()
        self._direct: Manifest | None = None  # received, and not committed
        self._torn = False  # the workers hold no version; generation is paused
        self.sleeping = VLLMSleeping(self._ask)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and start vLLM's processes; the version is -1 until the first update is committed.

        It runs on this thread: the kernel ends vLLM's processes with the thread that started them.
        """
        prepare(self._config)
        try:
            from vllm import AsyncEngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ConfigError("config.extra", f"engine vllm: {error}", where="producers.engine") from error
        from producers.engines.vllm.plugin import BACKEND

        self._images = open_inputs(self._config)
        self._args = arguments(
            self._config, known=engine_argument_names(), cpu=current_platform.is_cpu(), free_bytes=free_host_bytes()
        )
        self._logprobs_mode = self._args["logprobs_mode"]
        try:
            args = AsyncEngineArgs(**self._args, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
            settings = args.create_engine_config()
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError("config.type", f"vLLM refuses its arguments: {error}", where="producers") from error
        try:
            self._llm = AsyncLLM.from_vllm_config(settings, stat_loggers=[self._stats.logger], disable_log_stats=True)
            self._children = engine_processes()
            await self._wait(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={})))
            self._full_softmax = all(await self._wait(self._llm.collective_rpc("asyncrl_full_softmax")))
        except Exception as error:  # vLLM raises RuntimeError, ValueError and its own errors
            raise self._fail("vLLM did not start", error) from error
        if not self._full_softmax and (problem := logprobs_problem(self._config.sampling)):
            raise problem

    async def close(self, *, grace_s: float) -> None:
        """Stop decoding; samples under way end with an error. No process of vLLM is left."""
        self._begin_close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(end, llm, self._children, grace_s=grace_s)
        self._staged.close()

    def health(self) -> EngineHealth:
        """A snapshot; any thread."""
        stats, samples = self._stats, len(self._samples)
        detail = self._failure.message if self._failure is not None else self._dead()
        running = min(stats.running, samples)  # vLLM reports nothing while it is idle
        return EngineHealth(
            alive=not detail,
            version=-1 if self._torn else self._version,
            running=running,
            waiting=min(stats.waiting, samples - running),
            generated_tokens=self._generated,
            busy_s=stats.busy_s,
            swap_s=self._swap_s,
            detail=detail,
            kv_used=stats.kv_used,
            paused=self._paused,
            preempted=stats.preempted,
        )

    def capabilities(self) -> EngineCapabilities:
        self._alive()
        cache: Any = self._llm.vllm_config.cache_config
        return EngineCapabilities(
            "vllm",
            max_samples=int(self._args["max_num_seqs"]),
            max_tokens=self._max_len,
            kv_tokens=int(cache.kv_cache_size_tokens or 0),
            priority=self._args.get("scheduling_policy") == "priority",
            images=self._images is not None,
            in_place=self._config.weightsync.transport == "direct",
        )

    def _dead(self) -> str:
        if self._llm is None:
            return "the engine was not started"
        return "vLLM's engine process is dead" if self._llm.errored else ""

    async def _wait(self, call: Awaitable[Any], limit_s: float = CALL_LIMIT_S) -> Any:
        return await asyncio.wait_for(call, limit_s)

    async def _ask(self, what: str, call: Callable[[Any], Awaitable[Any]], limit_s: float = CALL_LIMIT_S) -> Any:
        """A call of vLLM; its failure breaks the engine."""
        self._alive()
        try:
            return await self._wait(call(self._llm), limit_s)
        except Exception as error:  # EngineDeadError and errors of workers
            raise self._fail(what, error) from error

    # ------------------------------------------------------------ samples

    async def _decode(self, sample: Sample) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt

        request = sample.request
        try:
            label = self._labels.current
            if request.images and self._images is not None:
                prompt = TokensPrompt(**image_prompt(self._images, request, label))  # type: ignore[typeddict-item]
            else:
                prompt = TokensPrompt(prompt_token_ids=request.prompt_ids.tolist(), cache_salt=label)
            outputs = self._llm.generate(prompt, _params(sample), sample.name, priority=request.priority)
            async with aclosing(outputs):
                async for output in outputs:
                    first = request.images and not sample.tokens
                    if first and list(output.prompt_token_ids or ()) != request.prompt_ids.tolist():
                        raise ValueError("it makes other tokens of the images than the learner")
                    self._take_output(sample, output.outputs[0])
        except (VLLMClientError, ValueError, ImageProblem) as error:
            sample.outbox.put_nowait(
                WorkError("sample.invalid", f"vLLM refuses the request: {error}", where=request.id)
            )
        except WorkError as error:
            self._fail(error.message)
        except Exception as error:  # EngineDeadError, EngineGenerateError, bugs: callers must not wait for this sample
            self._fail("vLLM failed", error)

    def _take_output(self, sample: Sample, part: Any) -> None:
        sample.take(part.token_ids, part.logprobs.logprobs if part.logprobs is not None else ())
        self._generated += len(part.token_ids)
        if part.finish_reason is not None:
            spans = [(span.version, span.start, span.end) for span in part.weight_versions or ()]
            self._finish(sample, spans, part.finish_reason)
        elif sample.is_due(len(sample.tokens)) and (spans := self._spans_so_far(sample)):
            sample.hand_on_runs(self._labels.runs(spans, len(sample.tokens), where=sample.name), "")

    def _spans_so_far(self, sample: Sample) -> list[tuple[str, int, int]]:
        """vLLM's spans of a sample that has not ended; empty if this vLLM lacks them (then there is one delta).

        They are compared with the spans at the end of the sample.
        """
        count, processor = len(sample.tokens), self._llm.output_processor
        names = getattr(processor, "external_req_ids", {}).get(sample.name, ())
        state = getattr(processor, "request_states", {}).get(names[0]) if names else None
        starts = getattr(state, "weight_version_starts", None)
        if not starts:
            return []
        ends = [start for _, start in starts[1:]] + [count]
        spans = [(label, start, min(end, count)) for (label, start), end in zip(starts, ends, strict=True)]
        return [span for span in spans if span[1] < count]

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Decode nothing from now on; see `asyncrl.engine.Engine`."""
        if mode == "abort":
            await self.abort(None)
        if mode == "wait":  # it takes as long as the longest sample
            limit_s = self._config.run.hang_timeout_s
            await self._ask("pause", lambda llm: llm.pause_generation(mode="wait", clear_cache=False), limit_s)
        await self._ask("pause", lambda llm: llm.pause_generation(mode="keep", clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        await self._ask("resume", lambda llm: llm.resume_generation())
        self._paused = False

    # ------------------------------------------------------------ weights

    async def _swap(self, staged: StagedVersion, label: str) -> str:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        await llm.pause_generation(mode="keep", clear_cache=self._recompute)
        await llm.start_weight_update()
        info = update_info(staged.manifest, staged.tensors, path=str(staged.path))
        await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await llm.finish_weight_update(label)
        held = await llm.collective_rpc("asyncrl_held")
        digest = join_digests(held, buckets=len(staged.manifest.bucket_bytes))
        self._torn = False
        self._set_current(staged.manifest, label)
        if not self._paused:
            await llm.resume_generation()
        return digest

    async def receive_update(self, instruction: Instruction, tensors: Sequence[Tensor]) -> None:
        """See `asyncrl.engine.Receiving`: the workers are members of the group. Raises `sync.failed` if one of them got
        a version not whole; the engine stands still then."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        manifest = instruction.manifest
        assert manifest is not None
        self._alive()
        check_tensors(self._facts, tensors)
        check_dtypes(tensors, self._dtype)
        await self.abort_update()
        order = msgspec.structs.replace(instruction, tensors=(), deadline_s=instruction.deadline_s * WORKERS_SHARE)
        info = update_info(manifest, tensors, instruction=msgspec.msgpack.encode(order).hex())
        llm, self._torn = self._llm, True
        try:
            await llm.pause_generation(mode="keep", clear_cache=self._recompute)
            await llm.start_weight_update()
            self._direct = manifest
            await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            held = await llm.collective_rpc("asyncrl_held")
        except BaseException as error:  # also a cancellation: the workers may still receive
            raise self._fail(f"version {manifest.version} was not received", error) from error
        for worker in held:
            if worker["error"] or tuple(worker["digests"].values()) != manifest.bucket_digests:
                why = worker["error"] or "a worker got other bytes than published"
                raise TransportError(f"version {manifest.version}: {why}")

    async def commit_update(self) -> str:
        """Load the version in every worker between two steps; the digest of the loaded weights."""
        manifest, self._direct = self._direct, None
        if manifest is None:
            return await super().commit_update()
        self._alive()
        label, llm, started = self._labels.new(manifest.version), self._llm, time.perf_counter()
        self._checksums.forget()
        try:
            async with asyncio.timeout(swap_limit_s(manifest)):
                await llm.finish_weight_update(label)
                held = await llm.collective_rpc("asyncrl_held")
                digest = join_digests(held, buckets=len(manifest.bucket_bytes))
                self._torn = False
                self._set_current(manifest, label)
                if not self._paused:
                    await llm.resume_generation()
        except BaseException as error:  # also a cancellation
            raise self._fail(f"the commit of version {manifest.version} failed", error) from error
        self._swap_s = time.perf_counter() - started
        self._staged.close()  # an older version
        self._checksums.record(label)
        return digest

    async def abort_update(self) -> None:
        """Drop a begun update. After `receive_update` the engine holds no version, and stands still until the next."""
        manifest, self._direct = self._direct, None
        if manifest is not None and self._failure is None:  # vLLM ends its update before the next can begin
            torn = self._labels.new(manifest.version)
            await self._ask("an update was not ended", lambda llm: llm.finish_weight_update(torn), SWAP_LIMIT_S)
        await super().abort_update()

    async def _checksums_now(self) -> Any:
        return await self._llm.compute_weight_checksums()


def _params(sample: Sample) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request = sample.request
    return SamplingParams(
        n=1,
        seed=sample_seed(request.seed, sample.index),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        skip_special_tokens=False,
    )
