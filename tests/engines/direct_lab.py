"""The learner's end of transport `direct`, and what every engine that takes it promises."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from engine_lab import LIMIT, Bench, all_of, layout, plain_logprobs, request

from asyncrl.errors import AsyncRLError
from asyncrl.wire import Instruction, Manifest, RoundReply
from weightsync.plan.buckets import Plan, group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.plan.sum_digest import SUM
from weightsync.transports.base import TransportError
from weightsync.transports.collective import CollectiveOutbox
from weightsync.transports.packing import Packing

PROMPTS = [[3, 4, 5, 6, 7], [9, 10]]


class Learner:
    """The sending end of transport `direct`."""

    def __init__(self) -> None:
        self.outbox = CollectiveOutbox("127.0.0.1", timeout_s=20.0, backend="gloo")
        self.generation = 0

    def send(self, seed: int, generation: int, *, wrong: int, until: int) -> None:
        """Send these weights, with wrong bytes in the bucket `wrong`, or only the buckets before `until`."""
        tensors, manifest, buckets = layout(seed)
        plan = Plan(tensors, manifest.bucket_bytes, manifest.plan)
        reply = RoundReply(1, "transferring", generation, {}, {"m": 1})
        with self.outbox.form(reply, deadline_s=20.0) as sending:
            packing = Packing(plan, begin=sending.begin, wait=sending.settle)
            for place in tensors:
                if place.bucket == until:
                    raise TransportError("the learner fails here")
                data = bytearray(buckets[place.bucket][place.offset : place.offset + place.nbytes])
                data[0] ^= place.bucket == wrong
                packing.add(place.name, torch.frombuffer(data, dtype=torch.uint8))
            packing.end()

    def push(self, bench: Bench, seed: int, *, wrong: int = -1, until: int = -1) -> Manifest:
        """A version of these weights by `direct`, not committed."""
        self.generation += 1
        bench.version += 1
        tensors, plain, buckets = layout(seed)
        groups = group_by_bucket(tensors, len(buckets))
        sums = tuple(bucket_digest(group, data, like=SUM) for group, data in zip(groups, buckets, strict=True))
        manifest = Manifest(bench.version, plain.plan, plain.bucket_bytes, sums, version_digest(sums))
        order = Instruction(
            "receive", 1, manifest, (), "direct", self.outbox.open(), 1, 2, self.generation, deadline_s=20.0
        )
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(self.send, seed, self.generation, wrong=wrong, until=until)
            try:
                bench.run(bench.engine.receive_update(order, tensors))  # type: ignore[attr-defined]
            finally:
                error = sent.exception(60)
                assert error is None or until >= 0, error
        return manifest


def check(bench: Bench, seed: int) -> None:
    item = bench.ask(PROMPTS[0])[0]
    assert item.runs == ((bench.version, 24),)
    assert np.abs(plain_logprobs(seed, PROMPTS[0], item.token_ids) - item.logprobs).max() < LIMIT


def takes_versions(bench: Bench, learner: Learner) -> None:
    """Two versions from device to device, with their digests."""
    for seed in (2, 1):
        manifest = learner.push(bench, seed)
        assert bench.engine.health().version == -1, "the old weights are gone, the new ones not committed"
        assert bench.run(bench.engine.commit_update()) == manifest.digest
        check(bench, seed)
    assert bench.run(bench.engine.attest()) in ("", manifest.digest)  # type: ignore[attr-defined]


def makes_nothing_of_a_part(bench: Bench, learner: Learner, how: str) -> None:
    """A bucket is wrong, or the learner fails in the middle: no token until a staged version is committed."""

    async def ask() -> dict[int, Any]:
        return await all_of(bench.engine, request(bench.name(), PROMPTS[1]))

    with pytest.raises(AsyncRLError) as caught:
        learner.push(bench, 2, **{how: 2})
    assert caught.value.code == "sync.failed", caught.value
    bench.run(bench.engine.abort_update())
    assert bench.engine.health().version == -1 and bench.engine.health().alive
    asked = asyncio.run_coroutine_threadsafe(ask(), bench._loop)
    made = bench.engine.health().generated_tokens
    time.sleep(0.5)
    assert bench.engine.health().generated_tokens == made and not asked.done(), "it stands still"
    version = bench.push(2)  # by the staged way
    item = asked.result(60)[0]
    assert item.runs == ((version, 24),)
    assert np.abs(plain_logprobs(2, PROMPTS[1], item.token_ids) - item.logprobs).max() < LIMIT
    manifest = learner.push(bench, 1)
    assert bench.run(bench.engine.commit_update()) == manifest.digest
    check(bench, 1)
