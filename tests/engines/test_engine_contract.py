"""What every engine promises (`asyncrl.engine`), on every engine that runs in this environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import session_promises
import torch
from engine_lab import (
    EOS,
    LIMIT,
    MAX_NEW,
    MAX_PROMPT,
    SLOTS,
    VOCAB,
    Bench,
    all_of,
    config_of,
    deltas_of,
    fill_slot,
    kept_logprobs,
    layout,
    manifest_of,
    model_of,
    own_copies,
    plain_logprobs,
    push,
    receive_slot,
    request,
    save_model,
    stage,
    tokens_made,
)
from msgspec.structs import replace
from rigs import RIGS, Rig

from asyncrl.engine import Engine, GenDelta, join_deltas
from asyncrl.errors import AsyncRLError
from asyncrl.versions import expand
from asyncrl.wire import Tensor
from producers.engines.logprob_probe import check_logprobs
from weightsync.receiver.dequantised import DequantisedEngine
from weightsync.staging import Staging

SWAPS = 8  # tries to meet samples in their middle
#: Cases of the long forms: every other rig runs with one policy, `hf` and `vllm` with both.
FURTHER = {
    ("sglang_standin", "recompute"),
    ("vllm_http_standin", "keep"),
    ("vllm_http", "recompute"),
    ("hf-caches", "recompute"),
}
CASES = [
    pytest.param((rig, kv), marks=[pytest.mark.chaos] if (rig.name, kv) in FURTHER else [])
    for rig in RIGS
    for kv in rig.kv
]
LONG = [(7 * n + 3) % VOCAB for n in range(300)]  # several blocks of any prefix cache
PROMPTS = [[3, 4, 5, 6, 7], [9, 10], list(range(11, 40)), [30, 31, 32]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Rig, str]:
    rig, kv = request.param
    if why := rig.why_not():
        pytest.skip(why)
    return rig, kv


@pytest.fixture(scope="module")
def started(case: tuple[Rig, str], folder: Path) -> Iterator[Bench]:
    rig, kv = case
    threads = torch.get_num_threads()
    bench = Bench(rig.make(folder, kv))
    try:
        bench.run(bench.engine.start(), limit_s=rig.start_s)
        yield bench
    finally:
        bench.close()
        torch.set_num_threads(threads)


@pytest.fixture
def bench(started: Bench) -> Bench:
    """The engine with weights 1 as its newest version."""
    started.push(1)
    return started


def check_sample(item: GenDelta, *, version: int, seed: int, prompt: list[int], temperature: float = 1.0) -> None:
    """A whole sample of one version: its form, and the log-probs of the plain forward."""
    assert item.token_ids.dtype == np.int32 and item.logprobs.dtype == np.float32
    assert item.runs == ((version, len(item.token_ids)),) and len(item.logprobs) == len(item.token_ids)
    expected = plain_logprobs(seed, prompt, item.token_ids, temperature=temperature)
    assert np.abs(expected - item.logprobs).max() < LIMIT


# ---------------------------------------------------------------- start


def test_there_is_no_version_and_no_sample_before_the_first_commit(started: Bench) -> None:
    if started.version >= 0:
        pytest.skip("only the first test of an engine can look at it")
    assert started.engine.health().version == -1 and started.engine.health().alive
    with pytest.raises(AsyncRLError) as caught:
        started.ask([3, 4])
    assert caught.value.code == "sample.invalid" and "no weights" in caught.value.message
    capable = started.engine.capabilities()
    assert capable.max_samples == SLOTS and capable.max_tokens >= MAX_PROMPT + MAX_NEW
    assert capable.kv_tokens >= MAX_PROMPT + MAX_NEW and "full" in capable.encodings


# ---------------------------------------------------------------- tokens and log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward(bench: Bench, temperature: float) -> None:
    async def ask() -> list[dict[int, GenDelta]]:
        wanted = [request(bench.name(), prompt, (0, 1, 2), temperature=temperature) for prompt in PROMPTS]
        return list(await asyncio.gather(*(all_of(bench.engine, item) for item in wanted)))

    for prompt, group in zip(PROMPTS, bench.run(ask()), strict=True):  # 12 samples in 8 slots
        assert sorted(group) == [0, 1, 2] and len({item.token_ids.tobytes() for item in group.values()}) == 3
        for item in group.values():
            check_sample(item, version=bench.version, seed=1, prompt=prompt, temperature=temperature)
            assert item.finish == "length" and len(item.token_ids) == 24


def test_a_seed_and_an_index_give_the_same_tokens_alone_and_in_a_crowd(bench: Bench) -> None:
    if not bench.engine.capabilities().seeded:
        pytest.skip("this engine does not promise it")

    async def crowd() -> dict[int, GenDelta]:
        others = [request(bench.name(), prompt, (0, 1), seed=n) for n, prompt in enumerate(PROMPTS)]
        wanted = request(bench.name(), PROMPTS[0], (0, 1, 2), seed=77)
        return (await asyncio.gather(all_of(bench.engine, wanted), *(all_of(bench.engine, o) for o in others)))[0]

    alone, again = (bench.ask(PROMPTS[0], (2,), seed=77)[2] for _ in range(2))
    crowded = bench.run(crowd())[2]
    assert alone.token_ids.tolist() == again.token_ids.tolist() == crowded.token_ids.tolist()
    assert bench.ask(PROMPTS[0], (2,), seed=78)[2].token_ids.tolist() != alone.token_ids.tolist()


def test_more_prompts_at_once_than_a_step_takes(bench: Bench) -> None:
    """Long prompts that share nothing: an engine computes them in several steps, or in pieces, and draws the same."""
    prompts = [[n, *LONG[1:]] for n in range(3, 3 + SLOTS)]

    async def ask() -> list[GenDelta]:
        wanted = [request(bench.name(), prompt, seed=n, max_new_tokens=4) for n, prompt in enumerate(prompts)]
        return [found[0] for found in await asyncio.gather(*(all_of(bench.engine, item) for item in wanted))]

    alone = bench.ask(prompts[-1], seed=SLOTS - 1, max_new_tokens=4)[0]
    together = bench.run(ask())
    for prompt, item in zip(prompts, together, strict=True):
        check_sample(item, version=bench.version, seed=1, prompt=prompt)
    assert not bench.engine.capabilities().seeded or together[-1].token_ids.tolist() == alone.token_ids.tolist()


def test_stop_tokens_end_a_sample_and_are_part_of_it(bench: Bench) -> None:
    free = bench.ask(PROMPTS[0], tuple(range(6)), max_new_tokens=40)
    stop = int(free[0].token_ids[10])
    cut = bench.ask(PROMPTS[0], tuple(range(6)), max_new_tokens=40, stop_ids=(stop, VOCAB - 1))
    seen = {item.finish for item in cut.values()}
    for item in cut.values():
        ends = int(item.token_ids[-1]) in (stop, VOCAB - 1)
        assert item.finish == ("stop" if ends else "length") and (ends or len(item.token_ids) == 40)
        assert not np.isin(item.token_ids[:-1], [stop, VOCAB - 1]).any()
        check_sample(item, version=bench.version, seed=1, prompt=PROMPTS[0])
    assert "stop" in seen
    one = bench.ask(PROMPTS[0], max_new_tokens=1, stop_ids=(EOS,))[0]
    assert len(one.token_ids) == 1


def test_top_k_top_p_and_min_p_cut_what_is_drawn_and_not_the_logprob(bench: Bench) -> None:
    for more, inside in (({"top_k": 2}, _in_top_k), ({"top_p": 0.3}, _in_top_p), ({"min_p": 0.5}, _in_min_p)):
        group = bench.ask(PROMPTS[0], tuple(range(6)), **more)
        for item in group.values():
            assert inside(item)
            check_sample(item, version=bench.version, seed=1, prompt=PROMPTS[0])
    assert not all(_in_top_k(item) for item in bench.ask(PROMPTS[0], tuple(range(6))).values())
    greedy = bench.ask(PROMPTS[0], (0, 1), top_k=1)
    assert greedy[0].token_ids.tolist() == greedy[1].token_ids.tolist()


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_p": 0.8, "top_k": 4}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_support_of_each_draw_is_what_the_cut_left(bench: Bench, temperature: float, cut: dict[str, Any]) -> None:
    """Against the logits of a plain forward, token by token, in one delta and in several."""
    wanted: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "support": True, **cut}
    if not bench.engine.capabilities().supports:
        with pytest.raises(AsyncRLError) as caught:
            bench.ask(PROMPTS[0], (0, 1), **wanted)
        assert caught.value.code == "sample.invalid" and "support" in caught.value.message
        return
    for every in (0, 6):
        for index, item in bench.ask(PROMPTS[0], (0, 1, 2), **wanted, delta_tokens=every).items():
            assert item.support is not None and item.support.find_problem(item.token_ids) == ""
            logits = _logits(item) / temperature
            starts = np.cumsum(item.support.counts) - item.support.counts
            for place, (token, start) in enumerate(zip(item.token_ids.tolist(), starts.tolist(), strict=True)):
                kept = item.support.ids[start : start + int(item.support.counts[place])].tolist()
                assert kept == _left(logits[place], **cut), (index, place)
                recorded = float(torch.log_softmax(logits[place, kept], -1)[kept.index(token)])
                assert abs(recorded - float(item.logprobs[place])) < LIMIT
    free = bench.ask(PROMPTS[0], **(wanted | {"top_k": 0, "top_p": 1.0, "min_p": 0.0}))[0]
    assert free.support is not None and not free.support.counts.any()  # nothing was cut: nothing is stored


def test_a_sample_goes_on_with_the_supports_of_each_place(bench: Bench) -> None:
    if not bench.engine.capabilities().supports:
        pytest.skip("this engine records no supports")
    whole = bench.ask(PROMPTS[0], (1,), max_new_tokens=30, support=True, top_p=0.7)[1]
    prompt = [*PROMPTS[0], *whole.token_ids[:18].tolist()]
    rest = bench.ask(prompt, (1,), max_new_tokens=12, begun=18, support=True, top_p=0.7)[1]
    assert whole.support is not None and rest.support is not None
    for one, other in zip(whole.support.cut(18, 30), rest.support, strict=True):
        assert one.tolist() == other.tolist()


def test_a_cut_at_another_temperature_is_right_or_refused(bench: Bench) -> None:
    try:
        group = bench.ask(PROMPTS[0], (0, 1), temperature=0.5, top_p=0.5)
    except AsyncRLError as error:
        assert error.code == "sample.invalid" and "temperature" in error.message
    else:
        for item in group.values():
            check_sample(item, version=bench.version, seed=1, prompt=PROMPTS[0], temperature=0.5)


def test_the_probe_at_the_start_passes(bench: Bench, case: tuple[Rig, str], folder: Path) -> None:
    cuts: list[dict[str, Any]] = [{}]
    if bench.engine.capabilities().supports:
        cuts.append({"top_p": 0.8, "min_p": 0.01})
    for cut in cuts:
        sampling = replace(config_of(folder, engine="hf", kv=case[1]).sampling, temperature=0.7, **cut)
        config = replace(config_of(folder, engine="hf", kv=case[1]), sampling=sampling)
        bench.run(check_logprobs(bench.engine, config, range(3, VOCAB)), limit_s=120)


def _logits(item: GenDelta) -> torch.Tensor:
    ids = torch.tensor([*PROMPTS[0], *item.token_ids.tolist()])
    with torch.inference_mode():
        found: torch.Tensor = model_of(1)(input_ids=ids[None]).logits[0, len(PROMPTS[0]) - 1 : -1]
    return found


def _table(item: GenDelta) -> tuple[torch.Tensor, torch.Tensor]:
    return _logits(item).softmax(-1), torch.from_numpy(item.token_ids.astype(np.int64))[:, None]


def _left(logits: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[int]:
    """Ids that a cut leaves of one distribution, one by one; of no cut none."""
    chances = logits.double().softmax(-1).tolist()
    order = sorted(range(len(chances)), key=lambda token: -chances[token])[: top_k or None]
    order = [token for token in order if chances[token] >= min_p * chances[order[0]]]
    mass, left, total = 0.0, [], sum(chances[token] for token in order)
    for token in order:
        if top_p < 1 and mass >= top_p:
            break
        left.append(token)
        mass += chances[token] / total
    return sorted(left) if len(left) < len(chances) else []


def _in_top_k(item: GenDelta) -> bool:
    probs, ids = _table(item)
    return bool((probs.topk(2, -1).indices == ids).any(1).all())


def _in_top_p(item: GenDelta) -> bool:
    probs, ids = _table(item)
    above = (probs * (probs > probs.gather(1, ids))).sum(-1)
    return bool((above < 0.3 + 1e-4).all())


def _in_min_p(item: GenDelta) -> bool:
    probs, ids = _table(item)
    return bool((probs.gather(1, ids)[:, 0] >= 0.5 * probs.amax(-1) - 1e-6).all())


# ---------------------------------------------------------------- deltas and continued samples


def test_deltas_joined_are_the_sample(bench: Bench) -> None:
    wanted = {"max_new_tokens": 40, "delta_tokens": 8}
    deltas = bench.run(deltas_of(bench.engine, request(bench.name(), PROMPTS[0], (0, 1, 2), **wanted)))
    whole = bench.ask(PROMPTS[0], (0, 1, 2), max_new_tokens=40)
    for index in range(3):
        parts = [delta for delta in deltas if delta.index == index]
        assert len(parts) >= 4 and [bool(part.finish) for part in parts] == [*[False] * (len(parts) - 1), True]
        assert all(len(part.token_ids) == sum(count for _, count in part.runs) for part in parts)
        item = join_deltas(parts)
        check_sample(item, version=bench.version, seed=1, prompt=PROMPTS[0])
        if bench.engine.capabilities().seeded:
            assert item.token_ids.tolist() == whole[index].token_ids.tolist()


def test_a_sample_goes_on_where_it_was_left(bench: Bench) -> None:
    whole = bench.ask(PROMPTS[0], (1,), max_new_tokens=40)[1]
    prompt = [*PROMPTS[0], *whole.token_ids[:25].tolist()]
    rest = bench.ask(prompt, (1,), max_new_tokens=15, begun=25)[1]
    check_sample(rest, version=bench.version, seed=1, prompt=prompt)
    assert rest.start == 0 and len(rest.token_ids) == 15
    if bench.engine.capabilities().continues:
        assert rest.token_ids.tolist() == whole.token_ids[25:].tolist()


def test_requests_beyond_the_limits_are_refused(bench: Bench) -> None:
    wrong: list[dict[str, Any]] = [
        {"prompt": [1] * (MAX_PROMPT + 1)},
        {"prompt": []},
        {"prompt": [3, VOCAB]},
        {"prompt": [3, -1]},
        {"prompt": [3], "max_new_tokens": MAX_NEW + 1},
        {"prompt": [3], "max_new_tokens": 0},
        {"prompt": [3], "temperature": 0.0},
        {"prompt": [3], "indices": ()},
    ]
    for bad in wrong:
        with pytest.raises(AsyncRLError) as caught:
            bench.ask(bad.pop("prompt"), bad.pop("indices", (0,)), **bad)
        assert caught.value.code == "sample.invalid"
    assert bench.engine.health().alive and len(bench.ask([3])[0].token_ids) == 24


# ---------------------------------------------------------------- new weights


def test_a_swap_in_mid_request_has_exact_runs(bench: Bench, case: tuple[Rig, str]) -> None:
    """Every token's log-prob is that of the weights that its run names: under `recompute` on K/V of these weights,
    under `keep` on the K/V of before. No token is lost or made twice."""
    mixed = 0
    for tries in range(SWAPS):  # a server far away may be done before it hears of the new weights
        mixed += _swap_in_mid_request(bench, case[1], after=48 // (tries + 1))
        if mixed >= 4:
            return
        bench.push(1)
    pytest.fail("the swaps came after the samples had ended")


def _swap_in_mid_request(bench: Bench, kv: str, *, after: int) -> int:
    """From weights 1 to 2 once `after` tokens are seen; how many samples have tokens of both."""
    old = bench.version
    asked = ((0, PROMPTS[2]), (1, PROMPTS[0]))

    async def swap() -> list[dict[int, GenDelta]]:
        await stage(bench.engine, 2, old + 1)
        names = [request(bench.name(), prompt, (0, 1, 2, 3), max_new_tokens=MAX_NEW) for _, prompt in asked]
        going = [asyncio.create_task(all_of(bench.engine, wanted)) for wanted in names]
        await tokens_made(bench.engine, after)
        assert await bench.engine.commit_update() == manifest_of(2, old + 1).digest
        return list(await asyncio.gather(*going))

    groups = bench.run(swap())
    bench.version += 1
    mixed = 0
    for (_, prompt), group in zip(asked, groups, strict=True):
        assert sorted(group) == [0, 1, 2, 3]
        for item in group.values():
            versions = expand(item.runs)
            assert len(versions) == len(item.token_ids) == MAX_NEW
            cut = int((versions == old).sum())
            assert versions.tolist() == [old] * cut + [old + 1] * (MAX_NEW - cut)
            before = plain_logprobs(1, prompt, item.token_ids)
            assert np.abs(before - item.logprobs)[:cut].max(initial=0.0) < LIMIT
            if not 0 < cut < MAX_NEW:
                continue
            mixed += 1
            after = plain_logprobs(2, prompt, item.token_ids)
            if kv == "keep":
                assert np.abs(after - item.logprobs)[cut:].max() > 10 * LIMIT
                after = kept_logprobs(1, 2, prompt, item.token_ids, cut)
            assert np.abs(after - item.logprobs)[cut:].max() < LIMIT
    return mixed


def test_a_new_request_never_meets_older_keys_and_values(bench: Bench) -> None:
    """A long prompt that any prefix cache holds by now, asked again after a swap: what a fresh engine says."""
    first = bench.ask(LONG)[0]
    check_sample(first, version=bench.version, seed=1, prompt=LONG)
    check_sample(bench.ask(LONG)[0], version=bench.version, seed=1, prompt=LONG)
    bench.push(2)
    check_sample(bench.ask(LONG, (0, 1))[1], version=bench.version, seed=2, prompt=LONG)


def test_a_version_may_come_again_with_other_weights(bench: Bench) -> None:
    """A learner that fell back publishes the same numbers again."""
    check_sample(bench.ask(LONG)[0], version=bench.version, seed=1, prompt=LONG)
    bench.run(push(bench.engine, 3, bench.version))
    check_sample(bench.ask(LONG)[0], version=bench.version, seed=3, prompt=LONG)


def test_what_is_not_committed_changes_nothing(bench: Bench) -> None:
    first = bench.ask(PROMPTS[0])[0]

    async def cut_short() -> str:
        tensors, _, buckets = layout(2)
        await bench.engine.begin_update(manifest_of(2, bench.version + 1), tensors)
        await bench.engine.apply_bucket(0, memoryview(buckets[0]))
        with pytest.raises(AsyncRLError, match="without buckets") as early:
            await bench.engine.commit_update()
        await bench.engine.abort_update()
        await stage(bench.engine, 2, bench.version + 1)
        await bench.engine.abort_update()
        return early.value.code

    assert bench.run(cut_short()) == "sync.failed"
    second = bench.ask(PROMPTS[0])[0]
    check_sample(second, version=bench.version, seed=1, prompt=PROMPTS[0])
    assert not bench.engine.capabilities().seeded or first.token_ids.tolist() == second.token_ids.tolist()


def test_a_slot_is_loaded_as_it_is_or_copied(bench: Bench, tmp_path: Path) -> None:
    """An engine that maps slots of a publisher on its host has no copy, and the publisher waits for its commit."""
    engine, staging = bench.engine, Staging(tmp_path)
    maps, before = hasattr(engine, "begin_mapped"), own_copies()
    try:
        slot = fill_slot(staging, 2)
        bench.version += 1
        manifest = bench.run(receive_slot(engine, slot, 2, bench.version))
        newer = [fill_slot(staging, 3) for _ in range(2)]
        assert (slot in newer) is not maps
        assert not maps or own_copies() == before
        assert bench.run(engine.commit_update()) == manifest.digest
        assert not maps or own_copies() == []
        assert not maps or fill_slot(staging, 3) is slot, "free again"
    finally:
        staging.close()
    check_sample(bench.ask(PROMPTS[0])[0], version=bench.version, seed=2, prompt=PROMPTS[0])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_are_decoded_before_it_loads_them(bench: Bench, kind: str) -> None:
    """Its log-probs are those of the decoded weights, and its digests those of the codes."""
    receiving: Any = DequantisedEngine(bench.engine, keep=False)
    bench.version += 1
    manifest = bench.run(stage(receiving, 2, bench.version, kind))
    assert bench.run(receiving.commit_update()) == manifest.digest
    assert bench.run(receiving.attest()) in ("", manifest.digest)
    item = bench.ask(PROMPTS[0])[0]
    assert item.runs == ((bench.version, len(item.token_ids)),)
    assert np.abs(plain_logprobs(2, PROMPTS[0], item.token_ids, kind=kind) - item.logprobs).max() < LIMIT
    assert np.abs(plain_logprobs(2, PROMPTS[0], item.token_ids) - item.logprobs).max() > 10 * LIMIT


def test_weights_of_another_model_are_refused_before_they_do_harm(bench: Bench) -> None:
    tensors, _, _ = layout(2)
    first = tensors[0]
    renamed = Tensor("nobody.weight", first.dtype, first.shape, first.bucket, first.offset, first.nbytes)
    reshaped = Tensor(first.name, first.dtype, (1, *first.shape), first.bucket, first.offset, first.nbytes)
    for wrong in ((renamed, *tensors[1:]), (reshaped, *tensors[1:]), tensors[1:]):
        with pytest.raises(AsyncRLError) as caught:
            bench.run(bench.engine.begin_update(manifest_of(2, bench.version + 1), wrong))
        assert caught.value.code == "sync.plan"
    check_sample(bench.ask(PROMPTS[0])[0], version=bench.version, seed=1, prompt=PROMPTS[0])


def test_the_engine_says_what_it_holds(bench: Bench) -> None:
    manifest, (_, _, buckets) = manifest_of(1, bench.version), layout(1)
    attest: Any = getattr(bench.engine, "attest", None)
    if attest is not None:
        # empty: the checksums after the commit were left out, since earlier ones took long; the call has taken them
        assert bench.run(attest()) in (manifest.digest, "")
        assert bench.run(attest()) == manifest.digest
    into = bytearray(len(buckets[1]))
    if bench.run(bench.engine.read_bucket(1, memoryview(into))):
        inside = [tensor for tensor in layout(1)[0] if tensor.bucket == 1]
        for tensor in inside:
            part = slice(tensor.offset, tensor.offset + tensor.nbytes)
            assert into[part] == buckets[1][part]


# ---------------------------------------------------------------- abort, pause, capacity


def test_an_abort_ends_the_iterator_and_frees_the_place(bench: Bench) -> None:
    async def give_up() -> tuple[int, list[GenDelta]]:
        wanted = request("gone", PROMPTS[0], tuple(range(SLOTS)), max_new_tokens=MAX_NEW, temperature=1.5)
        going = asyncio.create_task(deltas_of(bench.engine, wanted))
        await tokens_made(bench.engine, 2 * SLOTS)
        aborted = await bench.engine.abort(["gone"])
        ended = await asyncio.wait_for(going, 60)
        started = time.monotonic()
        while bench.engine.health().running:
            await asyncio.sleep(0.01)
            assert time.monotonic() - started < 60
        return aborted, ended

    for _ in range(SWAPS):  # a server far away may be done before it hears of the abort
        aborted, ended = bench.run(give_up())
        if aborted:
            break
    assert aborted >= 1
    assert len([delta for delta in ended if delta.finish not in ("", "abort")]) < SLOTS
    for item in bench.ask(PROMPTS[1], tuple(range(SLOTS))).values():
        check_sample(item, version=bench.version, seed=1, prompt=PROMPTS[1])


def test_an_iterator_that_is_left_gives_its_request_up(bench: Bench) -> None:
    async def leave() -> None:
        wanted = request(bench.name(), PROMPTS[0], tuple(range(SLOTS)), max_new_tokens=MAX_NEW, delta_tokens=4)
        deltas: Any = bench.engine.generate(wanted)
        await anext(deltas)
        await deltas.aclose()
        until = time.monotonic() + 90
        while bench.engine.health().running:
            await asyncio.sleep(0.01)
            assert time.monotonic() < until

    bench.run(leave())
    assert len(bench.ask(PROMPTS[1])[0].token_ids) == 24


def test_a_pause_stands_still_and_loses_nothing(bench: Bench) -> None:
    async def stand() -> tuple[list[int], dict[int, GenDelta]]:
        wanted = request(bench.name(), PROMPTS[0], (0, 1, 2), max_new_tokens=MAX_NEW)
        going = asyncio.create_task(all_of(bench.engine, wanted))
        await tokens_made(bench.engine, 9)
        await bench.engine.pause()
        assert bench.engine.health().paused
        await asyncio.sleep(0.1)  # what was under way has been counted
        made = [bench.engine.health().generated_tokens]
        await asyncio.sleep(0.3)
        made.append(bench.engine.health().generated_tokens)
        done = going.done()
        await bench.engine.resume()
        return [] if done else made, await going

    for _ in range(SWAPS):  # a server far away may be done before it hears of the pause
        made, group = bench.run(stand())
        if made:
            break
    else:
        pytest.fail("the pauses came after the samples had ended")
    assert made[0] == made[1]
    for item in group.values():
        assert len(item.token_ids) == MAX_NEW
        check_sample(item, version=bench.version, seed=1, prompt=PROMPTS[0])


async def left_running(engine: Engine) -> int:
    """Samples under way, once they are none or five seconds have passed: of a server the last answer may still come."""
    for _ in range(100):
        if engine.health().running == 0:
            break
        await asyncio.sleep(0.05)
    return engine.health().running


def test_a_pause_can_wait(bench: Bench) -> None:
    async def pause() -> tuple[int, dict[int, GenDelta]]:
        going = asyncio.create_task(all_of(bench.engine, request(bench.name(), PROMPTS[0], (0, 1, 2))))
        await tokens_made(bench.engine, 2 * 24 + 1)  # two samples alone cannot make as many: a server has all three
        await bench.engine.pause("wait")
        running = await left_running(bench.engine)
        await bench.engine.resume()
        return running, await going

    running, whole = bench.run(pause())
    assert running == 0 and sorted(whole) == [0, 1, 2] and all(len(item.token_ids) == 24 for item in whole.values())


def test_a_pause_can_abort(bench: Bench) -> None:
    async def pause() -> list[GenDelta]:
        wanted = request(bench.name(), PROMPTS[0], (0,), max_new_tokens=MAX_NEW)
        cut = asyncio.create_task(deltas_of(bench.engine, wanted))
        await tokens_made(bench.engine, 4)
        await bench.engine.pause("abort")
        ended = await asyncio.wait_for(cut, 60)
        await bench.engine.resume()
        return ended

    for _ in range(SWAPS):  # a server far away may be done before it hears of the pause
        ended = {delta.finish for delta in bench.run(pause())}
        assert ended <= {"", "abort", "length"}
        if "length" not in ended:
            break
    else:
        pytest.fail("the pauses came after the sample had ended")
    assert len(bench.ask(PROMPTS[1])[0].token_ids) == 24


def test_the_urgent_are_seated_first(bench: Bench) -> None:
    if not bench.engine.capabilities().priority:
        pytest.skip("this engine serves as they come")

    async def crowd() -> list[str]:
        ended: list[str] = []

        async def one(name: str, priority: int) -> None:
            wanted = request(name, PROMPTS[0], (0, 1, 2, 3), max_new_tokens=MAX_NEW, priority=priority)
            await all_of(bench.engine, wanted)
            ended.append(name)

        await bench.engine.pause()  # all of them stand in the queue before the first is served
        tasks = [asyncio.create_task(one(f"late{n}", 5)) for n in range(12)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(one("urgent", 0)))
        await asyncio.sleep(0.5)  # a server receives them
        await bench.engine.resume()
        await asyncio.gather(*tasks)
        return ended

    assert bench.run(crowd()).index("urgent") < 9  # first come, first served: it would be the last of 13


def test_health_counts(bench: Bench) -> None:
    async def look() -> Any:
        before = bench.engine.health().generated_tokens
        wanted = request(bench.name(), PROMPTS[0], tuple(range(SLOTS + 2)), max_new_tokens=MAX_NEW)
        going = asyncio.create_task(all_of(bench.engine, wanted))
        await tokens_made(bench.engine, SLOTS)
        health = bench.engine.health()
        await going
        return before, health, bench.engine.health()

    for _ in range(SWAPS):  # a server far away may be done before its tokens are seen
        before, during, after = bench.run(look())
        if during.running:
            break
    assert 1 <= during.running <= SLOTS + 2 and 0.0 <= during.kv_used <= 1.0
    assert during.running + during.waiting <= SLOTS + 2
    assert after.generated_tokens - before == (SLOTS + 2) * MAX_NEW
    assert after.running == after.waiting == 0 and after.alive


# ---------------------------------------------------------------- sessions

test_new_weights_in_a_session = session_promises.test_new_weights_in_a_session
test_an_agent_plays_a_session = session_promises.test_an_agent_plays_a_session


# ---------------------------------------------------------------- the end of an engine: keep this test the last


def test_a_broken_engine_says_so_to_everybody(bench: Bench, case: tuple[Rig, str]) -> None:
    async def use() -> str:
        """Samples for as long as there are any; the code of the error that ended it."""
        while True:
            try:
                await all_of(bench.engine, request(bench.name(), PROMPTS[0], (0, 1), max_new_tokens=MAX_NEW))
            except AsyncRLError as error:
                return error.code

    async def burst() -> list[str]:
        users = [asyncio.create_task(use()) for _ in range(SLOTS)]
        await tokens_made(bench.engine, 6)
        case[0].break_it(bench.engine)
        codes = await asyncio.wait_for(asyncio.gather(*users), 40)
        for call in (all_of(bench.engine, request("later", [3])), stage(bench.engine, 2, bench.version + 1)):
            with pytest.raises(AsyncRLError) as caught:
                await asyncio.wait_for(call, 60)
            codes.append(caught.value.code)
        return codes

    assert bench.run(burst(), limit_s=90) == ["engine.broken"] * (SLOTS + 2)
    assert not bench.engine.health().alive and bench.engine.health().detail
