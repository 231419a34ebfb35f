"""Adapters from the learner to the hf engine: a real backend, loop, publisher, service and receiver.

After every version the engine answers with the log-probs that the learner gives the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_engines import _qwen3, all_of, config_of, request, run, save
from test_weightsync_service import World

from asyncrl import config as configuration
from asyncrl.config.mode import sends_adapters
from asyncrl.config.sections.lora import TAKE_ADAPTERS
from asyncrl.runtime.role import Stop
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.batch.assembly import _minibatch
from learners.batch.micro_batches import Sample, packed_row
from learners.gang.gang import Gang
from learners.loop import Learner
from learners.main import publish_plans
from learners.rank_zero import Services
from learners.step.update import train_step
from producers.engines.hf.engine import HFEngine
from weightsync.receiver.receiver import Receiver

pytest.importorskip("peft", exc_type=ImportError)
PROMPT = np.array([5, 9, 4], np.int32)
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LIMIT = {"float32": 1e-4, "bfloat16": 0.3}  # nats; bf16: the learner adds products, the engine rounds the sum


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        made = Gang.join(configuration.parse('model.path="m"\ndata.source="a:b"\n[[reward]]\nfunction="a:b"'))
        yield made
        made.leave()
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, transport="stream")
    yield made
    made.close()


class Trained:
    """A learner without a buffer: it trains and publishes when it is told."""

    def __init__(self, folder: Path, root: Path, gang: Gang, publisher: Any, *settings: str) -> None:
        self.config = configuration.parse(
            f"""
model.path = "{folder}"
model.dtype = "float32"
run.dir = "{root}"
data.source = "a:b"
sampling.max_new_tokens = 64
learner.optim.lr = 1e-2
learner.lora.rank = 4
log.tensorboard = false
[[reward]]
function = "a:b"
""",
            overrides=settings,
        )
        self.gang = gang
        self.publisher = publisher
        self.backend = FSDP2Backend(self.config, gang)
        plan, adapter = publish_plans(self.backend, bucket_bytes=4096)
        buffer: Any = SimpleNamespace(evaluations=lambda seen: None, close=lambda: None)
        services = Services(self.config, buffer=buffer, publisher=publisher, plan=plan, adapter=adapter, stop=Stop())
        self.learner = Learner(self.config, gang=gang, backend=self.backend, services=services)

    def step(self, version: int) -> None:
        """Train on invented samples, which moves the weights far, and publish."""
        rng = np.random.default_rng(version)
        samples = [
            Sample(
                rng.integers(3, 20, 12).astype(np.int32),
                4,
                -np.ones(8, "f4"),
                np.ones(8, np.uint8),
                float(rng.normal()),
                number,
            )
            for number in range(6)
        ]
        share = [_minibatch(samples, ranks=1, max_tokens=256, packing=True)[0]]
        train_step(share, backend=self.backend, gang=self.gang, config=self.config.learner, step=version)
        self.publish(version)

    def publish(self, version: int) -> None:
        self.learner._publish(version)

    def logprobs(self, response: Any) -> Any:
        tokens = np.concatenate((PROMPT, np.asarray(response, np.int32)))
        ones = np.ones(len(response))
        row = packed_row([Sample(tokens, len(PROMPT), ones.astype("f4"), ones.astype(np.uint8), 0.0)])
        return self.backend.forward_logprobs([row])[0].float().numpy()


async def agree(engine: HFEngine, receiver: Receiver, trained: Trained, version: int) -> Any:
    """Wait until the engine serves the version, prove it, sample, and compare; what was sampled."""
    await asyncio.to_thread(trained.publisher.wait_committed, version, members=1, timeout_s=30)
    assert receiver.digests[version] == trained.publisher.digests[version] == await engine.attest()
    item = (await all_of(engine, request(f"v{trained.publisher.name}{version}", PROMPT)))[0]
    assert item.runs[0][0] == version and len(item.token_ids) > 4
    gap = np.abs(trained.logprobs(item.token_ids) - item.logprobs)
    assert gap.max() < LIMIT[trained.config.model.dtype]
    return item


def engine_of(world: World, body: Callable[[HFEngine, Receiver], Any], folder: Path, **producers: Any) -> None:
    async def whole(engine: HFEngine) -> None:
        receiver = Receiver(world.address, engine=engine, name="e", keys=None, config=world.config.weightsync)
        stop = asyncio.Event()
        running = asyncio.ensure_future(receiver.run(stop))
        try:
            await body(engine, receiver)
        finally:
            stop.set()
            await running

    run(config_of(folder, slots=2, **producers), whole)


class Named:
    """A publisher with a name for requests."""

    def __init__(self, publisher: Any, name: str) -> None:
        self.name = name
        self._publisher = publisher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)


def versions_carried(world: World) -> list[tuple[int, str]]:
    return [(line["version"], line["encoding"]) for line in world.lines() if line["carried_bytes"]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_goes_out_once_and_adapters_after_it(world: World, gang: Gang, tmp_path: Path, dtype: str) -> None:
    """Three versions, and a learner that starts again from a checkpoint: nobody gets the base twice."""
    folder = save(tmp_path / "model", _qwen3(), dtype=getattr(torch, dtype))

    async def body(engine: HFEngine, receiver: Receiver) -> None:
        publisher = Named(await asyncio.to_thread(world.publisher, fingerprint=engine.fingerprint()), "first")
        trained = Trained(folder, tmp_path / "run", gang, publisher, f"model.dtype={dtype}")
        trained.publish(0)
        start = await agree(engine, receiver, trained, 0)
        for version in (1, 2):
            trained.step(version)
            after = await agree(engine, receiver, trained, version)
        assert np.abs(trained.logprobs(start.token_ids) - start.logprobs).max() > 1e-2, "training moved the weights"
        assert after.runs[0][0] == 2
        (tmp_path / "checkpoint").mkdir()
        trained.backend.save(tmp_path / "checkpoint")
        await asyncio.to_thread(publisher.close)
        again = await asyncio.to_thread(world.publisher, fingerprint=engine.fingerprint(), epoch=2)
        other = Trained(folder, tmp_path / "run", gang, Named(again, "again"), f"model.dtype={dtype}")
        other.backend.load(tmp_path / "checkpoint")
        other.publish(2)
        await agree(engine, receiver, other, 2)
        assert again.digests[2] == publisher.digests[2], "the same adapter of the same base"
        other.step(3)
        await agree(engine, receiver, other, 3)

    engine_of(world, body, folder, dtype=dtype)
    carried = versions_carried(world)
    assert carried[:3] == [(0, "full"), (1, "adapter"), (2, "adapter")]
    assert set(carried[3:]) <= {(3, "adapter")}, "version 2 again, under the next learner, carried nothing"


def test_engines_that_take_whole_weights_get_them_merged(world: World, gang: Gang, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", _qwen3())

    async def body(engine: HFEngine, receiver: Receiver) -> None:
        publisher = Named(await asyncio.to_thread(world.publisher, fingerprint=engine.fingerprint()), "merged")
        trained = Trained(folder, tmp_path / "run", gang, publisher, "learner.lora.publish=merged")
        trained.publish(0)
        await agree(engine, receiver, trained, 0)
        trained.step(1)
        await agree(engine, receiver, trained, 1)

    engine_of(world, body, folder)
    assert versions_carried(world) == [(0, "full"), (1, "full")]


def test_merged_weights_are_those_that_the_engine_makes_of_an_adapter(world: World, gang: Gang, tmp_path: Path) -> None:
    """In bf16, bit by bit: both add in float32 and round once."""
    folder = save(tmp_path / "model", _qwen3(), dtype=torch.bfloat16)

    async def body(engine: HFEngine, receiver: Receiver) -> None:
        publisher = Named(await asyncio.to_thread(world.publisher, fingerprint=engine.fingerprint()), "bits")
        trained = Trained(folder, tmp_path / "run", gang, publisher, "model.dtype=bfloat16")
        trained.publish(0)
        await agree(engine, receiver, trained, 0)
        trained.step(1)
        await agree(engine, receiver, trained, 1)
        held = dict(engine._model.named_parameters())  # type: ignore[union-attr]
        for name, data in trained.backend.iter_hf_weights():
            made = held[name].detach().flatten().view(torch.uint8).numpy()
            assert np.array_equal(made, data), name

    engine_of(world, body, folder, dtype="bfloat16")


def test_the_list_of_engines_that_take_adapters_is_theirs(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", _qwen3())
    for in_place in (False, True):
        config = configuration.parse(
            (
                f'model.path="{folder}"\ndata.source="a:b"\nlearner.lora.rank=8\n'
                f'weightsync.in_place={str(in_place).lower()}\n[[reward]]\nfunction="a:b"'
            ),
        )
        assert sends_adapters(config) is ("adapter" in HFEngine(config).capabilities().encodings) is not in_place
    assert TAKE_ADAPTERS == ("hf",)
