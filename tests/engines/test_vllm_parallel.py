"""A vLLM of two tensor-parallel workers, over Gloo, against the promises of engines: the real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from direct_lab import Learner, makes_nothing_of_a_part, takes_versions
from engine_lab import LIMIT, Bench, config_of, layout, manifest_of, plain_logprobs, save_model, stage
from rigs import lacks

from asyncrl.plugins import find
from producers.engines.vllm.base import join_digests

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


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    made = Learner()
    yield made
    made.outbox.close()


def test_both_workers_take_versions_from_the_learner(bench: Bench, learner: Learner) -> None:
    takes_versions(bench, learner)
    assert [one["shares"] for one in held(bench)] == [1, 1] and learner.outbox.formed == 1, "one group of three"


@pytest.mark.parametrize("how", ["wrong", "until"])
def test_no_token_is_made_of_a_version_that_did_not_come_whole(bench: Bench, learner: Learner, how: str) -> None:
    makes_nothing_of_a_part(bench, learner, how)
