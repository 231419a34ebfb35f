"""The buffer's client for reward workers: samples to score, scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl import wire
from asyncrl.net.keys import Keys
from asyncrl.wire import IntArray
from asyncrl.wire.batch_arrays import decode_row
from buffers.client.connection import MAX_BYTES, AsyncClient
from buffers.client.images import FETCH_S, ImageReader, shared_folder


class RewardTask(msgspec.Struct, frozen=True):
    """One sample to score."""

    item: wire.RewardItem
    prompt_ids: IntArray
    response_ids: IntArray
    row: dict[str, Any]
    mask: Any = None  # u1 [T]: 1 where the policy sampled the token; None: everywhere


class RewardClient(AsyncClient):
    """Leases samples and submits scores."""

    role = "reward"

    def __init__(
        self,
        address: str,
        *,
        name: str,
        judge: str = "",
        keys: Keys | None = None,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(address, name=name, keys=keys, max_bytes=max_bytes, timeout_s=timeout_s)
        self.judge = judge  # judge that this worker scores for
        self._images = ImageReader()

    async def hello(
        self, fingerprint: str = "", role: str = "", run_id: str = "", *, evaluation_rows: int = 0
    ) -> wire.Welcome:
        """Introduce this process; must come first."""
        welcome = await super().hello(fingerprint, role, run_id, evaluation_rows=evaluation_rows)
        self._images.folder = shared_folder(welcome.segments, welcome.nonce)
        return welcome

    async def images(self, digests: Iterable[str]) -> tuple[dict[str, bytes], dict[str, str]]:
        """The encoded images by digest, and the reasons of those that cannot be had."""
        search = self._images.search(digests)
        while search.wanted:
            search.take_answer(await self._ask(search.request(), wait_s=FETCH_S))
        return search.images, search.problems

    async def work(self, *, max_samples: int, wait_s: float) -> tuple[list[RewardTask], bool]:
        """Samples to score, and whether the run is complete."""
        packet = await self._ask(wire.RewardRequest(self.name, max_samples, wait_s, self.judge), wait_s=wait_s)
        work: wire.RewardWork = packet.message
        tasks = []
        for item, payload in zip(work.items, packet.payloads, strict=True):
            arrays = wire.unpack_arrays(item.fields, payload)
            tasks.append(
                RewardTask(item, arrays["prompt"], arrays["response"], decode_row(item.row), arrays.get("mask"))
            )
        return tasks, work.done

    async def submit(
        self, scores: Sequence[wire.Score], failures: Sequence[wire.RewardFailure] = (), *, reward_version: str = ""
    ) -> wire.ScoresReply:
        """Submit rewards, and failures with their reason."""
        reply: wire.ScoresReply = (
            await self._ask(wire.Scores(self.name, tuple(scores), tuple(failures), reward_version, self.judge))
        ).message
        return reply

    async def submit_teaching(
        self, item: wire.RewardItem, arrays: Mapping[str, bytes], *, version: str
    ) -> wire.ScoresReply:
        """Submit what a teacher says about a sample: the arrays of `wire.TeacherLogprobs` as bytes, by name."""
        given = {name: np.frombuffer(data, "<i4" if name == "teacher_ids" else "<f4") for name, data in arrays.items()}
        fields, payload = wire.pack_arrays(given)
        message = wire.TeacherLogprobs(self.name, self.judge, item.group, item.index, item.token, version, fields)
        reply: wire.ScoresReply = (await self._ask(message, (payload,))).message
        return reply
