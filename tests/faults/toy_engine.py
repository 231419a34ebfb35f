"""An engine without a model, for faults at speed: tokens from the request's seed, weights that it only digests.

Found by producers as `producers.engine = "toy"`: the tests put it on the path with an entry point of its own. It keeps
the engine's contract (digests of what it holds, versions per token, swaps between two tokens) and the same seed gives
the same tokens. `TOY_TOKEN_S` is how long half a sample takes; with `TOY_POISON` every sample has a NaN.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence

import numpy as np

from asyncrl.config import Config
from asyncrl.fingerprint import model_fingerprint
from asyncrl.plugins import EngineHealth, GenRequest, GenSample
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.digest import digest_tensors
from weightsync.plan import by_bucket


class ToyEngine:
    """See the module."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pause_s = float(os.environ.get("TOY_TOKEN_S", "0.001"))
        self._version = -1
        self._update: tuple[Manifest, Sequence[Tensor]] | None = None
        self._held: dict[str, bytes] = {}
        self._staged: dict[str, bytes] = {}
        self._given_up: set[str] = set()
        self._running = self._tokens = 0

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self, *, grace_s: float) -> None:
        """Nothing to free."""

    def health(self) -> EngineHealth:
        return EngineHealth(True, self._version, self._running, 0, self._tokens)

    async def generate(self, request: GenRequest) -> AsyncIterator[GenSample]:
        self._running += len(request.indices)
        try:
            for index in request.indices:
                first = self._version
                await asyncio.sleep(self._pause_s)
                second = self._version
                await asyncio.sleep(self._pause_s)
                if request.id in self._given_up:
                    return
                yield self._sample(request, index, first, second)
        finally:
            self._running -= len(request.indices)
            self._given_up.discard(request.id)

    def _sample(self, request: GenRequest, index: int, first: int, second: int) -> GenSample:
        rng = np.random.default_rng([request.seed, index])
        length = int(rng.integers(2, request.max_new_tokens + 1))
        tokens = rng.integers(3, 12, length).astype(np.int32)
        tokens[-1] = request.stop_ids[0]
        half = length // 2
        runs = ((first, length),) if first == second else ((first, half), (second, length - half))
        self._tokens += length
        logprobs = -rng.random(length).astype(np.float32)
        if os.environ.get("TOY_POISON"):
            logprobs[0] = np.nan
        return GenSample(request.id, index, tokens, logprobs, runs, "stop")

    async def abort(self, ids: Sequence[str] | None) -> int:
        self._given_up |= set(ids or ())
        return len(ids or ())

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        self._update, self._staged = (manifest, tensors), {}

    async def apply_bucket(self, number: int, data: Buffer) -> None:
        assert self._update is not None
        manifest, tensors = self._update
        view = memoryview(data).cast("B")
        for tensor in by_bucket(tensors, len(manifest.bucket_bytes))[number]:
            self._staged[tensor.name] = bytes(view[tensor.offset : tensor.offset + tensor.nbytes])

    async def commit_update(self) -> str:
        assert self._update is not None
        manifest, tensors = self._update
        self._update, self._held, self._version = None, self._staged, manifest.version
        return digest_tensors(tensors, self._held.__getitem__)[1]

    async def abort_update(self) -> None:
        self._update = None

    def fingerprint(self) -> str:
        return model_fingerprint(self._config.model.path, dtype=self._config.model.dtype)
