"""The second set of weights of the hf engine: one version stays for its requests while newer ones are committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_engine_weights import adapter_of, merged, packed, send
from test_engines import (
    KINDS,
    PROMPTS,
    SHAPES,
    _llama,
    all_of,
    config_of,
    folders,
    layout,
    make,
    plain_logprobs,
    push,
    request,
    run,
    stage,
)

from asyncrl.config import Config
from asyncrl.config.sections.evaluation import EvaluationConfig
from asyncrl.engine import GenDelta
from asyncrl.errors import AsyncRLError, ConfigError
from producers.engines.hf import loading
from producers.engines.hf.engine import HFEngine

assert folders  # a fixture

TOKENS = 40
LIMIT = 1e-5
LONG = {"max_new_tokens": TOKENS, "stop_ids": ()}


def config_with_lane(folder: Path, **producers: Any) -> Config:
    config = config_of(folder, **{"slots": 4, "kv_at_swap": "recompute", **producers})
    evaluation = EvaluationConfig(path="held.jsonl", samples=3, share=1.0, lane="second_weights")
    return msgspec.structs.replace(config, evaluation=evaluation)


@asynccontextmanager
async def standing(engine: HFEngine, *steps: int) -> AsyncIterator[asyncio.Queue[int]]:
    """The decoders stand still after these steps of theirs, until `resume`; the queue gets a number per standstill."""
    stands: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def wrap(decoder: Any) -> None:
        real, left = decoder.step, [decoder.steps + count for count in steps]

        def step() -> list[GenDelta]:
            found: list[GenDelta] = real()
            if decoder.steps in left:
                left.remove(decoder.steps)
                decoder.paused = True
                loop.call_soon_threadsafe(stands.put_nowait, decoder.steps)
            return found

        decoder.step = step

    for decoder in engine._decoders:
        wrap(decoder)
    yield stands
    for decoder in engine._decoders:
        del decoder.__dict__["step"]


async def both_stand(stands: asyncio.Queue[int]) -> None:
    for _ in range(2):
        await stands.get()  # bounded: `run` has a deadline


def gap(model: Any, prompt: Sequence[int], item: GenDelta, places: slice = slice(None)) -> float:
    plain = plain_logprobs(model, list(prompt), item.token_ids, temperature=1.0)
    return float(np.abs(plain - item.logprobs)[places].max())


@KINDS
def test_the_kept_version_makes_its_samples_and_newer_ones_those_of_training(
    folders: dict[str, Path], kind: str
) -> None:
    """Three swaps in the middle of both: what the first frees must not become room for the next ones."""
    models = {version: make(SHAPES[kind](), seed=version) for version in (3, 4, 5, 6)}

    async def body(engine: HFEngine) -> None:
        keep: Any = engine
        assert engine.capabilities().second_weights
        await push(engine, models[3], 3)
        assert await keep.keep_version(3, 60.0)
        async with standing(engine, 10, 20, 30) as stands:
            held = asyncio.create_task(all_of(engine, request("held", PROMPTS[0], (0, 1, 2), version=3, **LONG)))
            trained = asyncio.create_task(all_of(engine, request("train", PROMPTS[2], (0, 1, 2, 3), **LONG)))
            for version in (4, 5, 6):
                await both_stand(stands)
                sent = await stage(engine, models[version], version)
                assert await engine.commit_update() == sent == await engine.attest()
                assert engine.health().version == version and engine.health().running == 7
                assert await keep.keep_version(3, 60.0), "the time of the first call counts, and the version stays"
                await engine.resume()
            evaluated, samples = await held, await trained
        assert len(evaluated) == 3 and len(samples) == 4
        for item in evaluated.values():
            assert item.runs == ((3, TOKENS),), "min = max = the version of the evaluation"
            assert gap(models[3], PROMPTS[0], item) < LIMIT < 1e-3 < gap(models[6], PROMPTS[0], item)
        for item in samples.values():
            assert item.runs == ((3, 10), (4, 10), (5, 10), (6, 10))
            for place, version in enumerate((3, 4, 5, 6)):
                assert gap(models[version], PROMPTS[2], item, slice(10 * place, 10 * place + 10)) < LIMIT
        late = await all_of(engine, request("late", PROMPTS[1], (0,), version=3, **LONG))
        assert late[0].runs == ((3, TOKENS),) and gap(models[3], PROMPTS[1], late[0]) < LIMIT
        fresh = await all_of(engine, request("fresh", PROMPTS[1], (0,), **LONG))
        assert fresh[0].runs == ((6, TOKENS),) and gap(models[6], PROMPTS[1], fresh[0]) < LIMIT

    run(config_with_lane(folders[kind]), body)


def is_free(engine: HFEngine) -> bool:
    assert engine._second is not None
    held = [own.numel() for own in engine._second._own]
    return not any(held) and not engine._second.decoder.table.live and engine._second.decoder.version == -1


async def freed(engine: HFEngine) -> None:
    while not is_free(engine):  # bounded: `run` has a deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["let go", "another version", "time", "the number comes again"])
def test_the_end_of_a_version_frees_it_and_ends_its_requests_alone(folders: dict[str, Path], how: str) -> None:
    one, two = make(SHAPES["qwen3"](), seed=1), make(SHAPES["qwen3"](), seed=2)

    async def body(engine: HFEngine) -> None:
        await push(engine, one, 3)
        assert await engine.keep_version(3, 0.2 if how == "time" else 60.0)
        async with standing(engine, 5) as stands:
            held = asyncio.create_task(all_of(engine, request("held", PROMPTS[0], (0, 1), version=3, **LONG)))
            trained = asyncio.create_task(all_of(engine, request("train", PROMPTS[2], (0,), **LONG)))
            if how != "time":
                await both_stand(stands)
            if how == "let go":
                assert not await engine.keep_version(-1, 60.0)
            elif how == "another version":
                assert not await engine.keep_version(2, 60.0), "it is not current"
            elif how == "the number comes again":
                await push(engine, two, 3)
            assert await held == {}, "its iterator ends early"
            await freed(engine)
            while not trained.done():  # it may not stand yet when the time is over
                await engine.resume()
                await asyncio.sleep(0.01)
            assert len((await trained)[0].token_ids) == TOKENS
        again = await engine.keep_version(3, 60.0)
        assert again == (how != "time"), "after its time it is not kept again"
        found = await all_of(engine, request("more", PROMPTS[0], (0,), version=3, **LONG))
        assert len(found) == again
        if how == "the number comes again":
            assert gap(two, PROMPTS[0], found[0]) < LIMIT

    run(config_with_lane(folders["qwen3"]), body)


def test_adapters_and_another_base_leave_the_kept_version_alone(folders: dict[str, Path]) -> None:
    base, other = make(_llama(), seed=1), make(_llama(), seed=2)
    pairs = [adapter_of(base, seed=5), adapter_of(base, seed=6), adapter_of(base, seed=7, targets=("v_proj",))]

    async def body(engine: HFEngine) -> None:
        await push(engine, base, 0)
        await send(engine, *packed(pairs[0], 1, layout(base)[1].digest))
        assert await engine.keep_version(1, 60.0)
        async with standing(engine, 5) as stands:
            held = asyncio.create_task(all_of(engine, request("held", PROMPTS[0], (0, 1), version=1, **LONG)))
            await stands.get()
            for version, one in enumerate(pairs[1:], start=2):
                await send(engine, *packed(one, version, layout(base)[1].digest))
            for version in (4, 5):  # the room of the base, if it was free, would be written now
                assert len(set(await push(engine, other, version))) == 1
            await engine.resume()
            for item in (await held).values():
                assert item.runs == ((1, TOKENS),) and gap(merged(1, pairs[0]), PROMPTS[0], item) < LIMIT

    run(config_with_lane(folders["llama"]), body)


def test_without_the_lane_there_is_no_second_set(folders: dict[str, Path]) -> None:
    async def body(engine: HFEngine) -> None:
        await push(engine, make(SHAPES["qwen3"](), seed=1), 3)
        assert not await engine.keep_version(3, 60.0) and engine._second is None
        with pytest.raises(AsyncRLError, match="no second set of weights") as caught:
            await all_of(engine, request("held", PROMPTS[0], version=3))
        assert caught.value.code == "sample.invalid"

    run(config_of(folders["qwen3"], slots=4), body)


def test_memory_for_it_is_looked_for_at_the_start(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """For K/V of all samples and two more copies of the weights: a byte less is refused."""
    config = config_with_lane(folders["qwen3"])
    assert config.held_out_slots == 4, "two prompts x 3 samples, at most producers.slots"
    needed: list[tuple[int, int]] = []
    real = loading.check_memory

    def look(need: int, **given: Any) -> None:
        needed.append((need, given["extra_bytes"]))
        real(need, **given)

    monkeypatch.setattr(loading, "check_memory", look)

    async def body(engine: HFEngine) -> None: ...

    run(config, body)
    run(config_of(folders["qwen3"], slots=4), body)
    (need, copies), second, (plain, copy) = needed
    assert (need, copies) == (2 * plain, 2 * copy) and second == (plain, 0) and copy > 0
    monkeypatch.setattr(loading, "free_bytes", lambda _: int((need + copies) / 0.9) - 1)
    with pytest.raises(ConfigError, match=r"4 held out .* two more copies of the weights") as caught:
        run(config, body)
    assert caught.value.code == "config.conflict" and "before_swap" in caught.value.remedy
