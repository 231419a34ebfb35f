"""A vLLM of two tensor-parallel workers, over Gloo, against the promises of engines: the real vLLM."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from engine_lab import (
    LIMIT,
    Bench,
    all_of,
    config_of,
    layout,
    manifest_of,
    plain_logprobs,
    request,
    save_model,
    stage,
)
from rigs import lacks

from asyncrl.errors import AsyncRLError
from asyncrl.plugins import find
from asyncrl.wire import Instruction, Manifest, RoundReply
from producers.engines.vllm.base import join_digests
from weightsync.plan.buckets import Plan, group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.plan.sum_digest import SUM
from weightsync.transports.base import TransportError
from weightsync.transports.collective import CollectiveOutbox
from weightsync.transports.packing import Packing

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(lacks("vllm", "vllm")()), reason="no vLLM here")]
START_S = 600.0
PROMPTS = [[3, 4, 5, 6, 7], [9, 10], list(range(11, 40))]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One engine for all tests: it takes minutes to start."""
    folder = save_model(tmp_path_factory.mktemp("parallel-model"))
    more = "engine_args = {tensor_parallel_size = 2}\n[weightsync]\ntransport = 'direct'\nin_place = true"
    settings = config_of(folder, engine="vllm", kv="keep", more=more)
    made = Bench(find("asyncrl.engines", "vllm")(settings))
    try:
        made.run(made.engine.start(), limit_s=START_S)
        yield made
    finally:
        made.close()


def held(bench: Bench) -> list[dict[str, Any]]:
    engine: Any = bench.engine
    found: list[dict[str, Any]] = bench.run(engine._llm.collective_rpc("asyncrl_held"))
    return found


def test_two_workers_sample_as_the_whole_model_does(bench: Bench) -> None:
    """Log-probs of a plain forward, which one worker has as well; the same seed gives the same tokens after a swap."""
    for seed in (1, 2, 1):
        version = bench.push(seed)
        for prompt in PROMPTS:
            for index, item in bench.ask(prompt, (0, 1)).items():
                assert item.runs == ((version, 24),) and item.index == index
                assert np.abs(plain_logprobs(seed, prompt, item.token_ids) - item.logprobs).max() < LIMIT
    again = [bench.ask(PROMPTS[0], (1,), seed=77)[1].token_ids.tolist() for _ in range(2)]
    bench.push(1)
    assert again[0] == again[1] == bench.ask(PROMPTS[0], (1,), seed=77)[1].token_ids.tolist()


def test_both_workers_digest_their_half(bench: Bench) -> None:
    bench.push(2)
    workers, manifest = held(bench), layout(2)[1]
    buckets = len(manifest.bucket_bytes)
    assert [one["shares"] for one in workers] == [2, 2] and buckets > 3
    assert sorted(sorted(map(int, one["digests"])) for one in workers) == [
        list(range(rank, buckets, 2)) for rank in (0, 1)
    ]
    assert join_digests(workers, buckets=buckets) == manifest.digest
    assert all(one["seconds"]["load"] > 0 for one in workers)


@pytest.mark.parametrize("bucket", range(len(layout(1)[1].bucket_bytes)))
def test_a_byte_that_changes_in_the_file_is_told_by_the_worker_of_its_bucket(bench: Bench, bucket: int) -> None:
    """After the receiver's own check: the commit gives another digest, which is `engine.broken` at the receiver."""
    engine: Any = bench.engine
    bench.version += 1
    manifest = bench.run(stage(engine, 1, bench.version))
    engine._staged.pending_version().bucket(bucket)[5] ^= 1
    assert bench.run(engine.commit_update()) != manifest.digest
    digests = {number: digest for one in held(bench) for number, digest in one["digests"].items()}
    wrong = [int(n) for n, digest in digests.items() if digest != manifest_of(1, 0).bucket_digests[int(n)]]
    assert wrong == [bucket]


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


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    made = Learner()
    yield made
    made.outbox.close()


def check(bench: Bench, seed: int) -> None:
    item = bench.ask(PROMPTS[0])[0]
    assert item.runs == ((bench.version, 24),)
    assert np.abs(plain_logprobs(seed, PROMPTS[0], item.token_ids) - item.logprobs).max() < LIMIT


def test_both_workers_take_versions_from_the_learner(bench: Bench, learner: Learner) -> None:
    for seed in (2, 1):
        manifest = learner.push(bench, seed)
        assert bench.engine.health().version == -1, "the old weights are gone, the new ones not committed"
        assert bench.run(bench.engine.commit_update()) == manifest.digest
        check(bench, seed)
        assert all(tuple(one["digests"].values()) == manifest.bucket_digests for one in held(bench))
    assert learner.outbox.formed == 1, "both came in one group of three"
    assert bench.run(bench.engine.attest()) in ("", manifest.digest)  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["wrong", "until"])
def test_no_token_is_made_of_a_version_that_did_not_come_whole(bench: Bench, learner: Learner, how: str) -> None:
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
