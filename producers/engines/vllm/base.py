"""Common part of the engines `vllm` (in this process) and `vllm_http` (a server).

Guarantees:
1. a sample is one vLLM request with its own seed; its versions are the runs that vLLM reports;
2. from the beginning of a commit every failure is `engine.broken`, for all current and later calls;
3. checksums are taken right after a commit if they are cheap, and compared later (`checksums`).
Subclasses implement `_decode`, `_swap`, `_checksums_now`, `_dead`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.versions import Runs, expand
from asyncrl.wire import Manifest, Tensor
from producers.engines import served
from producers.engines.model_files import check_tensors, weights_dtype
from producers.engines.request_checks import request_problem
from producers.engines.staged_weights import StagedVersion
from producers.engines.vllm.checksums import Checksums
from weightsync.plan.digest import version_digest
from weightsync.plan.limits import limit_for
from weightsync.plan.sum_digest import SUM

SWAP_LIMIT_S = 120.0  # a commit that takes longer than this, and the time of its bytes, is a broken engine
CALL_LIMIT_S = 60.0
#: Safetensors names, by the dtypes that hold all their values.
HOLDS = {"float32": {"F32", "BF16", "F16"}, "bfloat16": {"BF16"}, "float16": {"F16"}}


class Sample(served.Sample):
    """One index of one request, as one vLLM request."""

    def __init__(self, request: GenRequest, index: int, outbox: served.Outbox, attempt: int) -> None:
        super().__init__(request, index, outbox)
        self.attempt = attempt
        self.label = ""  # current when it was submitted
        self.ended = False

    @property
    def name(self) -> str:
        return f"{self.request.id}/{self.index}/{self.attempt}"

    def hand_on_runs(self, runs: Runs, finish: str) -> None:
        """Put a delta of the new tokens into the outbox; `runs` are over all tokens so far."""
        self.ascertain(expand(runs).tolist())
        self.hand_on(finish)


class VLLMBase(served.ServedBase):
    def __init__(self, config: Config, *, tag: str = "") -> None:
        super().__init__(config, tag=tag)
        self._dtype = weights_dtype(config)
        self._recompute = config.producers.kv_at_swap == "recompute"
        self._samples: dict[tuple[str, int], Sample] = {}
        self._full_softmax = False  # of the log-probs, for every request
        self._logprobs_mode = "processed_logprobs"
        self._images: ImageInputs | None = None  # of a vision-language model, if the engine sees
        self._committed: Manifest | None = None
        self._checksums = Checksums(self._checksums_now, self._fail)

    async def _decode(self, sample: Sample) -> None:
        """Follow one vLLM request to its end; a cancellation aborts the request."""
        raise NotImplementedError

    async def _swap(self, staged: StagedVersion, label: str) -> str:
        """Pause, load, label, resume; the digest of the loaded weights."""
        raise NotImplementedError

    async def _checksums_now(self) -> Any:
        """vLLM's checksums of its parameters, for all workers."""
        raise NotImplementedError

    def _dead(self) -> str:
        """Why vLLM does not answer; empty if unknown."""
        raise NotImplementedError

    # ------------------------------------------------------------ failures

    def _alive(self) -> None:
        if self._failure is None and (why := self._dead()):
            self._fail(why)
        if self._failure is not None:
            raise self._failure

    def _fail(self, what: str, error: BaseException | None = None) -> AsyncRLError:
        """Remember the first failure and pass it to all waiting calls."""
        if self._failure is None:
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            self._failure = AsyncRLError("engine.broken", f"{what}{why}")
            for sample in self._samples.values():
                sample.outbox.put_nowait(self._failure)
        return self._failure

    def _begin_close(self) -> None:
        self._fail("the engine was closed")
        self._checksums.close()

    # ------------------------------------------------------------ samples

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        """Deltas of the samples of the request.

        Raises:
            WorkError: the request does not fit the engine (`sample.invalid`).
            AsyncRLError: the engine has failed (`engine.broken`).
        """
        self._alive()
        if problem := self._problem(request):
            raise WorkError("sample.invalid", problem, where=request.id)
        outbox: served.Outbox = asyncio.Queue()
        for index in request.indices:
            self._submit(Sample(request, index, outbox, 0))
        left = len(request.indices)
        try:
            while left and (delta := await served.next_delta(outbox)) is not None:
                left -= bool(delta.finish)
                yield delta
        finally:
            self._forget([request.id])

    def _problem(self, request: GenRequest) -> str:
        """Why the request cannot be taken; empty if it can."""
        taken = any(key[0] == request.id for key in self._samples)
        vocab, version = self._facts.vocab, self._version
        if problem := request_problem(
            request, self._config, vocab=vocab, taken=taken, version=version, images=self._images is not None
        ):
            return problem
        return "" if self._full_softmax else unfit_logprobs(request, self._logprobs_mode)

    def _submit(self, sample: Sample) -> None:
        self._samples[sample.request.id, sample.index] = sample
        sample.label = self._labels.current
        sample.task = asyncio.create_task(self._decode(sample))

    def _submit_anew(self) -> None:
        """Restart the samples without a token: their prompt may have K/V of the old weights."""
        for sample in list(self._samples.values()):
            if not sample.tokens and sample.task is not None:
                sample.task.cancel()
                self._submit(Sample(sample.request, sample.index, sample.outbox, sample.attempt + 1))

    def _finish(self, sample: Sample, spans: Sequence[tuple[str, int, int]], reason: str) -> None:
        """End a sample; `spans` are vLLM's (label, start, end) over all its tokens."""
        if reason not in ("stop", "length", "abort"):
            raise WorkError("engine.broken", f"vLLM ended a sample with {reason!r}", where=sample.name)
        self._samples.pop((sample.request.id, sample.index), None)
        sample.ended = True
        sample.hand_on_runs(self._labels.runs(spans, len(sample.tokens), where=sample.name), reason)

    def _forget(self, ids: Sequence[str] | None) -> list[Sample]:
        """Drop the samples of these requests (None: all): a cancelled task aborts its request in vLLM."""
        gone = [sample for sample in self._samples.values() if ids is None or sample.request.id in ids]
        for sample in gone:
            del self._samples[sample.request.id, sample.index]
            if sample.task is not None:
                sample.task.cancel()
        return gone

    async def abort(self, ids: Sequence[str] | None) -> int:
        """Abort these requests (None: all); their iterators end without the missing samples."""
        self._alive()
        gone = self._forget(ids)
        for outbox in {id(sample.outbox): sample.outbox for sample in gone}.values():
            outbox.put_nowait(None)
        tasks = [sample.task for sample in gone if sample.task is not None]
        if tasks:  # vLLM knows about it then
            await asyncio.wait(tasks, timeout=CALL_LIMIT_S)
        return len(gone)

    # ------------------------------------------------------------ weights

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Make room for a version in a file. Raises `sync.plan` for anything but this model's whole weights."""
        check_dtypes(tensors, self._dtype)
        await super().begin_update(manifest, tensors)

    async def begin_mapped(self, path: Path, manifest: Manifest, tensors: Sequence[Tensor]) -> bool:
        """Load the version from this slot; see `asyncrl.engine.SlotMapping`."""
        self._alive()
        check_dtypes(tensors, self._dtype)
        check_tensors(self._facts, tensors)
        return await asyncio.to_thread(self._staged.begin_mapped, path, manifest, tensors)

    async def commit_update(self) -> str:
        """Load the version in every worker between two steps; the digest of the loaded weights."""
        self._alive()
        staged = self._staged.complete()
        label = self._labels.new(staged.manifest.version)
        started = time.perf_counter()
        self._checksums.forget()
        try:
            async with asyncio.timeout(swap_limit_s(staged.manifest)):
                digest = await self._swap(staged, label)
        except BaseException as error:  # also a cancellation: the workers may be between two versions
            raise self._fail(f"the commit of version {staged.manifest.version} failed", error) from error
        self._swap_s = time.perf_counter() - started
        self._staged.commit()
        self._checksums.record(label)
        return digest

    def _set_current(self, manifest: Manifest, label: str) -> None:
        """The workers hold the version; decoding has not resumed."""
        self._labels.current, self._version, self._committed = label, manifest.version, manifest
        if not self._recompute:
            self._submit_anew()

    async def attest(self) -> str:
        """The manifest's digest while vLLM's checksums are those after the commit, else another; empty if they were
        not taken then (they are now)."""
        self._alive()
        current = self._committed
        return "" if current is None else await self._checksums.attest(current.digest)


def swap_limit_s(manifest: Manifest) -> float:
    """Longest commit of a version."""
    return limit_for(SWAP_LIMIT_S, sum(manifest.bucket_bytes))


def join_digests(workers: Sequence[dict[str, Any]], *, buckets: int) -> str:
    """The digest of the version that the workers loaded, from what each says about its buckets
    (`weight_transfer.StagedWeightTransfer.held`).

    Raises `engine.broken` if workers differ, or if not each bucket was digested once in every replica.
    """
    found: list[str] = []
    for number in range(buckets):
        digests = [str(worker["digests"][str(number)]) for worker in workers if str(number) in worker["digests"]]
        if len(set(digests)) > 1:
            raise WorkError("engine.broken", f"the workers hold different weights: bucket {number}, {sorted(digests)}")
        if not digests or len(digests) != len(workers) // workers[0]["shares"]:
            what = f"bucket {number} was digested by {len(digests)} of {len(workers)} workers"
            raise WorkError("engine.broken", f"{what}, {workers[0]['shares'] if workers else 0} share the buckets")
        found.append(digests[0])
    return version_digest(found)


def check_dtypes(tensors: Sequence[Tensor], dtype: str) -> None:
    """Raise `sync.plan` if the engine's dtype cannot hold the sent values: the digests would differ."""
    for tensor in tensors:
        if tensor.dtype not in HOLDS[dtype]:
            raise AsyncRLError(
                "sync.plan",
                f"{tensor.name}: sent as {tensor.dtype}, which {dtype} does not hold without loss",
                remedy='set producers.dtype = "auto", or both ends to the same dtype',
            )


def unfit_logprobs(request: GenRequest, mode: str) -> str:
    """Why the engine's log-probs would not be those of the full softmax after temperature; empty if they are, or if
    nothing reads them."""
    if not request.trained:
        return ""
    if mode == "raw_logprobs" and request.temperature != 1:
        return f"temperature {request.temperature:g}: this engine records log-probs before the temperature"
    if mode == "processed_logprobs" and (request.top_p < 1 or request.top_k > 0 or request.min_p > 0):
        return (
            f"top_p, top_k or min_p at temperature {request.temperature:g}: this engine records log-probs after the cut"
        )
    return ""


def update_info(manifest: Manifest, tensors: Sequence[Tensor], **where: str) -> dict[str, Any]:
    """Fields of `weight_transfer.StagedUpdateInfo`; `where` its `path` or `instruction`."""
    first = manifest.bucket_digests[0] if manifest.bucket_digests else ""
    return {
        "tensors": [
            [tensor.name, tensor.dtype, list(tensor.shape), tensor.bucket, tensor.offset, tensor.nbytes]
            for tensor in tensors
        ],
        "bucket_bytes": list(manifest.bucket_bytes),
        "like": SUM if first.startswith(SUM) else "",
        **where,
    }
