"""vLLM's checksums of its parameters: taken right after a commit if that is cheap, compared later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from blake3 import blake3

LIMIT_S = 60.0
SHARE = 0.05  # of the time between commits, for checksums right after one
CHEAP_S = 0.5  # or shorter than this


class Checksums:
    """`ask` returns the checksums of all workers; `fail` breaks the engine and returns the error."""

    def __init__(
        self, ask: Callable[[], Awaitable[Any]], fail: Callable[[str, BaseException | None], Exception]
    ) -> None:
        self._ask = ask
        self._fail = fail
        self._label = ""  # of the version in force
        self._recorded = ""  # right after the commit; empty if they were not taken
        self._took_s = 0.0
        self._committed_at = 0.0
        self._recording: asyncio.Task[None] | None = None

    def forget(self) -> None:
        """A commit begins."""
        self._recorded = ""

    def record(self, label: str) -> None:
        """A commit is done: take the checksums that later ones are compared with, if that is cheap."""
        # Checksums that were under way are of the version before, or of a half-loaded one.
        self._label, self._recorded = label, ""
        since, self._committed_at = time.monotonic() - self._committed_at, time.monotonic()
        self.close()
        if self._took_s <= max(CHEAP_S, SHARE * since):
            self._recording = asyncio.create_task(self._record(label))

    async def _record(self, label: str) -> None:
        found = await self._take()
        if self._label == label and not self._recorded:
            self._recorded = found

    async def _take(self) -> str:
        started = time.perf_counter()
        try:
            workers = await asyncio.wait_for(self._ask(), LIMIT_S)
        except Exception as error:  # any error of vLLM or of the connection
            raise self._fail("vLLM gave no checksums", error) from error
        self._took_s = time.perf_counter() - started
        return blake3(msgspec.json.encode(workers, order="deterministic")).hexdigest(length=16)

    async def attest(self, digest: str) -> str:
        """`digest` while the checksums are those after the commit, else another; empty if they were not taken then
        (they are now), or if a commit came meanwhile."""
        label = self._label
        if self._recording is not None and not self._recording.done():
            await asyncio.wait({self._recording}, timeout=LIMIT_S)
        found = await self._take()
        if label != self._label:
            return ""
        if not self._recorded:
            self._recorded = found
            return ""
        return digest if found == self._recorded else found

    def close(self) -> None:
        if self._recording is not None:
            self._recording.cancel()
