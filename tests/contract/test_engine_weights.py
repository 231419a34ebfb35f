"""New weights in the hf engine: exchanged, attested, in place, as adapters; K/V and prefixes at a swap."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engines import (
    PROMPTS,
    _llama,
    _qwen3,
    all_of,
    config_of,
    layout,
    make,
    plain_logprobs,
    push,
    request,
    run,
    save,
    stage,
    tokens_made,
)

from asyncrl.config import Config
from asyncrl.engine import GenDelta
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.versions import expand
from asyncrl.wire import Manifest
from producers.engines.hf.engine import HFEngine
from producers.engines.hf.weights import ModelWeights
from weightsync.encoding.adapter import AdapterConfig, config_text
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors, version_digest


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "qwen3", _qwen3())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama", _llama())


def with_version(manifest: Manifest, version: int) -> Manifest:
    return Manifest(version, manifest.plan, manifest.bucket_bytes, manifest.bucket_digests, manifest.digest)


def in_place(config: Config) -> Config:
    import msgspec

    return msgspec.structs.replace(config, weightsync=msgspec.structs.replace(config.weightsync, in_place=True))


def places(engine: HFEngine) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in engine._model.named_parameters()}  # type: ignore[union-attr]


# ---------------------------------------------------------------- exchange


def test_versions_are_exchanged_not_copied(qwen3: Path) -> None:
    """Every parameter gets another storage, two storages take turns, and samples follow the weights."""

    async def body(engine: HFEngine) -> list[dict[str, int]]:
        found = []
        for version in range(4):
            model = make(_qwen3(), seed=version)
            await push(engine, model, version)
            found.append(places(engine))
            group = await all_of(engine, request(f"v{version}", PROMPTS[0], (0, 1)))
            for item in group.values():
                plain = plain_logprobs(model, PROMPTS[0], item.token_ids, temperature=1.0)
                assert np.abs(plain - item.logprobs).max() < 1e-4
        return found

    found = run(config_of(qwen3, slots=2), body)
    assert all(found[0][name] != found[1][name] for name in found[0])
    assert found[0] == found[2] and found[1] == found[3]


def test_bytes_are_put_where_they_stay() -> None:
    """The room that is lent is what the parameters become; an abort in the middle costs the room, not the model."""
    model = make(_qwen3(), seed=1)
    tensors, manifest, buckets = layout(model)
    weights = ModelWeights(make(_qwen3(), seed=2).requires_grad_(False))
    for version in range(3):
        weights.begin(with_version(manifest, version), tensors)
        for number, data in enumerate(buckets):
            room = weights.bucket_room(number)
            assert room is not None and room.nbytes == len(data)
            room[:] = data
            assert weights.apply(number, room) == manifest.bucket_digests[number]
            room[0] ^= 1
            assert weights.apply(number, room) != manifest.bucket_digests[number]  # nobody made a copy
            room[0] ^= 1
        weights.exchange()
        assert weights.digest() == manifest.digest
        room[tensors[-1].offset] ^= 1
        assert weights.digest() != manifest.digest
        room[tensors[-1].offset] ^= 1
    weights.begin(with_version(manifest, 3), tensors)
    late = weights.bucket_room(0)
    assert late is not None
    weights.abort()
    weights.begin(with_version(manifest, 4), tensors)
    for number, data in enumerate(buckets):
        weights.apply(number, data)
    late[:] = bytes(late.nbytes)  # a transport that did not hear of the abort
    weights.exchange()
    assert weights.digest() == manifest.digest


def test_room_is_lent_only_where_bytes_can_stay_as_they_are() -> None:
    model = make(_qwen3(), seed=1, dtype=torch.bfloat16)
    tensors, manifest, _ = layout(model)
    wider = ModelWeights(make(_qwen3(), seed=2).requires_grad_(False))
    wider.begin(manifest, tensors)
    assert wider.bucket_room(0) is None
    same = ModelWeights(model, in_place=True)
    same.begin(manifest, tensors)
    assert same.bucket_room(0) is None  # in place an abort could not take it back


def test_the_pause_does_not_grow_with_the_model() -> None:
    """Best of several exchanges of 2 MB and of 64 MB in the same number of tensors, beside a copy of the larger."""
    pauses = {}
    for width in (128, 724):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(32)))
        model.requires_grad_(False)
        weights = ModelWeights(model)
        tensors, manifest, buckets = layout(model)  # type: ignore[arg-type]
        times = []
        for version in range(6):
            weights.begin(with_version(manifest, version), tensors)
            for number, data in enumerate(buckets):
                assert weights.apply(number, data) == manifest.bucket_digests[number]
            started = time.perf_counter()
            weights.exchange()
            times.append(time.perf_counter() - started)
            assert weights.digest() == manifest.digest
        pauses[width] = min(times)
    target = [torch.empty_like(value) for value in model.parameters()]
    started = time.perf_counter()
    for place, value in zip(target, model.parameters(), strict=True):
        place.copy_(value)
    copy_s = time.perf_counter() - started
    small, large = pauses[128], pauses[724]
    print(
        f"pause of a swap, 32 tensors: {small * 1e6:.0f} us for 2 MB, {large * 1e6:.0f} us for 64 MB; "
        f"a copy of the 64 MB {copy_s * 1e6:.0f} us"
    )
    assert large < copy_s / 4
    assert large < 10 * small + 1e-3


def test_wider_parameters_hold_and_name_what_was_sent(tmp_path: Path) -> None:
    """bfloat16 sent, float32 held, with tied embeddings: digests and bytes are those of what was sent."""
    folder = save(tmp_path / "m", _qwen3())
    model = make(_qwen3(), seed=1, dtype=torch.bfloat16)
    tensors, manifest, buckets = layout(model)

    async def body(engine: HFEngine) -> list[bytes]:
        assert await engine.read_bucket(0, memoryview(bytearray(len(buckets[0])))) is False  # no version yet
        await engine.begin_update(with_version(manifest, 3), tensors)
        held = [await engine.apply_bucket(number, data) for number, data in enumerate(buckets)]
        assert held == list(manifest.bucket_digests)
        assert await engine.commit_update() == manifest.digest == await engine.attest()
        mine: Any = engine._model
        assert mine.lm_head.weight.data_ptr() == mine.model.embed_tokens.weight.data_ptr()
        assert mine.lm_head.weight.dtype == torch.float32
        assert torch.equal(mine.lm_head.weight, model.get_input_embeddings().weight.float())
        read = [bytearray(len(data)) for data in buckets]
        for number, into in enumerate(read):
            assert await engine.read_bucket(number, memoryview(into))
        assert await engine.read_bucket(0, memoryview(bytearray(3))) is False
        assert await engine.read_bucket(len(buckets), memoryview(bytearray(3))) is False
        return [bytes(into) for into in read]

    assert run(config_of(folder, slots=1, dtype="float32"), body) == buckets


def test_a_bit_that_flips_after_the_check_shows_at_the_commit(qwen3: Path) -> None:
    model = make(_qwen3(), seed=1)
    tensors, manifest, buckets = layout(model)

    async def body(engine: HFEngine) -> tuple[str, str]:
        await engine.begin_update(manifest, tensors)
        for number, data in enumerate(buckets):
            assert await engine.apply_bucket(number, data) == manifest.bucket_digests[number]
        update: Any = engine._weights.pending_update()  # type: ignore[union-attr]
        update.tensor_for(tensors[5].name).view(torch.uint8).flatten()[7] ^= 16
        wrong = await engine.commit_update()
        return wrong, (await push(engine, model, 1))[1]

    wrong, right = run(config_of(qwen3, slots=1), body)
    assert wrong != manifest.digest == right


def test_a_copy_that_outlives_its_update_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort waits for the copy under way; a late one, of an update that was aborted, is refused."""
    from producers.engines.hf import weights as module

    model = make(_qwen3(), seed=0)
    weights = ModelWeights(model)
    tensors, manifest, buckets = layout(make(_qwen3(), seed=1))
    entered, go = threading.Event(), threading.Event()
    right = module.Layout.fill

    def slow(*args: Any) -> Any:
        entered.set()
        assert go.wait(60)
        return right(*args)

    weights.begin(manifest, tensors)
    monkeypatch.setattr(module.Layout, "fill", slow)
    copying = threading.Thread(target=weights.apply, args=(0, b"\xff" * len(buckets[0])))
    copying.start()
    assert entered.wait(60)
    aborting = threading.Thread(target=weights.abort)
    aborting.start()
    time.sleep(0.05)
    assert aborting.is_alive(), "the storages may not be free while something is written there"
    go.set()
    aborting.join(60)
    copying.join(60)
    monkeypatch.setattr(module.Layout, "fill", right)
    with pytest.raises(AsyncRLError, match="no update"):
        weights.apply(1, buckets[1])
    weights.begin(manifest, tensors)
    assert [weights.apply(n, data) for n, data in enumerate(buckets)] == list(manifest.bucket_digests)
    weights.exchange()
    assert weights.digest() == manifest.digest


# ---------------------------------------------------------------- in place


def test_in_place_stands_still_until_it_is_whole(qwen3: Path) -> None:
    """Between the first byte and the commit not one token, also over an abort; then all go on under the new version."""
    old, torn, new = (make(_qwen3(), seed=seed) for seed in (1, 2, 3))
    tensors, manifest, buckets = layout(torn)

    async def body(engine: HFEngine) -> dict[int, GenDelta]:
        assert engine.capabilities().in_place
        await push(engine, old, 3)
        before = places(engine)
        wanted = request("x", PROMPTS[0], tuple(range(4)), max_new_tokens=64, stop_ids=())
        going = asyncio.create_task(all_of(engine, wanted))
        await tokens_made(engine, 40)
        await engine.begin_update(with_version(manifest, 4), tensors)
        assert engine.health().version == -1
        made = engine.health().generated_tokens
        late = asyncio.create_task(all_of(engine, request("late", PROMPTS[1], stop_ids=())))
        await engine.apply_bucket(0, buckets[0])
        assert not await engine.read_bucket(0, memoryview(bytearray(len(buckets[0]))))
        await asyncio.sleep(0.05)
        await engine.abort_update()
        await asyncio.sleep(0.05)
        assert engine.health().generated_tokens == made and engine.health().version == -1
        assert await engine.attest() == ""
        with pytest.raises(AsyncRLError, match="no update"):
            await engine.commit_update()
        digest = await stage(engine, new, 5)
        assert engine.health().generated_tokens == made and not going.done()
        assert await engine.commit_update() == digest and engine.health().version == 5
        assert places(engine) == before, "there is one copy only"
        group = await going
        assert next(iter((await late).values())).runs == ((5, 20),)
        return group

    group = run(in_place(config_of(qwen3, slots=4, kv_at_swap="recompute")), body)
    for item in group.values():
        versions = expand(item.runs)
        assert set(versions.tolist()) == {3, 5}
        for model, version in ((old, 3), (new, 5)):
            gap = np.abs(plain_logprobs(model, PROMPTS[0], item.token_ids, temperature=1.0) - item.logprobs)
            assert gap[versions == version].max() < 1e-4


def test_no_room_for_a_second_copy_is_said_at_the_start(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from producers.engines.hf import loading

    weights = ModelWeights(make(_qwen3(), seed=0))
    assert weights.second_copy == sum(value.nbytes for value in make(_qwen3(), seed=0).parameters())
    monkeypatch.setattr(loading, "free_bytes", lambda _: weights.second_copy)

    async def start(engine: HFEngine) -> None:
        await engine.start()

    with pytest.raises(ConfigError, match="second copy of the weights") as caught:
        run(config_of(qwen3, slots=1), start, start=False)
    assert caught.value.code == "config.conflict" and "weightsync.in_place" in caught.value.remedy
    run(in_place(config_of(qwen3, slots=1)), start, start=False)


# ---------------------------------------------------------------- K/V and prefixes


def greedy(name: str, prompt: list[int], tokens: int) -> Any:
    return request(name, prompt, (0,), max_new_tokens=tokens, stop_ids=(), top_k=1)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_tokens_after_a_swap_against_a_fresh_engine(qwen3: Path, kv: str, tmp_path: Path) -> None:
    """recompute: as an engine that has only ever held the new weights and is given prompt and tokens so far."""
    old, new = make(_qwen3(), seed=1), make(_qwen3(), seed=2)
    config = config_of(qwen3, slots=2, kv_at_swap=kv)
    config = config.__class__(
        **{field: getattr(config, field) for field in config.__struct_fields__ if field != "data"},
        data=config.data.__class__(path="unused.jsonl", max_prompt_tokens=96),
    )

    async def swapped(engine: HFEngine) -> GenDelta:
        await push(engine, old, 0)
        await stage(engine, new, 1)
        going = asyncio.create_task(all_of(engine, greedy("x", PROMPTS[0], 60)))
        await tokens_made(engine, 12)
        await engine.commit_update()
        return (await going)[0]

    item = run(config, swapped)
    assert [version for version, _ in item.runs] == [0, 1], "the swap came in the middle"
    so_far = item.runs[0][1]

    async def fresh(engine: HFEngine) -> GenDelta:
        await push(engine, new, 1)
        prompt = [*PROMPTS[0], *item.token_ids[:so_far].tolist()]
        return (await all_of(engine, greedy("y", prompt, 60 - so_far)))[0]

    alone = run(config, fresh)
    after = item.logprobs[so_far:]
    plain = plain_logprobs(new, PROMPTS[0], item.token_ids, temperature=1.0)[so_far:]
    gap = float(np.abs(plain - after).max())
    print(f"kv_at_swap = {kv}: largest gap of a log-prob after the swap {gap:.2e} over {len(after)} tokens")
    if kv == "recompute":
        assert item.token_ids[so_far:].tolist() == alone.token_ids.tolist()
        assert np.abs(after - alone.logprobs).max() < 1e-5
    else:
        assert gap > 1e-3, "old K/V under new weights cannot give the new model's log-probs"


def test_a_shared_prefill_is_not_used_over_a_swap_that_keeps_the_number(qwen3: Path) -> None:
    """A learner that went back publishes other weights as the same version: waiting samples must not see old K/V."""
    old, new = make(_qwen3(), seed=1), make(_qwen3(), seed=2)

    async def body(engine: HFEngine) -> dict[int, GenDelta]:
        await push(engine, old, 7)
        await stage(engine, new, 7)
        wanted = request("x", PROMPTS[0], tuple(range(6)), max_new_tokens=16, stop_ids=())
        going = asyncio.create_task(all_of(engine, wanted))
        await tokens_made(engine, 4)  # two are seated, the prefill of the group waits for the other four
        await engine.commit_update()
        return await going

    group = run(config_of(qwen3, slots=2, kv_at_swap="keep"), body)
    late = [group[index] for index in (2, 3, 4, 5)]
    for item in late:
        gap = np.abs(plain_logprobs(new, PROMPTS[0], item.token_ids, temperature=1.0) - item.logprobs)
        assert gap.max() < 1e-4


# ---------------------------------------------------------------- adapters

TARGETS = ("q_proj", "v_proj")
RANK, ALPHA = 4, 8


def adapter_of(model: Any, *, seed: int, targets: tuple[str, ...] = TARGETS) -> dict[str, torch.Tensor]:
    """A and B for the target modules, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, weight in model.named_parameters():
        if name.removesuffix(".weight").endswith(targets):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            pairs[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) * 0.3
            pairs[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
    return pairs


def packed(pairs: dict[str, torch.Tensor], version: int, base: str, **more: Any) -> tuple[Any, Manifest, list[bytes]]:
    plan = plan_buckets([TensorSpec(n, "F32", tuple(t.shape)) for n, t in pairs.items()], bucket_bytes=2048)
    raw = {name: tensor.contiguous().flatten().view(torch.uint8).numpy() for name, tensor in pairs.items()}
    buckets = [bytearray(size) for size in plan.bucket_bytes]
    for item in plan.tensors:
        buckets[item.bucket][item.offset : item.offset + item.nbytes] = raw[item.name].tobytes()
    digests = digest_tensors(plan.tensors, lambda name: raw[name])[0]
    words = config_text(AdapterConfig(RANK, ALPHA, TARGETS))
    if more:
        words = json.dumps(json.loads(words) | more)
    whole = version_digest(digests, base=base, adapter=words)
    manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, whole, "adapter", base, words)
    return plan.tensors, manifest, [bytes(bucket) for bucket in buckets]


async def send(engine: HFEngine, tensors: Any, manifest: Manifest, buckets: list[bytes]) -> str:
    await engine.begin_update(manifest, tensors)
    for number, data in enumerate(buckets):
        assert await engine.apply_bucket(number, data) == manifest.bucket_digests[number]
    return await engine.commit_update()


def merged(seed: int, pairs: dict[str, torch.Tensor]) -> Any:
    """The model by the formula, in float64."""
    model = make(_llama(), seed=seed)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in [name for name in pairs if ".lora_A." in name]:
            a, b = pairs[name].double(), pairs[name.replace("lora_A", "lora_B")].double()
            target = weights[name.removeprefix("base_model.model.").replace(".lora_A", "")]
            target.copy_((target.double() + ALPHA / RANK * b @ a).float())
    return model


def test_adapters_are_added_to_the_kept_base(llama: Path) -> None:
    """Version after version from W0; a module that a later adapter leaves out, and a new base, are right as well."""
    base = make(_llama(), seed=1)
    digest = layout(base)[1].digest
    steps = [adapter_of(base, seed=5), adapter_of(base, seed=6), adapter_of(base, seed=7, targets=("v_proj",))]

    async def body(engine: HFEngine) -> None:
        await push(engine, base, 0)
        for version, pairs in enumerate(steps, start=1):
            sent = packed(pairs, version, digest)
            assert await send(engine, *sent) == sent[1].digest == await engine.attest()
            wanted = merged(1, pairs)
            weights = dict(engine._model.named_parameters())  # type: ignore[union-attr]
            for name, value in wanted.named_parameters():
                assert torch.allclose(weights[name], value, rtol=0, atol=2e-6), name
            item = (await all_of(engine, request(f"v{version}", PROMPTS[0])))[0]
            assert item.runs[0][0] == version
            plain = plain_logprobs(wanted, PROMPTS[0], item.token_ids, temperature=1.0)
            assert np.abs(plain - item.logprobs).max() < 1e-4
            read = bytearray(len(sent[2][0]))
            assert await engine.read_bucket(0, memoryview(read)) and bytes(read) == sent[2][0]
        other = make(_llama(), seed=2)
        assert len(set(await push(engine, other, 9))) == 1
        with pytest.raises(AsyncRLError, match="adapter of the base") as caught:
            await send(engine, *packed(steps[0], 10, digest))
        assert caught.value.code == "sync.failed"
        again = packed(steps[0], 11, layout(other)[1].digest)
        assert await send(engine, *again) == again[1].digest

    run(config_of(llama, slots=2), body)


def test_a_spoilt_product_or_base_is_attested_as_such(llama: Path) -> None:
    base = make(_llama(), seed=1)
    sent = packed(adapter_of(base, seed=5), 1, layout(base)[1].digest)

    async def body(engine: HFEngine) -> None:
        await push(engine, base, 0)
        assert await send(engine, *sent) == sent[1].digest
        weights = dict(engine._model.named_parameters())  # type: ignore[union-attr]
        product = weights["model.layers.0.self_attn.q_proj.weight"]
        other = weights["model.layers.1.mlp.up_proj.weight"]
        for spoilt in (product, other):
            bits = spoilt.data.view(torch.uint8).flatten()
            bits[5] ^= 1
            assert await engine.attest() != sent[1].digest
            bits[5] ^= 1
            assert await engine.attest() == sent[1].digest

    run(config_of(llama, slots=1), body)


def test_transposed_and_tied_weights_take_no_adapter() -> None:
    """GPT-2 keeps square projections transposed: the sum would have the right shape and be wrong."""
    from test_engines import _gpt2

    assert ModelWeights(make(_gpt2(), seed=0)).linear("transformer.h.0.attn.c_proj") is None
    tied = ModelWeights(make(_qwen3(), seed=0))
    assert tied.linear("lm_head") is None and tied.linear("nobody") is None
    assert tied.linear("model.layers.0.self_attn.q_proj") is not None


def test_an_adapter_that_does_not_fit_is_refused(llama: Path) -> None:
    base = make(_llama(), seed=1)
    digest = layout(base)[1].digest
    pairs = adapter_of(base, seed=5)
    first = next(iter(pairs))
    unknown = {name.replace("q_proj", "nobody"): value for name, value in pairs.items()}
    half = {name: value for name, value in pairs.items() if name != first}
    odd = pairs | {first: torch.zeros(RANK, 7)}

    async def body(engine: HFEngine) -> list[str]:
        with pytest.raises(AsyncRLError, match="adapter of the base"):
            await send(engine, *packed(pairs, 1, digest))  # nothing was committed yet
        await push(engine, base, 0)
        codes = []
        for wrong, more in (
            (unknown, {}),
            (half, {}),
            (odd, {}),
            ({"model.norm.weight": torch.zeros(3)}, {}),
            (pairs, {"use_dora": True}),
            (pairs, {"r": 3}),
            (pairs, {"rank_pattern": {"q_proj": 2}}),
            (pairs, {"lora_alpha": None}),
        ):
            with pytest.raises(AsyncRLError) as caught:
                await send(engine, *packed(wrong, 1, digest, **more))
            codes.append(caught.value.code)
        assert await engine.attest() == digest and engine.health().version == 0
        return codes

    assert set(run(config_of(llama, slots=1), body)) == {"sync.plan"}
