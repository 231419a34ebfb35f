"""The sglang engine: an SGLang server behind a URL, used over HTTP; weights go to it in a process group.

The server belongs to this producer alone. Guarantees:
1. tokens go in and come out as ids; each sample is one request. At most `capabilities().max_samples` are at the server;
   the others wait here, by priority;
2. a version is staged in a file while generation goes on (`staged_weights`); at the commit the server is paused, takes
   the tensors in one broadcast per bucket within a weight session, and goes on. `kv_at_swap = keep` pauses in place;
   `recompute` retracts running requests and empties the prefix cache, so all K/V is computed again;
3. token versions are the spans that the server reports, under labels that no other producer and no other commit uses; a
   server that was restarted, or that another process loads weights into, is noticed: `engine.broken`;
4. the label salts the prefix cache, which is probed at the start: a request that was sent after a swap never gets K/V
   of older weights;
5. log-probs are those of the full softmax after temperature; a request for which the server's are not (`top_k = 1` at
   another temperature than 1) is refused;
6. every unexpected answer of the server, and every failure from the beginning of a commit on, is `engine.broken` in all
   current and later calls. The next producer resets the server (`control_api.recover`).
The server's weights are not read back: a commit's digest is that of the bytes that were sent from the file. `attest`
digests the file again and compares the server's own checksums with those right after the commit. Only the group needs
torch.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities, EngineHealth, GenDelta, GenRequest, PauseMode
from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.images.model_inputs import ImageInputs, open_inputs
from asyncrl.process_plan.interpreters import ENGINE_TOKEN
from asyncrl.versions import expand
from producers.engines.group_sender import GroupSender
from producers.engines.http import HttpClient
from producers.engines.request_gate import RequestGate
from producers.engines.served import Outbox, ServedBase, next_delta
from producers.engines.served_images import check_prompt, encode_images
from producers.engines.sglang.control_api import ServerFacts, SGLangServer, together
from producers.engines.sglang.responses import read_piece
from producers.engines.sglang.sample import Sample
from producers.engines.sglang.startup import check_prefixes, check_request, check_server, make_group, server_url
from producers.engines.sglang.weights import Checksums, file_digest, load
from producers.engines.staged_weights import StagedVersion

T = TypeVar("T")
LOOK_S = 2.0  # between two checks of the server
WAIT_LOOK_S = 0.01
MOST_ABORTS = 3  # by the server, of one sample


class SGLangEngine(ServedBase):
    """Made by name with the resolved configuration: `find("asyncrl.engines", "sglang")(config)`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._limit_s = config.weightsync.timeout_s
        self._client: HttpClient | None = None
        self._server: SGLangServer | None = None
        self._group: GroupSender | None = None
        self._found: ServerFacts | None = None
        self._images: ImageInputs | None = None
        self._owner = uuid.uuid4().hex[:8]  # of the labels
        self._label = ""  # the server's name of its weights
        self._swaps = 0  # begun
        self._gate = RequestGate(config.producers.slots)
        self._samples: dict[str, list[Sample]] = {}
        self._control = asyncio.Lock()  # one pause, resume or commit at a time
        self._watching: asyncio.Task[None] | None = None
        self._busy_s, self._busy_since = 0.0, 0.0
        self._checksums = Checksums(self._limit_s)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Wait for the server, check it, join a group with it; the version is -1 until the first commit."""
        config = self._config
        url = server_url(config)
        self._images = open_inputs(config)
        self._client = HttpClient(url, token=os.environ.get(ENGINE_TOKEN, ""))
        server = self._server = SGLangServer(self._client, swap_s=self._limit_s)
        await server.ready(within_s=config.run.hang_timeout_s)
        found = self._found = await server.facts()
        check_server(found, config, architecture=await server.architecture(), where=url)
        await check_prefixes(self._client, found, vocab=self._facts.vocab)
        self._label = await server.label()
        self._gate.limit = min(config.producers.slots, found.running or config.producers.slots)
        group = self._group = make_group(config, f"asyncrl-{self._owner}", workers=found.tp_size, url=url)
        port = await group.listen()
        joining = server.join_group(group.name, host=group.host, port=port, size=group.size, backend=group.backend)
        await together(joining, group.join())  # bounded: by the group's limit
        self._watching = asyncio.create_task(self._watch())

    async def close(self, *, grace_s: float) -> None:
        """End all samples with an error; the server goes on, without requests and without the group."""
        self._fail(AsyncRLError("engine.broken", "the engine was closed"))
        if self._watching is not None:
            self._watching.cancel()
        if self._client is not None and self._server is not None:
            with suppress(AsyncRLError, TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._server.recover()
                    if self._group is not None:
                        await self._server.leave_group(self._group.name)
        if self._group is not None:
            await self._group.close()
        if self._client is not None:
            await self._client.close()
        self._staged.close()

    def health(self) -> EngineHealth:
        """A snapshot; any thread."""
        found, failure = self._found, self._failure
        if found is None:
            return EngineHealth(alive=False, version=-1, running=0, waiting=0, detail="not started")
        held = sum(
            len(sample.request.prompt_ids) + len(sample.tokens)
            for samples in list(self._samples.values())
            for sample in samples
            if sample.turns
        )
        return EngineHealth(
            alive=failure is None,
            version=self._version,
            running=self._gate.inside,
            waiting=self._gate.waiting,
            generated_tokens=self._generated,
            busy_s=self._busy_s + (time.monotonic() - self._busy_since if self._gate.inside else 0.0),
            swap_s=self._swap_s,
            detail=failure.message if failure is not None else "",
            kv_used=min(1.0, held / max(1, found.max_total_num_tokens)),
            paused=self._paused,
        )

    def capabilities(self) -> EngineCapabilities:
        """Seeds need a server with --enable-deterministic-inference."""
        self._alive()
        found = self._found
        assert found is not None
        return EngineCapabilities(
            "sglang",
            max_samples=self._gate.limit,
            max_tokens=min(self._max_len, found.max_req_input_len + 1),
            kv_tokens=found.max_total_num_tokens,
            priority=True,
            seeded=found.enable_deterministic_inference,
            continues=found.enable_deterministic_inference,
            images=self._images is not None,
        )

    async def _watch(self) -> None:
        """Check repeatedly that it is the same server, with the weights that it was given."""
        while self._failure is None:
            await asyncio.sleep(LOOK_S)
            if self._control.locked():
                continue
            swaps = self._swaps
            try:
                label = await self._alive().label()
            except AsyncRLError as error:
                self._fail(error)
                return
            if label != self._label and swaps == self._swaps:
                what = f"the server holds {label!r}, not {self._label!r}: it was restarted, or another loads weights"
                self._fail(AsyncRLError("engine.broken", what))

    def _alive(self) -> SGLangServer:
        if self._failure is not None:
            raise self._failure
        if self._server is None:
            raise AsyncRLError("engine.broken", "the engine was not started")
        return self._server

    def _fail(self, error: AsyncRLError) -> AsyncRLError:
        """Remember the first failure and end every iterator with it."""
        self._failure = self._failure or error
        self._gate.shut()
        for samples in self._samples.values():
            samples[0].outbox.put_nowait(self._failure)
        return self._failure

    async def _vital(self, work: Awaitable[T]) -> T:
        """The result of a call whose failure breaks the engine."""
        try:
            return await work  # bounded: a call of the server, with its deadline
        except AsyncRLError as error:
            raise self._fail(error) from None

    # ------------------------------------------------------------ samples

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        """Deltas of the samples of the request.

        Raises:
            WorkError: the request does not fit the engine's limits (`sample.invalid`).
            AsyncRLError: the engine has failed (`engine.broken`).
        """
        self._alive()
        taken, version = request.id in self._samples, self._version
        sees = self._images is not None
        check_request(request, self._config, vocab=self._facts.vocab, taken=taken, version=version, images=sees)
        outbox: Outbox = asyncio.Queue()
        samples = self._samples[request.id] = [Sample(request, index, outbox) for index in request.indices]
        for sample in samples:
            sample.task = asyncio.create_task(self._follow(sample))
        left = len(samples)
        try:
            while left and (delta := await next_delta(outbox)) is not None:
                left -= bool(delta.finish)
                yield delta
        finally:
            self._samples.pop(request.id, None)
            for sample in samples:
                if sample.task is not None:
                    sample.task.cancel()  # closes its connection, which the server treats as an abort

    async def _follow(self, sample: Sample) -> None:
        """Turn after turn to the sample's end; an error ends its request, or the engine."""
        try:
            if sample.request.images and self._images is not None:
                await asyncio.to_thread(encode_images, self._images, sample.request)
            while True:
                async with self._gate.place(sample.request.priority):
                    if self._gate.inside == 1:
                        self._busy_since = time.monotonic()
                    try:
                        finish = await self._turn(sample)
                    finally:
                        if self._gate.inside == 1:
                            self._busy_s += time.monotonic() - self._busy_since
                if finish == "abort":
                    sample.aborts += 1
                    if sample.aborts > MOST_ABORTS:
                        raise WorkError("sample.invalid", "the server aborts it repeatedly", where=sample.name)
                elif finish == "length" or sample.is_stopped() or not sample.remaining:
                    return sample.hand_on("stop" if sample.is_stopped() else "length")
        except AsyncRLError as error:
            if error.code == "engine.broken":
                self._fail(error)
            else:
                sample.outbox.put_nowait(error)

    async def _turn(self, sample: Sample) -> str:
        """Request the rest of a sample; the server's reason for its end."""
        assert self._client is not None
        swaps, version, before, taken = self._swaps, self._version, len(sample.tokens), 0
        ids, body = sample.ids, sample.ask(salt=self._label, inputs=self._images)
        events = self._client.stream("/generate", body, idle_s=self._config.run.hang_timeout_s)
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                piece = read_piece(event, taken, where=sample.name)
                if sample.request.images and piece.tokens and not taken:
                    check_prompt(piece.prompt, ids, where=sample.name)
                sample.take(piece.tokens, piece.logprobs)
                taken += len(piece.tokens)
                self._generated += len(piece.tokens)
                if piece.finish:
                    spans = piece.spans
                    if spans is None and swaps != self._swaps:
                        what = "the server does not report the weights of its tokens"
                        raise WorkError("engine.broken", what, where=sample.name)
                    versions = [version] * taken if spans is None else self._span_versions(spans, taken, sample.name)
                    sample.ascertain([*sample.versions[:before], *versions])
                    return piece.finish
                if swaps == self._swaps:
                    sample.ascertain([*sample.versions[:before], *[version] * taken])
                    if sample.is_due():
                        sample.hand_on("")
        raise WorkError("engine.broken", "the stream ended without a reason", where=sample.name)

    def _span_versions(self, spans: Sequence[tuple[str, int, int]], tokens: int, where: str) -> list[int]:
        own = [(label.removeprefix(f"{self._owner}/"), start, end) for label, start, end in spans if end > start]
        return [int(version) for version in expand(self._labels.runs(own, tokens, where=where))]

    async def abort(self, ids: Sequence[str] | None) -> int:
        """Abort these requests (None: all); their iterators end without the missing samples."""
        server = self._alive()
        count = 0
        for name in list(self._samples) if ids is None else ids:
            samples = self._samples.get(name, [])
            for sample in samples:
                if sample.task is not None and not sample.task.done():
                    sample.task.cancel()
                    count += 1
            if samples:
                samples[0].outbox.put_nowait(None)
                await self._vital(server.abort(f"{name}/"))
        return count

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Decode nothing from now on; see `asyncrl.engine.Engine`."""
        server = self._alive()
        self._gate.shut()
        if mode == "abort":
            await self.abort(None)
        while mode == "wait" and self._gate.inside:  # bounded: every sample has a largest length
            await asyncio.sleep(WAIT_LOOK_S)
            self._alive()
        async with self._control:
            await self._vital(server.pause("in_place"))
            self._paused = True

    async def resume(self) -> None:
        server = self._alive()
        async with self._control:
            await self._vital(server.resume())
            self._paused = False
        self._gate.open()

    # ------------------------------------------------------------ weights

    async def attest(self) -> str:
        """Digest of the current version's file, if the server's checksums are those after the commit; else another."""
        current, swaps = self._staged.current, self._swaps
        if current is None or self._control.locked():
            return ""
        server = self._alive()
        digest = await asyncio.to_thread(file_digest, current)
        found = await self._vital(self._checksums.take(server))
        return "" if swaps != self._swaps else self._checksums.attest(found, digest)

    async def commit_update(self) -> str:
        """Load the staged version while the server is paused; the digest of the sent bytes."""
        self._alive()
        staged = self._staged.complete()
        async with self._control:
            label = f"{self._owner}/{self._labels.new(staged.manifest.version)}"
            digest = await asyncio.to_thread(file_digest, staged)
            try:
                await self._load(staged, label)
            except AsyncRLError as error:
                raise self._fail(error) from None
            except asyncio.CancelledError:
                self._fail(AsyncRLError("engine.broken", "a commit was cut off in the middle"))
                raise
        return digest

    async def _load(self, staged: StagedVersion, label: str) -> None:
        server, group = self._alive(), self._group
        assert group is not None
        self._gate.shut()
        self._swaps += 1
        started = time.perf_counter()
        recompute = self._config.producers.kv_at_swap == "recompute"
        await load(server, group, staged, label, recompute=recompute)
        self._label, self._version = label, staged.manifest.version
        self._staged.commit()
        if not self._paused:
            await server.resume()
            self._gate.open()
        self._swap_s = time.perf_counter() - started
        await self._checksums.record(server)
