"""Adapters for generators that lack the base: it is given to them first. A real service, publisher and receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from receiver_lab import Engine, Member, buckets_of
from test_engine_weights import ALPHA, RANK, TARGETS, adapter_of, merged
from test_engines import _llama, config_of, make, run, save
from test_weightsync_service import PLAN, World, until, weights

from asyncrl.errors import WorkError
from asyncrl.wire import Manifest, Tensor
from producers.engines.hf.engine import HFEngine
from weightsync.encoding.adapter import AdapterConfig, config_text, plan_adapter
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.publisher.publisher import Publisher
from weightsync.receiver.receiver import Receiver, built_in_transports

SMALL = plan_buckets([TensorSpec("q.lora_A", "F32", (2, 16)), TensorSpec("q.lora_B", "F32", (8, 2))], bucket_bytes=100)
ADAPTER = '{"r":2,"lora_alpha":2}'
FAR = ("stream",)


class BaseEngine(Engine):
    """Takes an adapter only over its base, which it keeps, and says what it was given."""

    def __init__(self, **sync: Any) -> None:
        super().__init__(**sync)
        self.base: tuple[Manifest, dict[int, bytes]] | None = None
        self.taken: list[tuple[str, int]] = []

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        held = self.base[0].digest if self.base is not None else ""
        if manifest.encoding == "adapter" and manifest.base != held:
            raise WorkError(
                "sync.failed", f"an adapter of the base {manifest.base[:12]}, here is {held[:12] or 'none'}"
            )
        await super().begin_update(manifest, tensors)

    async def commit_update(self) -> str:
        digest = await super().commit_update()
        assert self._now is not None
        manifest = self._now[0]
        self.taken.append((manifest.encoding, manifest.version))
        if manifest.encoding == "full":
            self.base = (manifest, {number: bytes(data) for number, data in self.held.items()})
        return digest

    def base_is(self, version: int) -> bool:
        return self.base is not None and [self.base[1][n] for n in sorted(self.base[1])] == buckets_of(version)


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**settings: Any) -> World:
        if settings["transport"] == "collective":
            import weightsync.transports.collective  # torch takes seconds, which a learner spent before  # noqa: F401  # torch takes seconds, which a learner spent before
        worlds.append(World(tmp_path, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def adapter(publisher: Publisher, version: int, base: str, plan: Plan = SMALL) -> str:
    return publisher.publish(version, plan, weights(version, plan), base=base, adapter=ADAPTER).digest


@pytest.mark.parametrize("transport", ["local", "stream", "collective", "disk", "auto"])
def test_who_joins_late_gets_the_base_and_then_the_adapter(make_world: Callable[..., World], transport: str) -> None:
    world = make_world(transport=transport)
    publisher = world.publisher()
    first = Member(world, "first", BaseEngine())
    base = publisher.publish(0, PLAN, weights(0)).digest
    publisher.wait_committed(0, members=1, timeout_s=90)
    for version in (1, 2, 3, 4, 5):  # more than there are slots: that of the base is not taken
        adapter(publisher, version, base)
        publisher.wait_committed(version, members=1, timeout_s=90)
    assert first.engine.taken == [("full", 0), *(("adapter", version) for version in (1, 2, 3, 4, 5))]
    late = Member(world, "late", BaseEngine())
    publisher.wait_committed(5, members=2, timeout_s=90)
    assert late.engine.taken == [("full", 0), ("adapter", 5)] and late.engine.base_is(0)
    assert late.receiver.digests[5] == publisher.digests[5] and late.receiver.version == 5
    assert len(first.engine.taken) == 6, "the other one is left alone"
    adapter(publisher, 6, base)
    publisher.wait_committed(6, members=2, timeout_s=90)
    assert late.engine.taken[2:] == [("adapter", 6)], "once is enough"
    until(lambda: any(line["version"] == 6 for line in world.lines()), "the line of the last round")
    given = [line for line in world.lines() if line["version"] == 0 and "late" in line["members"]]
    assert [line["members"]["late"] for line in given] == [base] and given[0]["encoding"] == "full"
    assert "the base of the adapter first" in given[0]["ways"]["late"]["why"]
    assert given[0]["carried_bytes"] == PLAN.nbytes and publisher.committed_version() == 6


def test_a_learner_and_a_service_that_start_again(make_world: Callable[..., World]) -> None:
    """The next learner stages the base again: nobody who has it is given it twice, also by another service."""
    world = make_world(transport="auto")
    publisher = world.publisher()
    stayed = Member(world, "stayed", BaseEngine())
    base = publisher.publish(0, PLAN, weights(0)).digest
    publisher.wait_committed(0, members=1, timeout_s=90)
    adapter(publisher, 1, base)
    publisher.wait_committed(1, members=1, timeout_s=90)
    publisher.close()
    world.stop_service()
    world.start_service()
    again = world.publisher(epoch=2)
    assert again.stage_base(0, PLAN, weights(0)).digest == base
    adapter(again, 2, base)
    again.wait_committed(2, members=1, timeout_s=90)
    assert stayed.engine.taken == [("full", 0), ("adapter", 1), ("adapter", 2)]
    far = Member(world, "far", BaseEngine(), transports={name: built_in_transports()[name] for name in FAR})
    again.wait_committed(2, members=2, timeout_s=90)
    assert far.engine.taken == [("full", 0), ("adapter", 2)]
    assert world.status()["members"]["far"]["transport"] == "stream"
    again.publish(3, PLAN, weights(3))  # whole weights again: nobody needs the base
    again.wait_committed(3, members=2, timeout_s=90)
    assert far.engine.taken[-1] == ("full", 3) and not any(slot.pinned for slot in again._staging._slots)


def test_a_base_that_nobody_offers_is_said(make_world: Callable[..., World]) -> None:
    world = make_world(transport="local")
    publisher = world.publisher()
    member = Member(world, "a", BaseEngine())
    adapter(publisher, 1, "ba5e" * 8)
    until(lambda: "the base is not offered" in world.status()["members"].get("a", {"why": ""})["why"], "the reason")
    assert member.engine.taken == [] and "ba5eba5eba5e" in world.status()["members"]["a"]["why"]
    other = publisher.stage_base(0, PLAN, weights(0)).digest
    adapter(publisher, 2, other)
    publisher.wait_committed(2, members=1, timeout_s=90)
    assert member.engine.taken == [("full", 0), ("adapter", 2)]


def packed(tensors: dict[str, torch.Tensor], plan: Plan) -> list[tuple[str, Any]]:
    return [(one.name, tensors[one.name].detach().flatten().view(torch.uint8).numpy()) for one in plan.tensors]


def test_the_hf_engine_that_joins_late_holds_base_and_adapter(make_world: Callable[..., World], tmp_path: Path) -> None:
    """What it holds in the end is W0 + (alpha / r) B A, to float32."""
    world = make_world(transport="stream")
    folder = save(tmp_path / "llama", _llama())
    model, settings = make(_llama(), seed=1), AdapterConfig(RANK, ALPHA, TARGETS)
    held, pairs = dict(model.named_parameters()), adapter_of(model, seed=5)
    whole = plan_buckets([TensorSpec(n, "F32", tuple(p.shape)) for n, p in held.items()], bucket_bytes=4096)
    small = plan_adapter([TensorSpec(n, "F32", tuple(t.shape)) for n, t in pairs.items()], settings, bucket_bytes=2048)

    async def body(engine: HFEngine) -> None:
        publisher = await asyncio.to_thread(world.publisher, fingerprint=engine.fingerprint())
        base = publisher.stage_base(0, whole, packed(held, whole)).digest
        version = publisher.publish(3, small, packed(pairs, small), base=base, adapter=config_text(settings))
        receiver = Receiver(world.address, engine=engine, name="late", keys=None, config=world.config.weightsync)
        stop = asyncio.Event()
        running = asyncio.ensure_future(receiver.run(stop))
        await asyncio.to_thread(publisher.wait_committed, 3, members=1, timeout_s=30)
        assert receiver.digests == {0: base, 3: version.digest} and await engine.attest() == version.digest
        weights = dict(engine._model.named_parameters())  # type: ignore[union-attr]
        for name, value in merged(1, pairs).named_parameters():
            assert torch.allclose(weights[name], value, rtol=0, atol=2e-6), name
        stop.set()
        await running

    run(config_of(folder, slots=2), body)
