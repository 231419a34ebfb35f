"""What the stand-in servers refuse, hold and report: where they were lenient, tests on them would prove nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rig_sglang
from engine_lab import EOS, LIMIT, VOCAB, layout, plain_logprobs, save_model
from served import Served

from asyncrl.errors import WorkError
from producers.engines.group_sender import GroupSender, pieces
from producers.engines.http import HttpClient, Refused
from producers.engines.sglang.control_api import SGLangServer
from weightsync.plan.buckets import bucket_starts, group_by_bucket

HERE = Path(__file__).parent
PROMPT = [3, 4, 5, 6, 7]
LONG = 400  # tokens of a sample that is to be met under way: at least 0.8 s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("standin-model"))


@pytest.fixture(scope="module")
def sglang(folder: Path) -> Iterator[Served]:
    served = rig_sglang.stand_in(folder)
    yield served
    served.end()


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[Served]:
    command = [sys.executable, str(HERE / "standin_vllm.py"), "--model-path", str(folder)]
    served = Served(command, log=folder / "standin-vllm.log", environment={"OMP_NUM_THREADS": "1"})
    yield served
    served.end()


def run(served: Served, body: Callable[[HttpClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        client = HttpClient(served.url)
        try:
            await _up(client)
            await body(client)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(whole(), 120))


async def _up(client: HttpClient) -> None:
    for _ in range(400):
        try:
            await client.get("/health", timeout_s=60)
            return
        except WorkError:
            await asyncio.sleep(0.2)
    raise AssertionError("the stand-in does not start")


async def begun(client: HttpClient, *names: str) -> None:
    """Wait until these samples have tokens."""
    made: dict[str, int] = {}
    while not all(made.get(name) for name in names):
        await asyncio.sleep(0.005)
        made = await client.get("/standin/tokens", timeout_s=60)


def sglang_body(**more: Any) -> dict[str, Any]:
    chosen = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 5} | more.pop("chosen", {})
    return {"input_ids": PROMPT, "sampling_params": chosen, "return_logprob": True, "rid": "r", "extra_key": "s"} | more


def check(prompt: list[int], tokens: list[int], logprobs: list[float], *, seed: int) -> None:
    expected = plain_logprobs(seed, prompt, np.asarray(tokens, dtype=np.int32))
    assert np.abs(expected - np.asarray(logprobs)).max() < LIMIT


def test_sglang_takes_weights_in_a_session_and_names_the_tokens(sglang: Served) -> None:
    async def body(client: HttpClient) -> None:
        server = SGLangServer(client, swap_s=30)
        sender = GroupSender("standin-1", workers=1, timeout_s=30)
        port = await sender.listen()
        with pytest.raises(Refused, match=r"between begin"):
            await server.update(layout(1)[0][:1], group="nobody", label="x", sending=asyncio.sleep(0))
        joining = server.join_group("standin-1", host="127.0.0.1", port=port, size=2, backend="gloo")
        await asyncio.gather(joining, sender.join())
        with pytest.raises(Refused, match="no weight-update session"):
            await server.end()
        asked = asyncio.create_task(
            client.post("/generate", sglang_body(chosen={"max_new_tokens": LONG}), timeout_s=60)
        )
        await begun(client, "r")
        await server.pause("in_place")
        with pytest.raises(Refused, match="requests are running"):
            await server.flush()
        await server.begin()
        with pytest.raises(Refused, match="already open"):
            await server.begin()
        tensors, manifest, buckets = layout(1)
        groups = group_by_bucket(tensors, len(manifest.bucket_bytes))
        for number, group in enumerate(groups):
            for part in pieces(group):
                last = number == len(groups) - 1 and part[-1] is group[-1]
                data = bytearray(buckets[number][part[0].offset : part[-1].offset + part[-1].nbytes])
                sending = sender.send(memoryview(data))
                await server.update(part, group="standin-1", label="one" if last else None, sending=sending)
        await server.end()
        assert await server.label() == "one"
        await asyncio.sleep(0.1)
        assert not asked.done()
        await server.resume()
        meta = (await asked)["meta_info"]
        spans = meta["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "one"] and spans[1]["end"] == LONG
        later = (await client.post("/generate", sglang_body(rid="later", extra_key="t"), timeout_s=60))["meta_info"]
        values = [value for value, _, _ in later["output_token_logprobs"]]
        check(PROMPT, [token for _, token, _ in later["output_token_logprobs"]], values, seed=1)
        # the prompt is in the prefix cache of salt s, with K/V of the weights before
        stale = (await client.post("/generate", sglang_body(rid="stale"), timeout_s=60))["meta_info"]
        with pytest.raises(AssertionError):
            check(
                PROMPT,
                [t for _, t, _ in stale["output_token_logprobs"]],
                [v for v, _, _ in stale["output_token_logprobs"]],
                seed=1,
            )
        await server.leave_group("standin-1")
        await sender.close()

    run(sglang, body)


def test_sglang_refuses_what_does_not_fit(sglang: Served) -> None:
    async def body(client: HttpClient) -> None:
        server = SGLangServer(client, swap_s=30)
        sender = GroupSender("standin-2", workers=1, timeout_s=30)
        port = await sender.listen()
        joining = server.join_group("standin-2", host="127.0.0.1", port=port, size=2, backend="gloo")
        await asyncio.gather(joining, sender.join())
        await server.begin()
        first = layout(1)[0][0]
        wrong = type(first)("nobody", first.dtype, first.shape, 0, 0, first.nbytes)
        with pytest.raises(Refused, match="Failed to load nobody"):
            data = memoryview(bytearray(first.nbytes))
            await server.update([wrong], group="standin-2", label="x", sending=sender.send(data))
        await server.recover()
        with pytest.raises(Refused, match="context length"):
            await client.post("/generate", sglang_body(chosen={"max_new_tokens": 600}), timeout_s=30)
        await server.leave_group("standin-2")
        await sender.close()

    run(sglang, body)


def test_sglang_gives_up_and_retracts(sglang: Served) -> None:
    async def body(client: HttpClient) -> None:
        server = SGLangServer(client, swap_s=30)
        chosen = {"max_new_tokens": LONG}
        given_up = asyncio.create_task(client.post("/generate", sglang_body(rid="g/1;", chosen=chosen), timeout_s=60))
        kept = asyncio.create_task(
            client.post("/generate", sglang_body(rid="k", chosen={"max_new_tokens": LONG}), timeout_s=60)
        )
        await begun(client, "g/1;", "k")
        await server.abort("g/")
        answer = await given_up
        assert answer["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(answer["output_ids"]) < LONG
        await server.pause("retract")
        await server.flush()
        await server.resume()
        answer = await kept
        assert len(answer["output_ids"]) == LONG and answer["meta_info"]["num_retractions"] <= 1

    run(sglang, body)


def vllm_body(**more: Any) -> dict[str, Any]:
    chosen = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, "seed": 5, "logprobs": 0} | more.pop(
        "chosen", {}
    )
    return {"token_ids": PROMPT, "sampling_params": chosen, "request_id": "r", "cache_salt": "s"} | more


def test_vllm_takes_a_version_from_a_file(vllm: Served, tmp_path: Path) -> None:
    async def body(client: HttpClient) -> None:
        tensors, manifest, buckets = layout(1)
        starts, size = bucket_starts(manifest.bucket_bytes)
        file = bytearray(size)
        for start, data in zip(starts, buckets, strict=True):
            file[start : start + len(data)] = data
        (tmp_path / "weights").write_bytes(file)
        info = {
            "path": str(tmp_path / "weights"),
            "bucket_bytes": list(manifest.bucket_bytes),
            "tensors": [[t.name, t.dtype, list(t.shape), t.bucket, t.offset, t.nbytes] for t in tensors],
        }
        with pytest.raises(WorkError, match="no weight update was started"):
            await client.post("/update_weights", {"update_info": info}, timeout_s=30)
        await client.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=30)
        events: list[dict[str, Any]] = []

        async def ask() -> None:
            wanted = vllm_body(stream=True, chosen={"max_tokens": LONG})
            async for event in client.stream("/inference/v1/generate", wanted, idle_s=30):
                events.append(event["choices"][0])

        asked = asyncio.create_task(ask())
        while not events:
            await asyncio.sleep(0.01)
        await client.post("/pause", timeout_s=30, params={"mode": "keep", "clear_cache": "false"})
        assert (await client.get("/is_paused", timeout_s=30))["is_paused"]
        await client.post("/start_weight_update", timeout_s=30)
        await client.post("/update_weights", {"update_info": info}, timeout_s=30)
        await client.post("/finish_weight_update", {"weight_version": "one"}, timeout_s=30)
        held = await client.post("/collective_rpc", {"method": "asyncrl_held"}, timeout_s=30)
        assert list(held["results"][0]["digests"].values()) == list(manifest.bucket_digests)
        await client.post("/resume", timeout_s=30)
        await asked
        spans = events[-1]["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "one"] and spans[1]["end"] == LONG
        assert sum(len(event["token_ids"]) for event in events) == LONG and events[-1]["finish_reason"] == "length"
        assert all(event["weight_versions"] is None for event in events[:-1])
        answer = await client.post("/inference/v1/generate", vllm_body(request_id="n", cache_salt="t"), timeout_s=60)
        choice = answer["choices"][0]
        check(PROMPT, choice["token_ids"], [item["logprob"] for item in choice["logprobs"]["content"]], seed=1)
        assert (await client.get("/weight_info", timeout_s=30))["weight_version"] == "one"

    run(vllm, body)


def test_vllm_takes_a_version_from_a_group_and_ends_at_its_stop_tokens(vllm: Served) -> None:
    async def body(client: HttpClient) -> None:
        tensors, manifest, buckets = layout(2)
        sender = GroupSender("standin-v", workers=1, timeout_s=30)
        info = {
            "group": "standin-v",
            "master_address": "127.0.0.1",
            "master_port": await sender.listen(),
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
            "timeout_s": 30.0,
        }
        await asyncio.gather(
            client.post("/init_weight_transfer_engine", {"init_info": info}, timeout_s=30), sender.join()
        )
        await client.post("/pause", timeout_s=30, params={"mode": "wait"})
        await client.post("/start_weight_update", timeout_s=30)
        described = [[t.name, t.dtype, list(t.shape), t.bucket, t.offset, t.nbytes] for t in tensors]

        async def send() -> None:
            for data in buckets:
                await sender.send(memoryview(bytearray(data)))

        update = {"update_info": {"bucket_bytes": list(manifest.bucket_bytes), "tensors": described}}
        await asyncio.gather(client.post("/update_weights", update, timeout_s=30), send())
        await client.post("/finish_weight_update", {"weight_version": "two"}, timeout_s=30)
        await client.post("/resume", timeout_s=30)
        wanted = vllm_body(
            cache_salt="u", chosen={"max_tokens": 60, "ignore_eos": False, "stop_token_ids": list(range(60))}
        )
        choice = (await client.post("/inference/v1/generate", wanted, timeout_s=60))["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] < 60
        check(PROMPT, choice["token_ids"], [item["logprob"] for item in choice["logprobs"]["content"]], seed=2)
        await client.post("/shutdown_weight_transfer_engine", timeout_s=30)
        await sender.close()

    run(vllm, body)


def test_vllm_dies_where_it_would_decode_without_layers(folder: Path) -> None:
    command = [sys.executable, str(HERE / "standin_vllm.py"), "--model-path", str(folder)]
    served = Served(command, log=folder / "dies.log", environment={"OMP_NUM_THREADS": "1"})

    async def body(client: HttpClient) -> None:
        await client.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=30)
        await client.post("/pause", timeout_s=30, params={"mode": "keep"})
        await client.post("/start_weight_update", timeout_s=30)
        with pytest.raises(WorkError):
            await client.post("/resume", timeout_s=30)

    try:
        run(served, body)
        assert served.child.wait(60) == 13
    finally:
        served.end()


def test_faults_come_on_demand(sglang: Served) -> None:
    async def body(client: HttpClient) -> None:
        for what, words in (("garbage", "no JSON"), ("500", "answered 500"), ("hang", "no answer")):
            await client.post("/standin/fault", {"path": "/weights_checker", "what": what, "skip": 1}, timeout_s=60)
            assert (await client.post("/weights_checker", {"action": "checksum"}, timeout_s=60))["success"]
            with pytest.raises(WorkError, match=words):
                await client.post("/weights_checker", {"action": "checksum"}, timeout_s=1)
        assert EOS < VOCAB

    run(sglang, body)
