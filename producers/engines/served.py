"""Common part of engines whose model is in another process: samples, staged versions, the first failure.

Guarantees:
1. tokens, log-probs and versions of a sample go to the outbox of its request once each; versions of tokens that were
   sent never change: a server that later reports others is `engine.broken`;
2. versions are staged in files (`staged_weights`) while generation goes on; only a commit touches the engine;
3. the first failure is raised by all later calls.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.versions import runs_of
from asyncrl.wire import Buffer, Manifest, Tensor
from producers.engines.model_files import check_tensors, read_facts
from producers.engines.staged_weights import Labels, StagedWeights

Outbox = asyncio.Queue[GenDelta | AsyncRLError | None]


async def next_delta(outbox: Outbox) -> GenDelta | None:
    """The next delta of a request; None if it was aborted. Raises the failure of the engine."""
    item = await outbox.get()  # bounded: every sample puts its end or an error there, its hang is run.hang_timeout_s
    if isinstance(item, AsyncRLError):
        raise item
    return item


class Sample:
    """One index of one request: its tokens, and the part that was sent on."""

    def __init__(self, request: GenRequest, index: int, outbox: Outbox) -> None:
        self.request = request
        self.index = index
        self.outbox = outbox
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []  # of the first tokens, if certain
        self.sent = 0
        self.task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Its id at the server."""
        raise NotImplementedError

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """New tokens, in order. Raises `engine.broken` if a token has no log-prob."""
        if len(tokens) != len(logprobs):
            raise WorkError("engine.broken", f"{len(logprobs)} log-probs for {len(tokens)} tokens", where=self.name)
        self.tokens += tokens
        self.logprobs += logprobs

    def ascertain(self, versions: Sequence[int]) -> None:
        """Set the versions of all tokens so far. Raises `engine.broken` if they contradict earlier ones."""
        if list(versions[: len(self.versions)]) != self.versions:
            raise WorkError("engine.broken", "it names other weights for tokens than before", where=self.name)
        self.versions = list(versions)

    def is_due(self, known: int | None = None) -> bool:
        """Whether there are enough new tokens for a delta; `known`: tokens whose versions can be known."""
        every = self.request.delta_tokens
        return every > 0 and (len(self.versions) if known is None else known) - self.sent >= every

    def hand_on(self, finish: str) -> None:
        """Put the new tokens with certain versions into the outbox."""
        start, end = self.sent, len(self.versions)
        self.sent = end
        delta = GenDelta(
            self.request.id,
            self.index,
            np.asarray(self.tokens[start:end], dtype=np.int32),
            np.asarray(self.logprobs[start:end], dtype=np.float32),
            runs_of(self.versions[start:]),
            finish,
            start,
        )
        self.outbox.put_nowait(delta)


class ServedBase:
    def __init__(self, config: Config, *, tag: str = "") -> None:
        """`tag` is part of every label, see `staged_weights.Labels`."""
        self._config = config
        self._max_len = config.data.max_prompt_tokens + config.longest_response
        self._facts = read_facts(config.model.path)
        self._staged = StagedWeights(config.run_dir / "scratch")
        self._labels = Labels(tag)
        self._failure: AsyncRLError | None = None
        self._version = -1
        self._paused = False
        self._generated = 0
        self._swap_s = 0.0

    def _alive(self) -> Any:
        """Raise the failure, if there is one; `engine.broken` before the start."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Digest of the model's shape, its tokenizer and the run's dtype; reads small files, no weights."""
        return model_fingerprint(self._config.model.path, dtype=self._config.model.dtype)

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Make room for a version in a file. Raises `sync.plan` for anything but this model's whole weights."""
        self._alive()
        check_tensors(self._facts, tensors)
        await asyncio.to_thread(self._staged.begin, manifest, tensors)

    def bucket_room(self, number: int) -> memoryview | None:
        """Memory for the bytes of a bucket before they are applied."""
        return self._staged.room(number)

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        """Take the bytes of one bucket; the digest of the file's bytes."""
        self._alive()
        return await asyncio.to_thread(self._staged.apply, number, data)

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        """The bytes of a bucket of the current version."""
        return await asyncio.to_thread(self._staged.read, number, into)

    async def abort_update(self) -> None:
        """Drop a begun update; the engine has not seen it."""
        await asyncio.to_thread(self._staged.abort)


def sample_seed(seed: int, index: int) -> int:
    """The seed of one sample: 63 bits from (seed, index)."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
