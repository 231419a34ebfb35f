"""The publisher against a real service and receiver: deltas, versions that come faster than they leave, its figures."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config import Config, DataConfig, ModelConfig, RewardFunctionConfig, RunConfig, WeightSyncConfig
from asyncrl.engine import EngineCapabilities
from asyncrl.metrics import read_lines
from asyncrl.runtime import role
from asyncrl.runtime.run_dir import RunDir, endpoint
from weightsync.main import serve
from weightsync.plan.buckets import TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.publisher import delta_chain as hops
from weightsync.publisher.outboxes import Outboxes
from weightsync.publisher.publisher import Publisher
from weightsync.receiver.receiver import Receiver

PLAN = plan_buckets([TensorSpec(f"layer{i}", "BF16", (2000 + i, 4)) for i in range(6)], bucket_bytes=40_000)
WAIT_S = 20.0


class ArrayEngine:
    """Buckets as bytes."""

    def __init__(self) -> None:
        self.model: dict[int, bytes] = {}
        self._new: dict[int, bytes] = {}

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("arrays", max_samples=1, max_tokens=64, encodings=("full", "adapter"))

    def fingerprint(self) -> str:
        return "model-a"

    async def begin_update(self, manifest: Any, tensors: Any) -> None:
        self._new = {}

    async def apply_bucket(self, number: int, data: Any) -> str:
        self._new[number] = bytes(data)
        return bucket_digest(group_by_bucket(PLAN.tensors, len(PLAN.bucket_bytes))[number], self._new[number])

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        into[:] = self.model[number]
        return True

    async def commit_update(self) -> str:
        self.model = self._new
        groups = group_by_bucket(PLAN.tensors, len(PLAN.bucket_bytes))
        return version_digest([bucket_digest(groups[number], self.model[number]) for number in sorted(self.model)])

    async def abort_update(self) -> None:
        self._new = {}


class World:
    """A service, a publisher and one member, all in threads."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.config = Config(
            run=RunConfig(dir=str(root / "run")),
            model=ModelConfig(path="none"),
            data=DataConfig(source="a:b"),
            reward=(RewardFunctionConfig(function="a:b"),),
            weightsync=WeightSyncConfig(**{"timeout_s": WAIT_S, "member_timeout_s": WAIT_S, **settings}),
        )
        self.run = RunDir(self.config.run_dir).create()
        self.data = np.random.default_rng(1).integers(0, 256, sum(t.nbytes for t in PLAN.tensors), dtype=np.uint8)
        self.engine = ArrayEngine()
        self._stop = role.Stop()
        self._ended = threading.Event()
        address = endpoint(self.config, "weightsync")
        self.publisher = Publisher(
            address,
            keys=None,
            config=self.config.weightsync,
            name="learner",
            fingerprint="model-a",
            scratch=self.run.root / "weights",
        )
        self.receiver = Receiver(address, engine=self.engine, name="a", keys=None, config=self.config.weightsync)  # type: ignore[arg-type]
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (
                lambda: asyncio.run(serve(self.config, self._stop, address=address, keys=None)),
                lambda: asyncio.run(self._receive()),
            )
        ]
        for thread in self._threads:
            thread.start()
        self.publisher.start(epoch=1)

    async def _receive(self) -> None:
        stop = asyncio.Event()
        running = asyncio.ensure_future(self.receiver.run(stop))
        while not self._ended.is_set() and not running.done():
            await asyncio.sleep(0.02)
        stop.set()
        await running

    def publish(self, version: int) -> None:
        """A version that differs in 50 bytes from the one before."""
        self.data[np.random.default_rng(version).choice(self.data.size, 50, replace=False)] ^= 0x11
        chunks, start = [], 0
        for tensor in PLAN.tensors:
            chunks.append((tensor.name, self.data[start : start + tensor.nbytes].copy()))
            start += tensor.nbytes
        self.publisher.publish(version, PLAN, chunks)

    def holds_newest(self) -> bool:
        parts = [
            self.engine.model[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] for tensor in PLAN.tensors
        ]
        return b"".join(parts) == self.data.tobytes()

    def committed(self, version: int) -> None:
        self.publisher.wait_committed(version, members=1, timeout_s=WAIT_S)
        assert self.receiver.version == version and self.holds_newest()

    def lines(self) -> dict[int, dict[str, Any]]:
        return {line["version"]: line for line in read_lines(self.run.metrics / "weightsync.jsonl")}

    def close(self) -> None:
        self._ended.set()
        self._threads[1].join(60)
        self.publisher.close()
        self._stop.set("test")
        self._threads[0].join(60)
        assert not any(thread.is_alive() for thread in self._threads)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def made(**settings: Any) -> World:
        worlds.append(World(tmp_path, **settings))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


@pytest.mark.parametrize("transport", ["stream", "disk"])
def test_who_holds_the_version_before_gets_the_delta(make: Callable[..., World], transport: str) -> None:
    world = make(transport=transport, encoding="delta")
    for version in (0, 1, 2):
        world.publish(version)
        world.committed(version)
    carried = {version: line["carried_bytes"] for version, line in world.lines().items()}
    assert carried[0] == PLAN.nbytes and max(carried[1], carried[2]) < PLAN.nbytes / 20
    stats = world.publisher.stats
    assert stats["publish_bytes"] == PLAN.nbytes and stats["delta_bytes"] == carried[2] and stats["delta_s"] > 0


def test_a_process_that_ends_now_waits_for_no_round(make: Callable[..., World]) -> None:
    """A member that takes no version keeps its round open, and with it the publisher's thread that watches it."""
    world = make(transport="disk")
    began, go_on = threading.Event(), asyncio.Event()

    async def stalled(*_: Any) -> None:
        began.set()
        await asyncio.wait_for(go_on.wait(), WAIT_S)

    world.engine.begin_update = stalled  # type: ignore[method-assign]
    world.publish(0)
    assert began.wait(WAIT_S)
    slots = list(world.publisher._staging._slots)
    assert slots and all(slot.path.exists() for slot in slots)
    before = time.monotonic()
    world.publisher.close(hurry=True)
    assert time.monotonic() - before < WAIT_S / 2
    assert not any(slot.path.exists() for slot in slots)


def test_publish_never_waits_for_an_encoding_and_versions_are_skipped(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    real, encoded = hops.encode, []

    def slow(*args: Any) -> bytes:
        began.set()
        encoded.append(1)
        assert go_on.wait(WAIT_S)
        return real(*args)

    monkeypatch.setattr(hops, "encode", slow)
    world = make(transport="stream", encoding="delta")
    world.publish(0)
    world.committed(0)
    world.publish(1)
    assert began.wait(WAIT_S)
    for version in range(2, 9):
        world.publish(version)  # returns while 0 -> 1 is encoded: the test would end by its time limit
    assert not go_on.is_set() and world.receiver.version == 0
    go_on.set()
    world.committed(8)
    assert len(encoded) <= 3 * len(PLAN.bucket_bytes), "0 -> 1, 1 -> 8, and what came in between at most"


def test_versions_that_come_while_one_is_sent_supersede_it(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are slots: what is being sent stays as it is until the end."""
    began, go_on = threading.Event(), threading.Event()
    real, sent = Outboxes.send, []

    def slow(outboxes: Outboxes, reply: Any, blobs: Any, **options: Any) -> None:
        began.set()
        before = [bytes(blob) for blob in blobs]
        assert go_on.wait(WAIT_S)
        sent.append(before == [bytes(blob) for blob in blobs])
        real(outboxes, reply, blobs, **options)

    monkeypatch.setattr(Outboxes, "send", slow)
    world = make(transport="collective")
    world.publish(0)
    assert began.wait(WAIT_S)
    for version in range(1, 8):
        world.publish(version)
    go_on.set()
    world.committed(7)
    assert sent and all(sent)
    assert world.receiver._relay.outbox is None, "nobody pulls here, so no copy is kept for others"
