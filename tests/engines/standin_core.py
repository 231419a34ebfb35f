"""What stands behind the stand-in servers: the hf engine, so that tokens and log-probs are those of real weights.

Started by `standin_sglang.py` and `standin_vllm.py`, each a process of its own. It adds what servers have and the hf
engine has not: weights by name under labels, requests that are held while the server is paused, retracted (their K/V
is made again) or given up with what they have, and a prefix cache that can be stale: who asks a prompt again, under
the same salt, after the weights have changed and the cache was not emptied, gets log-probs that are off by `STALE`. So
does who asks about an image whose features were made under other weights and have the same name.
Random numbers of a sample go by its seed and the place in the sequence, as those of servers in deterministic mode.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.config import parse
from asyncrl.engine import GenRequest
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.images.rows import takes_images
from asyncrl.wire import Manifest
from producers.engines.hf.engine import HFEngine
from producers.engines.model_files import published_name
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors

STALE = 0.5
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
HANG_S = 600.0
STEP_S = 0.002


class Bad(Exception):
    """What the server refuses: status and words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


class Ask(NamedTuple):
    """One sample."""

    name: str
    ids: tuple[int, ...]
    max_new: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    salt: str = ""
    images: tuple[bytes, ...] = ()
    features: tuple[str, ...] = ()  # names of what the vision tower makes of the images


class Job:
    """A sample under way."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns = 0
        self.retractions = 0
        self.cached = 0
        self.stale = False
        self.aborts = False
        self.finish = ""

    @property
    def turn(self) -> str:
        """The hf engine's name of the turn under way."""
        return f"{self.ask.name}#{self.turns}"


class Core:
    """See the module. `context` bounds prompt and response together."""

    def __init__(self, folder: Path, *, context: int, slots: int, threads: int, deterministic: bool) -> None:
        self.context = context
        self.slots = slots
        self.deterministic = deterministic
        self.label = "default"
        self.labels: dict[int, str] = {}
        self.paused = False
        self.updates = 0  # of the whole weights
        self.retracted = 0
        self.jobs: dict[str, Job] = {}
        self.going = asyncio.Event()
        self.going.set()
        self._folder = folder
        self._held: dict[str, torch.Tensor] = {}
        self._prefixes: dict[str, dict[tuple[int, ...], int]] = {}
        self._features: dict[str, int] = {}  # when they were made; they outlive new weights
        self.inputs = ImageInputs(folder) if takes_images(folder) else None
        self.engine = HFEngine(
            parse(f"""
[model]
path = "{folder}"
dtype = "float32"
[data]
path = "unused.jsonl"
max_prompt_tokens = 1
[sampling]
max_new_tokens = {context - 1}
[producers]
device = "cpu"
slots = {slots}
threads = {threads}
[[reward]]
function = "unused:unused"
""")
        )

    async def start(self) -> None:
        """Load the model; its weights are called `default`."""
        await self.engine.start()
        self._slow_down()
        for file in sorted(self._folder.glob("*.safetensors")):
            held = load_file(file)
            self._held.update({published_name(k): v for k, v in held.items()} if self.inputs else held)
        await self.swap("default")

    def _slow_down(self) -> None:
        """A step takes `STEP_S` at least: tests want to meet samples under way."""
        decoder: Any = self.engine._decoder
        step = decoder.step

        def slow() -> Any:
            time.sleep(STEP_S)
            return step()

        decoder.step = slow

    # ------------------------------------------------------------ weights

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor for the next `swap`."""
        name = published_name(name) if self.inputs else name
        known = self._held.get(name)
        if known is None or known.shape != tensor.shape:
            raise Bad(400, f"Failed to load {name}: {tuple(tensor.shape)}")
        self._held[name] = tensor.to(known.dtype)

    async def swap(self, label: str) -> None:
        """What was put is in force from the next step on."""
        number = self.updates
        specs = [TensorSpec(name, DTYPES[value.dtype], tuple(value.shape)) for name, value in self._held.items()]
        plan = plan_buckets(specs, bucket_bytes=1 << 20)
        raw = {name: value.contiguous().flatten().view(torch.uint8).numpy() for name, value in self._held.items()}
        digests, whole = digest_tensors(plan.tensors, lambda name: raw[name])
        manifest = Manifest(number, plan.digest, tuple(plan.bucket_bytes), digests, whole)
        buckets = [bytearray(size) for size in plan.bucket_bytes]
        for tensor in plan.tensors:
            buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = raw[tensor.name].tobytes()
        await self.engine.begin_update(manifest, plan.tensors)
        for place, bucket in enumerate(buckets):
            await self.engine.apply_bucket(place, memoryview(bucket))
        self.labels[number] = label
        assert await self.engine.commit_update() == whole
        self.label, self.updates = label, number + 1

    def checksums(self) -> dict[str, str]:
        """By tensor: of what was put last."""
        return {
            name: hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()[:16]
            for name, value in sorted(self._held.items())
        }

    # ------------------------------------------------------------ requests

    async def run(self, ask: Ask) -> AsyncIterator[Job]:
        """The sample after every token, and at its end."""
        self._admit(ask)
        job = self.jobs[ask.name] = Job(ask)
        try:
            while not job.finish:
                await self._may_go(job)
                if job.aborts:
                    break
                self._meet_prefix(job)
                async for _ in self._turn(job):
                    yield job
            job.finish = job.finish or "abort"
            yield job
        finally:
            del self.jobs[ask.name]
            if not job.finish:
                await self.engine.abort([job.turn])

    def _admit(self, ask: Ask) -> None:
        if len(ask.ids) + ask.max_new > self.context:
            raise Bad(400, f"The input ({len(ask.ids)} tokens) is longer than the model's context length")
        if ask.name in self.jobs:
            raise Bad(400, f"Duplicate request ID detected: {ask.name}")

    async def _may_go(self, job: Job) -> None:
        while not self.going.is_set() and not job.aborts:
            await asyncio.sleep(0.005)

    async def _turn(self, job: Job) -> AsyncIterator[None]:
        ask = job.ask
        job.turns += 1
        ids = np.asarray([*ask.ids, *job.tokens], dtype=np.int32)
        wanted = GenRequest(
            job.turn,
            ids,
            (0,),
            ask.seed,
            ask.max_new - len(job.tokens),
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            min_p=ask.min_p,
            stop_ids=ask.stop_ids,
            begun=len(ids) - 1,
            delta_tokens=1,
            images=ask.images,
        )
        async for delta in self.engine.generate(wanted):
            job.tokens += delta.token_ids.tolist()
            job.logprobs += (delta.logprobs + (STALE if job.stale else 0.0)).tolist()
            job.versions += [version for version, count in delta.runs for _ in range(count)]
            job.finish = delta.finish
            yield

    def _meet_prefix(self, job: Job) -> None:
        """What a prefix cache would do with this prompt."""
        for name in job.ask.features:
            job.stale |= self._features.setdefault(name, self.updates) != self.updates
        known = self._prefixes.setdefault(job.ask.salt, {})
        era = known.get(job.ask.ids)
        if era is None:
            known[job.ask.ids] = self.updates
        elif not job.turns:
            job.cached = len(job.ask.ids) - 1
            job.stale |= era != self.updates

    def expand(self, ids: list[int], urls: Sequence[str]) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """The prompt as the model gets it, and its images, which are PNGs in data URIs."""
        head = "data:image/png;base64,"
        if self.inputs is None or not all(url.startswith(head) for url in urls):
            raise Bad(400, "this stand-in takes PNGs as data URIs, if its model sees")
        images = tuple(base64.b64decode(url.removeprefix(head), validate=True) for url in urls)
        try:
            return tuple(self.inputs.expand(ids, images).tolist()), images
        except ValueError as error:
            raise Bad(400, f"An exception occurred while loading multimodal data: {error}") from None

    def flush(self) -> None:
        """Empty the prefix cache."""
        self._prefixes.clear()

    @property
    def running(self) -> int:
        """Samples that hold K/V."""
        return sum(bool(job.turns) for job in self.jobs.values()) - self.retracted

    async def pause(self) -> None:
        """Stand still; nobody new is let in."""
        self.paused = True
        self.going.clear()
        await self.engine.pause("keep")

    async def retract(self) -> None:
        """Stand still; what runs gives its K/V up and will make it again."""
        await self.pause()
        for job in list(self.jobs.values()):
            if job.turns:
                job.retractions += 1
                await self.engine.abort([job.turn])
        self.retracted = sum(bool(job.turns) for job in self.jobs.values())

    async def resume(self) -> None:
        """Go on."""
        self.paused, self.retracted = False, 0
        await self.engine.resume()
        self.going.set()

    async def give_up(self, beginning: str | None, *, exact: bool = False) -> None:
        """End the requests whose names begin so, or are so (None: all); they answer with what they have."""
        for name, job in list(self.jobs.items()):
            if beginning is None or name == beginning or (name.startswith(beginning) and not exact):
                job.aborts = True
                await self.engine.abort([job.turn])

    def spans(self, job: Job) -> list[dict[str, Any]]:
        """Labels of its tokens, as servers write them."""
        found: list[dict[str, Any]] = []
        for place, version in enumerate(job.versions):
            label = self.labels[version]
            if found and found[-1]["version"] == label:
                found[-1]["end"] = place + 1
            else:
                found.append({"version": label, "start": place, "end": place + 1})
        return found or [{"version": self.label, "start": 0, "end": 0}]


class Faults:
    """What goes wrong, by path: `POST /standin/fault {"path", "what", "skip"}`; `skip` calls go well before.

    `die` kills the process, `500`, `garbage` (200 with bytes that are nothing), `hang`; a fault of a stream strikes
    after its first event. It strikes once, `hang` and `500` for good.
    """

    def __init__(self, older: Sequence[str] = ()) -> None:
        self.older = set(older)  # paths that a server of before does not have
        self._by_path: dict[str, tuple[str, int]] = {}
        self.calls: dict[str, int] = {}

    async def order(self, request: web.Request) -> web.Response:
        """Set one."""
        body = await request.json()
        self._by_path[body["path"]] = (body["what"], int(body.get("skip", 0)))
        return web.json_response({})

    def due(self, path: str) -> str:
        """What strikes this call, empty for none."""
        what, skip = self._by_path.get(path, ("", 0))
        if not what:
            return ""
        if skip:
            self._by_path[path] = (what, skip - 1)
            return ""
        if what in ("garbage",):
            del self._by_path[path]
        return what

    async def strike(self, what: str) -> web.Response:
        """Do it."""
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            await asyncio.sleep(HANG_S)
        if what == "garbage":
            return web.Response(body=b"\x00\xff{", content_type="application/json")
        return web.Response(status=500, text="Internal Server Error (on demand)")

    def middleware(self, streams: Sequence[str]) -> Any:
        """Before every call; paths in `streams` look for their fault themselves."""

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            self.calls[request.path] = self.calls.get(request.path, 0) + 1
            if request.path in self.older:
                return web.json_response({"detail": "Not Found"}, status=404)
            if request.path not in streams and (what := self.due(request.path)):
                return await self.strike(what)
            try:
                response: web.StreamResponse = await handler(request)
            except Bad as bad:
                return web.json_response({"success": False, "message": bad.words}, status=bad.status)
            return response

        return guard


def serve(app: web.Application, *, host: str, port: int) -> None:
    """Run until it is killed."""
    web.run_app(app, host=host, port=port, print=None, handler_cancellation=True, access_log=None)
