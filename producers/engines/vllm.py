"""The vllm engine: AsyncLLM in this process, its workers beside it, weights by vLLM's own transfer interface.

Called by `producers.main` through `asyncrl.engine.Engine`, in an environment that has vLLM. Guarantees:
1. tokens go in and come out as ids; a sample is one request of its own, with its own seed, so the same seed and index
   give the same tokens whatever else is decoded;
2. a version is staged in a file while generation goes on (`staged`); at the commit the engine is paused, the workers
   load the file (`vllm_backend`), and it goes on: no step is ever between two versions;
3. token versions are the spans that vLLM itself reports, under labels that are never used twice; spans that do not
   cover the tokens are `engine.broken`;
4. no new request meets K/V of older weights: the prefix cache is salted with the label, and samples without a token are
   submitted anew at a commit; with `kv_at_swap = "recompute"` the cache is emptied and K/V of samples under way are
   computed again;
5. log-probs are those of the full softmax after temperature, where the workers' sampler can be made to record these
   (`vllm_backend.FullSoftmax`); else a request whose own settings make them others is refused;
6. whatever vLLM reports as its death, or fails from the beginning of a commit on, is `engine.broken` in every call
   under way and later. The engine's processes end with this one, also where it is killed (`vllm_plugin`).
`attest` compares vLLM's own checksums of its parameters with those after the commit; on a CPU vLLM packs linear layers
out of their reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities, EngineHealth, GenDelta, GenRequest, PauseMode
from asyncrl.errors import AsyncRLError, ConfigError, WorkError
from asyncrl.fingerprint import model_fingerprint
from asyncrl.versions import Runs, expand, runs_of
from asyncrl.wire import Buffer, Manifest, Tensor
from producers.engines.model_files import ModelFacts, check_tensors, facts_of
from producers.engines.staged import Labels, StagedVersion, StagedWeights
from producers.engines.vllm_args import arguments, known_names, logprobs_problem
from producers.engines.vllm_life import end, free_host_bytes, prepare, processes_of
from producers.engines.vllm_stats import Stats

SWAP_LIMIT_S = 120.0  # a commit that takes longer than this is a broken engine
CALL_LIMIT_S = 60.0
CHECKSUM_SHARE = 0.05  # of the time between commits, for checksums right after one
CHEAP_S = 0.1  # or shorter than this
#: Safetensors names, by the dtypes that hold all their values.
HOLDS = {"float32": {"F32", "BF16", "F16"}, "bfloat16": {"BF16"}, "float16": {"F16"}}


class Sample:
    """One index of one request: what has come of it, and what was handed on."""

    def __init__(self, request: GenRequest, index: int, outbox: asyncio.Queue[Any], attempt: int) -> None:
        self.request = request
        self.index = index
        self.outbox = outbox
        self.attempt = attempt
        self.name = f"{request.id}/{index}/{attempt}"
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sent = 0
        self.versions: list[int] = []  # of the tokens that were sent
        self.task: asyncio.Task[None] | None = None

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """New tokens. Raises `engine.broken` where a token has no log-prob."""
        if len(token_ids) != len(logprobs):
            raise WorkError("engine.broken", f"{len(logprobs)} log-probs for {len(token_ids)} tokens", where=self.name)
        self.tokens += token_ids
        self.logprobs += logprobs

    def due(self) -> bool:
        """Whether enough has come for a delta."""
        every = self.request.delta_tokens
        return every > 0 and len(self.tokens) - self.sent >= every

    def hand_on(self, runs: Runs, finish: str) -> None:
        """Put a delta of what is new into the outbox; `runs` are over all tokens so far.

        Raises:
            WorkError: `engine.broken` where the runs are not those that were sent before.
        """
        versions = expand(runs).tolist()
        if versions[: self.sent] != self.versions:
            raise WorkError(
                "engine.broken", "vLLM changed the versions of tokens that it had reported", where=self.name
            )
        start, self.sent, self.versions = self.sent, len(self.tokens), versions
        delta = GenDelta(
            self.request.id, self.index, np.asarray(self.tokens[start:], dtype=np.int32),
            np.asarray(self.logprobs[start:], dtype=np.float32), runs_of(versions[start:]), finish, start,
        )  # fmt: skip
        self.outbox.put_nowait(delta)


class VLLMEngine:
    """Made by name with the resolved configuration: `find("asyncrl.engines", "vllm")(config)`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._max_new = config.sampling.max_new_tokens
        self._max_len = config.data.max_prompt_tokens + self._max_new
        self._llm: Any = None
        self._args: dict[str, Any] = {}
        self._facts = ModelFacts(0, {}, False)
        self._full_softmax = False
        self._children: list[int] = []
        self._staged = StagedWeights(config.run_dir / "scratch")
        self._labels = Labels()
        self._stats = Stats()
        self._samples: dict[tuple[str, int], Sample] = {}
        self._failure: AsyncRLError | None = None
        self._version = -1
        self._paused = False
        self._generated = 0
        self._swap_s = 0.0
        self._checksums = ""  # right after the commit; empty where they were not taken
        self._checksum_s = 0.0
        self._committed_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and start vLLM's processes; the version is -1 until the first update is committed.

        On this thread, not in another: the kernel ends vLLM's processes with the thread that started them.
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
        from producers.engines.vllm_plugin import BACKEND

        self._facts = facts_of(self._config.model.path)
        self._args = arguments(
            self._config, known=known_names(), cpu=current_platform.is_cpu(), free_bytes=free_host_bytes()
        )
        try:
            args = AsyncEngineArgs(**self._args, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
            settings = args.create_engine_config()
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError("config.type", f"vLLM refuses its arguments: {error}", where="producers") from error
        try:
            self._llm = AsyncLLM.from_vllm_config(settings, stat_loggers=[self._stats.logger], disable_log_stats=True)
            self._children = processes_of()
            await self._bounded(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={})))
            self._full_softmax = all(await self._bounded(self._llm.collective_rpc("asyncrl_full_softmax")))
        except Exception as error:  # vLLM raises RuntimeError, ValueError and its own from its processes
            raise self._fail("vLLM did not start", error) from error
        if not self._full_softmax and (problem := logprobs_problem(self._config.sampling)):
            raise problem

    async def close(self, *, grace_s: float) -> None:
        """Stop decoding; samples under way end with an error. No process of vLLM is left."""
        self._failure = self._failure or AsyncRLError("engine.broken", "the engine was closed")
        self._spread()
        if self._looking is not None:
            self._looking.cancel()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(end, llm, self._children, grace_s=grace_s)
        self._staged.close()

    def health(self) -> EngineHealth:
        """A snapshot; any thread."""
        stats, failed, samples = self._stats, self._failure, len(self._samples)
        detail = failed.message if failed is not None else ""
        if not detail and (self._llm is None or self._llm.errored):
            detail = "not started" if self._llm is None else "vLLM's engine process is dead"
        running = min(stats.running, samples)  # vLLM says nothing while it has nothing to do
        return EngineHealth(
            alive=not detail, version=self._version, running=running, waiting=min(stats.waiting, samples - running),
            generated_tokens=self._generated, busy_s=stats.busy_s, swap_s=self._swap_s, detail=detail,
            kv_used=stats.kv_used, paused=self._paused, preempted=stats.preempted,
        )  # fmt: skip

    def capabilities(self) -> EngineCapabilities:
        """What this engine can do with its configuration."""
        cache: Any = self._require().vllm_config.cache_config
        return EngineCapabilities(
            "vllm", max_samples=int(self._args["max_num_seqs"]), max_tokens=self._max_len,
            kv_tokens=int(cache.kv_cache_size_tokens or 0), priority=self._args.get("scheduling_policy") == "priority",
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Digest of the model's shape, its tokenizer and the run's dtype; reads small files, no weights."""
        return model_fingerprint(self._config.model.path, dtype=self._config.model.dtype)

    def _require(self) -> Any:
        if self._failure is None and self._llm is not None and self._llm.errored:
            self._fail("vLLM's engine process is dead")
        if self._failure is not None:
            raise self._failure
        if self._llm is None:
            raise AsyncRLError("engine.broken", "the engine was not started")
        return self._llm

    def _fail(self, what: str, error: BaseException | None = None) -> AsyncRLError:
        """Remember the first failure and hand it to everybody who waits."""
        if self._failure is None:
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            self._failure = AsyncRLError("engine.broken", f"{what}{why}")
            self._spread()
        return self._failure

    def _spread(self) -> None:
        for sample in list(self._samples.values()):
            sample.outbox.put_nowait(self._failure)

    async def _bounded(self, call: Awaitable[Any], limit_s: float = CALL_LIMIT_S) -> Any:
        return await asyncio.wait_for(call, limit_s)

    async def _asked(self, what: str, call: Callable[[Any], Awaitable[Any]], limit_s: float = CALL_LIMIT_S) -> Any:
        """A call of vLLM whose failure is the engine's."""
        llm = self._require()
        try:
            return await self._bounded(call(llm), limit_s)
        except Exception as error:  # EngineDeadError and whatever a worker raised
            raise self._fail(what, error) from error

    # ------------------------------------------------------------ samples

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        """Deltas of the samples of the request.

        Raises:
            WorkError: the request does not fit the engine (`sample.invalid`).
            AsyncRLError: the engine has failed (`engine.broken`).
        """
        self._check(request)
        outbox: asyncio.Queue[GenDelta | AsyncRLError | None] = asyncio.Queue()
        for index in request.indices:
            self._submit(Sample(request, index, outbox, 0))
        left = len(request.indices)
        try:
            while left:
                # bounded: each sample puts its end or an error here, its hang is run.hang_timeout_s
                item = await outbox.get()
                if isinstance(item, AsyncRLError):
                    raise item
                if item is None:  # aborted
                    return
                left -= bool(item.finish)
                yield item
        finally:
            self._forget([request.id])

    def _submit(self, sample: Sample) -> None:
        self._samples[sample.request.id, sample.index] = sample
        sample.task = asyncio.create_task(self._decode(sample))

    def _forget(self, ids: Sequence[str] | None) -> list[Sample]:
        """Give up the samples of these requests (None: all): cancelling a task aborts its request in vLLM."""
        gone = [sample for sample in self._samples.values() if ids is None or sample.request.id in ids]
        for sample in gone:
            del self._samples[sample.request.id, sample.index]
            if sample.task is not None:
                sample.task.cancel()
        return gone

    async def _decode(self, sample: Sample) -> None:
        """Follow one request of vLLM to its end."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt

        request = sample.request
        try:
            prompt = TokensPrompt(prompt_token_ids=request.prompt_ids.tolist(), cache_salt=self._labels.current)
            outputs = self._llm.generate(prompt, self._params(sample), sample.name, priority=request.priority)
            async with aclosing(outputs):
                async for output in outputs:
                    self._took(sample, output.outputs[0])
        except (VLLMClientError, ValueError) as error:
            sample.outbox.put_nowait(WorkError("sample.invalid", f"vLLM refuses it: {error}", where=request.id))
        except WorkError as error:
            self._fail(error.message)
        except Exception as error:  # EngineDeadError, EngineGenerateError, and bugs: nobody may wait for this sample
            self._fail("vLLM failed", error)

    def _took(self, sample: Sample, part: Any) -> None:
        logprobs = part.logprobs.logprobs if part.logprobs is not None else ()
        sample.take(part.token_ids, logprobs)
        self._generated += len(part.token_ids)
        count = len(sample.tokens)
        if part.finish_reason is not None:
            spans = [(span.version, span.start, span.end) for span in part.weight_versions or ()]
            if part.finish_reason not in ("stop", "length", "abort"):
                raise WorkError("engine.broken", f"vLLM ended a sample with {part.finish_reason!r}", where=sample.name)
            self._samples.pop((sample.request.id, sample.index), None)
            sample.hand_on(self._labels.runs(spans, count, where=sample.name), part.finish_reason)
        elif sample.due():
            spans = self._spans_so_far(sample, count)
            if spans:
                sample.hand_on(self._labels.runs(spans, count, where=sample.name), "")

    def _spans_so_far(self, sample: Sample, count: int) -> list[tuple[str, int, int]]:
        """vLLM's spans of a sample that has not ended; empty where this vLLM does not show them (one delta then).

        What this says is compared with the spans that come with the end of the sample.
        """
        processor = self._llm.output_processor
        names = getattr(processor, "external_req_ids", {}).get(sample.name, ())
        state = getattr(processor, "request_states", {}).get(names[0]) if names else None
        starts = getattr(state, "weight_version_starts", None)
        if not starts:
            return []
        ends = [start for _, start in starts[1:]] + [count]
        return [(label, start, min(end, count)) for (label, start), end in zip(starts, ends, strict=True)
                if start < count]  # fmt: skip

    def _params(self, sample: Sample) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = sample.request
        return SamplingParams(
            n=1, seed=seed_of(request.seed, sample.index), temperature=request.temperature, top_p=request.top_p,
            top_k=request.top_k, max_tokens=request.max_new_tokens, stop_token_ids=list(request.stop_ids),
            ignore_eos=True, detokenize=False, logprobs=0, flat_logprobs=True, output_kind=RequestOutputKind.DELTA,
            skip_special_tokens=False,
        )  # fmt: skip

    def _check(self, request: GenRequest) -> None:
        self._require()
        prompt, config, problem = request.prompt_ids, self._config, ""
        if any(key[0] == request.id for key in self._samples):
            problem = f"request id {request.id!r} is in use"
        elif not 1 <= len(prompt) - request.begun <= config.data.max_prompt_tokens:
            problem = (f"prompt of {len(prompt) - request.begun} tokens, data.max_prompt_tokens = "
                       f"{config.data.max_prompt_tokens}")  # fmt: skip
        elif request.max_new_tokens < 1 or request.begun + request.max_new_tokens > self._max_new:
            problem = (f"begun + max_new_tokens = {request.begun} + {request.max_new_tokens}, "
                       f"sampling.max_new_tokens = {self._max_new}")  # fmt: skip
        elif request.temperature <= 0 or not request.indices:
            problem = "temperature must be above 0 and indices not empty"
        elif int(prompt.min()) < 0 or int(prompt.max()) >= self._facts.vocab:
            problem = f"prompt token {int(prompt.max())} outside the vocabulary of {self._facts.vocab}"
        elif self._version < 0:
            problem = "no weights have been committed yet"
        elif not self._full_softmax:
            problem = unfit_logprobs(request, self._args["logprobs_mode"])
        if problem:
            raise WorkError("sample.invalid", problem, where=request.id)

    async def abort(self, ids: Sequence[str] | None) -> int:
        """Give up these requests (None: all); their iterators end without the missing samples."""
        self._require()
        gone = self._forget(ids)
        for outbox in {id(sample.outbox): sample.outbox for sample in gone}.values():
            outbox.put_nowait(None)
        tasks = [sample.task for sample in gone if sample.task is not None]
        if tasks:  # vLLM has heard of it then
            await asyncio.wait(tasks, timeout=CALL_LIMIT_S)
        return len(gone)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Decode nothing from now on; see `asyncrl.engine.Engine`."""
        self._require()
        if mode == "abort":
            await self.abort(None)
        if mode == "wait":  # it takes as long as the longest sample
            limit_s = self._config.run.hang_timeout_s
            await self._asked("pause", lambda llm: llm.pause_generation(mode="wait", clear_cache=False), limit_s)
        await self._asked("pause", lambda llm: llm.pause_generation(mode="keep", clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        """Go on where `pause` stopped."""
        await self._asked("resume", lambda llm: llm.resume_generation())
        self._paused = False

    # ------------------------------------------------------------ weights

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Make room for a version in a file. Raises `sync.plan` for anything but this model's whole weights."""
        self._require()
        check_tensors(self._facts, tensors)
        check_dtypes(tensors, str(self._args["dtype"]))
        await asyncio.to_thread(self._staged.begin, manifest, tensors)

    def bucket_room(self, number: int) -> memoryview | None:
        """Where the bytes of a bucket may be put before they are applied."""
        return self._staged.room(number)

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        """Take the bytes of one bucket; the digest of what lies in the file."""
        return await asyncio.to_thread(self._staged.apply, number, data)

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        """The bytes of a bucket of the version in force."""
        return await asyncio.to_thread(self._staged.read, number, into)

    async def abort_update(self) -> None:
        """Forget a begun update; the engine never heard of it."""
        await asyncio.to_thread(self._staged.abort)

    async def commit_update(self) -> str:
        """Pause, have every worker load the file, go on; the digest of what the workers loaded."""
        self._require()
        staged = self._staged.complete()
        label = self._labels.new(staged.manifest.version)
        started = time.perf_counter()
        self._checksums = ""
        try:
            async with asyncio.timeout(SWAP_LIMIT_S):
                digest = await self._swap(staged, label)
        except BaseException as error:  # also a cancellation: the workers may be between two versions
            raise self._fail(f"the commit of version {staged.manifest.version} failed", error) from error
        self._swap_s = time.perf_counter() - started
        self._staged.committed()
        self._look_after_commit(label)
        return digest

    async def _swap(self, staged: StagedVersion, label: str) -> str:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        recompute = self._config.producers.kv_at_swap == "recompute"
        await llm.pause_generation(mode="keep", clear_cache=recompute)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=update_info(staged)))
        await llm.finish_weight_update(label)
        held = await llm.collective_rpc("asyncrl_held")
        self._labels.current, self._version = label, staged.manifest.version
        if not recompute:
            self._submit_anew()
        if not self._paused:
            await llm.resume_generation()
        digests = {worker["digest"] for worker in held}
        if len(digests) != 1:
            raise WorkError("engine.broken", f"the workers hold different weights: {sorted(digests)}")
        return str(digests.pop())

    def _submit_anew(self) -> None:
        """Begin the samples again that have no token yet: their prompt may have K/V of the old weights."""
        for sample in list(self._samples.values()):
            if not sample.tokens and sample.task is not None:
                sample.task.cancel()
                self._submit(Sample(sample.request, sample.index, sample.outbox, sample.attempt + 1))

    # ------------------------------------------------------------ what it holds

    def _look_after_commit(self, label: str) -> None:
        """Take the checksums that later ones are compared with, where that is cheap beside the time between commits."""
        since, self._committed_at = time.monotonic() - self._committed_at, time.monotonic()
        if self._looking is not None:
            self._looking.cancel()
        if self._checksum_s <= max(CHEAP_S, CHECKSUM_SHARE * since):
            self._looking = asyncio.create_task(self._note_checksums(label))

    async def _note_checksums(self, label: str) -> None:
        found = await self._checksum()
        if self._labels.current == label and not self._checksums:
            self._checksums = found

    async def _checksum(self) -> str:
        started = time.perf_counter()
        workers = await self._asked("checksums", lambda llm: llm.compute_weight_checksums())
        self._checksum_s = time.perf_counter() - started
        return blake3(msgspec.json.encode(workers, order="deterministic")).hexdigest(length=16)

    async def attest(self) -> str:
        """The manifest's digest while vLLM's checksums are those after the commit, else another; empty where they were
        not taken (they are now)."""
        held, label = self._staged.held, self._labels.current
        if held is None:
            return ""
        found = await self._checksum()
        if label != self._labels.current:
            return ""
        if not self._checksums:
            self._checksums = found
            return ""
        return held.manifest.digest if found == self._checksums else found


def check_dtypes(tensors: Sequence[Tensor], dtype: str) -> None:
    """Raise `sync.plan` where the engine's dtype cannot hold what is sent: the digest could never agree."""
    for tensor in tensors:
        if tensor.dtype not in HOLDS[dtype]:
            raise AsyncRLError(
                "sync.plan", f"{tensor.name}: sent as {tensor.dtype}, which {dtype} does not hold without loss",
                remedy="set producers.dtype = \"auto\", or both ends to the same dtype",
            )  # fmt: skip


def seed_of(seed: int, index: int) -> int:
    """The seed of one sample: 63 bits from (seed, index)."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def unfit_logprobs(request: GenRequest, mode: str) -> str:
    """Why the engine's log-probs would not be those of the full softmax after temperature; empty where they are."""
    if mode == "raw_logprobs" and request.temperature != 1:
        return f"temperature {request.temperature:g}: this engine records log-probs before the temperature"
    if mode == "processed_logprobs" and (request.top_p < 1 or request.top_k > 0):
        return "top_p or top_k: this engine records log-probs after the cut; set them in [sampling]"
    return ""


def update_info(staged: StagedVersion, *, path: str | None = None) -> dict[str, Any]:
    """What `vllm_backend.StagedUpdateInfo` is made of."""
    return {
        "tensors": [
            [tensor.name, tensor.dtype, list(tensor.shape), tensor.bucket, tensor.offset, tensor.nbytes]
            for tensor in staged.tensors
        ],
        "bucket_bytes": list(staged.manifest.bucket_bytes),
        "path": str(staged.path) if path is None else path,
    }
