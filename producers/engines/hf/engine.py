"""The default engine: a sampler on the transformers forward. It runs wherever torch does, also on a laptop's CPU.

The decode loop owns the model and runs in one thread (`decode_thread`). Guarantees:
1. samples of a request come as they finish; those of one step come together;
2. weights change between two decode steps, by an exchange of storages (`weights`); the digests of the buckets, and of
   the whole model after the exchange, are computed while decoding goes on. With `weightsync.in_place` there is no
   second copy: nothing is decoded from `begin_update` to the commit of a whole version;
3. log-probs are those of the full softmax after temperature, or of that over the support, if the request wants it;
   float32; token versions are exact;
4. with `evaluation.lane = "second_weights"` requests of a kept version are decoded by it alone, whatever is committed
   (`second_weights`). All digests are those of the current version;
5. asleep, the weights are off the device and there is no K or V; versions are taken as they are awake;
6. any failure of the loop ends every iterator and every later call with `engine.broken`: nothing hangs.
`loading` finds at start how a model can run; `decoder` has the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities, EngineHealth, GenDelta, GenRequest, PauseMode
from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.images.model_inputs import ImageInputs, open_inputs
from asyncrl.runtime.device import Device
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.runtime.model_tensors import stacked_parts
from asyncrl.runtime.routers import Routers
from asyncrl.wire import Buffer, Instruction, Manifest, Tensor
from producers.engines.hf.decode_thread import DecodeThread
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.direct import receive
from producers.engines.hf.loading import TRIED, build_decoder, load_model
from producers.engines.hf.second_weights import SecondWeights
from producers.engines.hf.sleep import HFSleeping, RestingWeights
from producers.engines.hf.weights import ModelWeights
from producers.engines.request_checks import request_problem
from producers.engines.served import Outbox, next_delta

DRAIN_LOOK_S = 0.005
SWAP_LIMIT_S = 120.0  # a decode step that takes longer than this is a broken engine


class _Outbox:
    """The queue of one request, and the number of samples still to come."""

    def __init__(self, request: GenRequest) -> None:
        self.left = len(request.indices)
        self.version = request.version
        self.queue: Outbox = asyncio.Queue()


class HFEngine:
    """Made by name with the resolved configuration: `find("asyncrl.engines", "hf")(config)`."""

    tried: Sequence[str] = TRIED  # decoders, in this order

    def __init__(self, config: Config) -> None:
        self._config = config
        self._max_new = config.longest_response
        self._max_len = config.data.max_prompt_tokens + self._max_new
        self._model: torch.nn.Module | None = None
        self._decoder: Decoder | None = None
        self._decoders: list[Decoder] = []  # with that of the second weights
        self._thread: DecodeThread | None = None
        self._outboxes: dict[str, _Outbox] = {}
        self._weights: ModelWeights | None = None
        self.sleeping: HFSleeping | None = None
        self._second: SecondWeights | None = None
        self._images: ImageInputs | None = None
        self._wanted = self._kept = -1  # last version of `keep_version`; -1 in `_kept` if it is not kept
        self._limit: asyncio.TimerHandle | None = None  # of the kept version
        self._dirty = False  # in place: the parameters are of no version
        self._groups: list[Any] = []  # of transport `direct`, once it was used
        self._swap_s = 0.0
        self._detail = ""

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and start the decode thread; the version is -1 until the first update is committed."""
        torch.set_num_threads(self._config.producers.torch_threads)
        self._decoder = await asyncio.to_thread(self._build)
        self._thread = DecodeThread(
            self._decoders, deliver=partial(_deliver, self._outboxes), on_failure=partial(_end_all, self._outboxes)
        )
        assert self._model is not None
        weights = RestingWeights(
            self._model.parameters(), Device.find(self._config.producers.device), self._config.run_dir
        )
        self.sleeping = HFSleeping(self._thread, self._decoder, weights)

    def _build(self) -> Decoder:
        config = self._config
        device = Device.find(config.producers.device).torch_device
        self._model = load_model(config, device=device, max_len=self._max_len)
        parts = stacked_parts(self._model, config.model.path)
        self._weights = ModelWeights(self._model, in_place=config.weightsync.in_place, parts=parts)
        self._images = open_inputs(config)
        build = partial(
            build_decoder,
            max_prompt=config.data.max_prompt_tokens,
            max_new=self._max_new,
            recompute=config.producers.kv_at_swap == "recompute",
            where=config.model.path,
            images=self._images,
            drafts=config.producers.speculative_tokens,
        )
        held_out = config.held_out_slots
        copies = self._weights.second_copy * (2 if held_out else 1)
        built = build(
            self._model,
            slots=config.producers.slots,
            held_out=held_out,
            extra_bytes=copies,
            tried=self.tried,
            routers=Routers(self._model) if config.learner.router_replay else None,
            ended=config.kept_sessions,
        )
        if held_out:
            make = partial(build, slots=held_out, tried=(built.kind,))
            self._second = SecondWeights(self._model, built.decoder, lambda model: make(model).decoder)
        self._decoders = [built.decoder, *([self._second.decoder] if self._second is not None else [])]
        if built.kind == "caches":
            self._detail = f"decodes with transformers' caches, one forward per group: {built.why}"
            print(f"engine hf: {self._detail}", flush=True)
        return built.decoder

    async def close(self, *, grace_s: float) -> None:
        """Stop the decode thread after its step; iterators under way end with an error."""
        if self._thread is not None:
            await self._thread.close(grace_s=grace_s)
        while self._groups:
            await asyncio.to_thread(self._groups.pop().close)

    def health(self) -> EngineHealth:
        """A snapshot; any thread."""
        decoder, thread, every = self._decoder, self._thread, self._decoders
        if decoder is None or thread is None:
            return EngineHealth(alive=False, version=-1, running=0, waiting=0, detail="not started")
        return EngineHealth(
            alive=thread.failure is None,
            version=-1 if self._dirty else decoder.version,
            running=sum(one.table.live for one in every),
            waiting=sum(one.waiting for one in every),
            generated_tokens=sum(one.generated_tokens for one in every),
            busy_s=sum(one.busy_s for one in every),
            swap_s=self._swap_s,
            detail=thread.failure.message if thread.failure else self._detail,
            kv_used=decoder.table.held_tokens / (decoder.table.slots * self._max_len),
            paused=decoder.paused,
            drafted=decoder.drafter.drafted if decoder.drafter else 0,
            accepted_drafts=decoder.drafter.accepted if decoder.drafter else 0,
        )

    def capabilities(self) -> EngineCapabilities:
        """What this engine can do with its configuration."""
        slots, in_place = self._config.producers.slots, self._config.weightsync.in_place
        return EngineCapabilities(
            "hf",
            max_samples=slots,
            max_tokens=self._max_len,
            kv_tokens=slots * self._max_len,
            encodings=("full",) if in_place else ("full", "adapter"),
            in_place=in_place,
            continues=True,
            supports=True,
            experts=self._config.learner.router_replay,
            images=self._images is not None,
            image_turns=self._images is not None,
            priority=True,
            second_weights=not in_place,
        )

    def fingerprint(self) -> str:
        """Digest of the model's shape, its tokenizer and the run's dtype; reads small files, no weights."""
        return model_fingerprint(self._config.model.path, dtype=self._config.model.dtype)

    # ------------------------------------------------------------ samples

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        """Deltas of the samples of the request; each sample ends as soon as it has finished.

        Raises:
            WorkError: the request does not fit the engine's limits (`sample.invalid`).
            AsyncRLError: the engine has failed (`engine.broken`).
        """
        self._check(request)
        decoder, thread = self._require(), self._decoding
        if request.version >= 0:
            if request.version != self._kept or self._second is None:
                return  # it was freed meanwhile: like `abort`
            decoder = self._second.decoder
        outbox = self._outboxes[request.id] = _Outbox(request)
        thread.submit(lambda: decoder.submit(request))
        try:
            while outbox.left and (delta := await next_delta(outbox.queue)) is not None:
                outbox.left -= bool(delta.finish)
                yield delta
        finally:
            self._outboxes.pop(request.id, None)
            if outbox.left and thread.failure is None:
                thread.submit(lambda: _forget(decoder, request.id))

    def _check(self, request: GenRequest) -> None:
        version, taken = self._require().version, request.id in self._outboxes
        embedding: Any = self._model.get_input_embeddings()  # type: ignore[union-attr, operator]
        vocab = int(embedding.weight.shape[0])
        sees = self._images is not None
        able = {"keeps": self._second is not None, "images": sees, "image_turns": sees}
        able |= {"supports": True, "experts": self._config.learner.router_replay}
        if problem := request_problem(request, self._config, vocab=vocab, taken=taken, version=version, **able):
            raise WorkError("sample.invalid", problem, where=request.id)

    async def abort(self, ids: Sequence[str] | None) -> int:
        """Abort these requests (None: all); their iterators end without the missing samples."""
        count = await self._decoding.call(lambda: sum(one.abort(ids) for one in self._decoders))
        for name in list(self._outboxes) if ids is None else ids:
            if name in self._outboxes:
                self._outboxes[name].queue.put_nowait(None)
        return count

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Decode nothing from now on; see `asyncrl.engine.Engine`."""
        if mode == "abort":
            await self.abort(None)
        if mode == "wait":
            await self._decoding.call(lambda: _set(self._decoders, draining=True))
            # bounded: every sample has a largest length
            while any(one.draining and one.table.live for one in self._decoders):
                await asyncio.sleep(DRAIN_LOOK_S)
                self._require()
        await self._decoding.call(lambda: _set(self._decoders, paused=True))

    async def resume(self) -> None:
        await self._decoding.call(lambda: _set(self._decoders, paused=False, draining=False))

    # ------------------------------------------------------------ weights

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Make room for a version; in place: stop decoding. Raises `sync.plan` for the layout of another model, and
        `sync.failed` for an adapter of another base."""
        decoder = self._require()
        await asyncio.to_thread(self._active_weights().begin, manifest, tensors)
        if self._config.weightsync.in_place:
            self._dirty = True
            await self._decoding.call(decoder.halt)

    async def receive_update(self, instruction: Instruction, tensors: Sequence[Tensor]) -> None:
        """See `asyncrl.engine.Receiving`."""
        assert instruction.manifest is not None
        await self.begin_update(instruction.manifest, tensors)
        await asyncio.to_thread(receive, self._active_weights(), instruction, self._groups)

    def bucket_room(self, number: int) -> memoryview | None:
        """Memory for the bytes of a bucket before they are applied; None if they have to be copied."""
        return self._active_weights().bucket_room(number)

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        """Copy one bucket into the new version; the digest of the copy."""
        return await asyncio.to_thread(self._active_weights().apply, number, data)

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        """The bytes of a bucket of the current version, in the dtypes of its manifest."""
        return not self._dirty and await asyncio.to_thread(self._active_weights().read, number, into)

    async def attest(self) -> str:
        """Digest of the model's weights, read while decoding goes on; empty without a version."""
        return "" if self._dirty else await asyncio.to_thread(self._active_weights().digest)

    async def commit_update(self) -> str:
        """Swap between two decode steps; the digest of the model's weights after it."""
        weights, decoder = self._active_weights(), self._require()
        manifest = weights.pending_update().manifest
        weights.check_complete()
        if manifest.version <= self._wanted:  # a number that comes again may name other weights
            self._end_kept()
            self._wanted = -1

        def exchange() -> None:
            weights.exchange(kept=self._second is not None and self._second.decoder.version >= 0)

        try:
            swapping = self._decoding.call(lambda: decoder.swap(manifest.version, exchange))
            self._swap_s = await asyncio.wait_for(swapping, SWAP_LIMIT_S)
        except TimeoutError:
            error = AsyncRLError("engine.broken", f"no swap within {SWAP_LIMIT_S:g} s")
            raise self._decoding.fail(error) from None
        self._dirty = False
        # Parameters change at the next commit only, so they can be read while the loop decodes on.
        return await asyncio.to_thread(weights.digest)

    async def abort_update(self) -> None:
        """Drop a begun update; the model is unchanged, or (in place) of no version and halted."""
        await asyncio.to_thread(self._active_weights().abort)

    async def keep_version(self, version: int, limit_s: float) -> bool:
        """Keep this version for the requests that name it; see `asyncrl.engine.Keeping`."""
        second = self._second
        self._require()
        if version != self._wanted and second is not None:
            self._end_kept()
            self._wanted = version
            kept = version >= 0 and await self._decoding.call(lambda: second.keep(version))
            if kept and self._wanted == version:  # no commit ended it meanwhile
                self._kept = version
                self._limit = asyncio.get_running_loop().call_later(limit_s, self._end_kept)
        return self._kept == version >= 0

    def _end_kept(self) -> None:
        """Free the second set of weights; its requests end."""
        if self._limit is not None:
            self._limit.cancel()
        self._kept, self._limit = -1, None
        if self._second is not None and self._thread is not None:
            self._thread.submit(self._second.drop)
        for outbox in self._outboxes.values():
            if outbox.version >= 0:
                outbox.queue.put_nowait(None)

    def _active_weights(self) -> ModelWeights:
        self._require()
        assert self._weights is not None
        return self._weights

    # ------------------------------------------------------------ the decode thread

    def _require(self) -> Decoder:
        if self._decoder is None or self._thread is None:
            raise AsyncRLError("engine.broken", "the engine was not started")
        self._thread.check()
        return self._decoder

    @property
    def _decoding(self) -> DecodeThread:
        self._require()
        assert self._thread is not None
        return self._thread


def _deliver(outboxes: Mapping[str, _Outbox], samples: Sequence[GenDelta]) -> None:
    for item in samples:
        if item.id in outboxes:
            outboxes[item.id].queue.put_nowait(item)


def _end_all(outboxes: Mapping[str, _Outbox], failure: AsyncRLError) -> None:
    for outbox in outboxes.values():
        outbox.queue.put_nowait(failure)


def _set(decoders: Sequence[Decoder], **flags: bool) -> None:
    for decoder in decoders:
        for name, value in flags.items():
            setattr(decoder, name, value)


def _forget(decoder: Decoder, request: str) -> None:
    decoder.abort([request])
