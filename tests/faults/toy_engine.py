"""An engine without a model, for faults at speed: tokens from the request's seed, weights that it only digests.

Found by producers as `producers.engine = "toy"`: the tests put it on the path with an entry point of its own. It keeps
the engine's contract (digests of what it holds, bytes for deltas, versions per token, swaps between two tokens, with
`weightsync.in_place` no second copy and no token meanwhile) and the same seed gives the same tokens, also of a sample
that was begun elsewhere. `TOY_TOKEN_S` is how long half a sample takes, or with `delta_tokens` one delta; with
`TOY_POISON` every sample has a NaN.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence

import numpy as np

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities, EngineHealth, GenDelta, GenRequest
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest

STILL_S = 0.005  # between two looks whether a halted engine may go on


class ToyEngine:
    """See the module."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pause_s = float(os.environ.get("TOY_TOKEN_S", "0.001"))
        self._version = -1
        self._update: tuple[Manifest, list[list[Tensor]]] | None = None
        self._staged: dict[int, bytearray] = {}
        self._missing: set[int] = set()
        self._now: tuple[Manifest, list[list[Tensor]]] | None = None  # the version in force, its tensors by bucket
        self.held: dict[int, bytearray] = {}  # its buckets
        self._dirty = False
        self._given_up: set[str] = set()
        self._running = self._tokens = 0

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self, *, grace_s: float) -> None:
        """Nothing to free."""

    def health(self) -> EngineHealth:
        return EngineHealth(True, -1 if self._dirty else self._version, self._running, 0, self._tokens)

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        if request.max_new_tokens == 1:  # the probe at a producer's start: certain of one token, and at once
            for index in request.indices:
                certain = np.array([2], dtype=np.int32), np.zeros(1, dtype=np.float32)
                yield GenDelta(request.id, index, *certain, ((self._version, 1),), "length")
            return
        self._running += len(request.indices)
        try:
            for index in request.indices:
                if request.delta_tokens or request.begun:
                    async for delta in self._deltas(request, index):
                        yield delta
                    continue
                await self._token()
                first = self._version
                await self._token()
                second = self._version
                if request.id in self._given_up:
                    return
                yield self._sample(request, index, first, second)
        finally:
            self._running -= len(request.indices)
            self._given_up.discard(request.id)

    async def _token(self) -> None:
        """Half a sample; the weights that are there at its end made it."""
        await asyncio.sleep(self._pause_s)
        while self._dirty:
            await asyncio.sleep(STILL_S)

    async def _deltas(self, request: GenRequest, index: int) -> AsyncIterator[GenDelta]:
        """A sample in pieces, from `begun` on."""
        whole = self._sample(request, index, 0, 0)
        tokens, logprobs = whole.token_ids[request.begun :], whole.logprobs[request.begun :]
        every = request.delta_tokens or len(tokens)
        for start in range(0, len(tokens), every):
            await self._token()
            if request.id in self._given_up:
                return
            part = tokens[start : start + every]
            finish = "stop" if start + every >= len(tokens) else ""
            runs = ((self._version, len(part)),)
            yield GenDelta(request.id, index, part, logprobs[start : start + every], runs, finish, start)

    def _sample(self, request: GenRequest, index: int, first: int, second: int) -> GenDelta:
        rng = np.random.default_rng([request.seed, index])
        length = int(rng.integers(2, request.begun + request.max_new_tokens + 1))
        tokens = rng.integers(3, 12, length).astype(np.int32)
        tokens[-1] = request.stop_ids[0]
        half = length // 2
        runs = ((first, length),) if first == second else ((first, half), (second, length - half))
        self._tokens += length
        logprobs = -rng.random(length).astype(np.float32)
        if os.environ.get("TOY_POISON"):
            logprobs[0] = np.nan
        return GenDelta(request.id, index, tokens, logprobs, runs, "stop")

    async def abort(self, ids: Sequence[str] | None) -> int:
        self._given_up |= set(ids or ())
        return len(ids or ())

    @property
    def in_place(self) -> bool:
        """As the configuration says."""
        return self._config.weightsync.in_place

    def capabilities(self) -> EngineCapabilities:
        slots, longest = self._config.producers.slots, self._config.sampling.max_new_tokens
        return EngineCapabilities("toy", slots, longest, encodings=("full", "adapter"), in_place=self.in_place)

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        groups = group_by_bucket(tensors, len(manifest.bucket_bytes))
        self._update, self._missing = (manifest, groups), set(range(len(groups)))
        self._staged = {}
        if self.in_place:
            self._dirty, self._staged, self._now = True, self.held, None

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        assert self._update is not None
        self._staged[number] = bytearray(data)
        self._missing.discard(number)
        return bucket_digest(self._update[1][number], self._staged[number])

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        if self._now is None or number not in self.held or len(self.held[number]) != into.nbytes:
            return False
        into[:] = self.held[number]
        return True

    async def attest(self) -> str:
        if self._now is None:
            return ""
        manifest, groups = self._now
        digests = [bucket_digest(group, self.held[number]) for number, group in enumerate(groups)]
        return version_digest(digests, base=manifest.base, adapter=manifest.adapter)

    async def commit_update(self) -> str:
        assert self._update is not None and not self._missing
        self._now, self.held, self._version = self._update, self._staged, self._update[0].version
        self._update, self._dirty = None, False
        return await self.attest()

    async def abort_update(self) -> None:
        self._update = None

    def fingerprint(self) -> str:
        return model_fingerprint(self._config.model.path, dtype=self._config.model.dtype)
