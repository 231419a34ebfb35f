"""What the receiver's tests share: the toy engine with a memory, versions from seeds, a thrifty inbox, a member."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from test_weightsync_service import PLAN, World, weights
from test_weightsync_service import Member as PlainMember

from asyncrl.config import Config, DataConfig, ModelConfig, RewardFunctionConfig, WeightSyncConfig
from asyncrl.wire import Hop, Manifest
from weightsync.encoding import delta
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest

_spec = importlib.util.spec_from_file_location("toy_engine", Path(__file__).parents[1] / "faults" / "toy_engine.py")
assert _spec is not None and _spec.loader is not None
_toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_toy)
GROUPS = group_by_bucket(PLAN.tensors, len(PLAN.bucket_bytes))


def toy_config(**sync: Any) -> Config:
    return Config(
        model=ModelConfig(path="none"),
        data=DataConfig(source="a:b"),
        reward=(RewardFunctionConfig(function="a:b"),),
        weightsync=WeightSyncConfig(**sync),
    )


class Engine(_toy.ToyEngine):  # type: ignore[misc]
    """The toy engine with a pause per bucket and a memory of what was done to it."""

    def __init__(self, *, bucket_s: float = 0.0, **sync: Any) -> None:
        super().__init__(toy_config(**sync))
        self.bucket_s = bucket_s
        self.done: list[str] = []
        self.applied: list[tuple[int, float, float]] = []
        self.readable = True

    def fingerprint(self) -> str:
        return "model-a"

    async def apply_bucket(self, number: int, data: Any) -> str:
        started = time.monotonic()
        await asyncio.sleep(self.bucket_s)
        digest: str = await super().apply_bucket(number, data)
        self.applied.append((number, started, time.monotonic()))
        self.done.append(f"bucket {number}")
        return digest

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        return self.readable and await super().read_bucket(number, into)

    async def abort_update(self) -> None:
        self.done.append("abort")
        await super().abort_update()

    async def commit_update(self) -> str:
        self.done.append("commit")
        digest: str = await super().commit_update()
        return digest


class Lends(Engine):
    """Its buckets stay where they are received; two rooms take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[dict[int, bytearray]] = [{}, {}]
        self.turn = 0

    async def begin_update(self, manifest: Manifest, tensors: Any) -> None:
        await super().begin_update(manifest, tensors)
        self._staged = self.rooms[self.turn]
        for number, size in enumerate(manifest.bucket_bytes):
            room = self._staged.setdefault(number, bytearray(size))
            room[:] = b"\xdd" * size  # whoever still read the version before the last sees other bytes from now on

    def bucket_room(self, number: int) -> memoryview:
        return memoryview(self._staged[number])

    async def apply_bucket(self, number: int, data: Any) -> str:
        self._staged[number][:] = data
        self._missing.discard(number)
        return bucket_digest(GROUPS[number], self._staged[number])

    async def commit_update(self) -> str:
        self.turn = 1 - self.turn
        return await super().commit_update()


def buckets_of(version: int) -> list[bytes]:
    buckets = [bytearray(size) for size in PLAN.bucket_bytes]
    for tensor, (_, data) in zip(PLAN.tensors, weights(version), strict=True):
        buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = data.tobytes()
    return [bytes(bucket) for bucket in buckets]


def manifest_of(version: int) -> Manifest:
    digests = tuple(bucket_digest(*pair) for pair in zip(GROUPS, buckets_of(version), strict=True))
    return Manifest(version, PLAN.digest, PLAN.bucket_bytes, digests, version_digest(digests))


def hop_of(old: int, new: int) -> tuple[Hop, list[bytes]]:
    blobs = [delta.encode(*pair) for pair in zip(buckets_of(old), buckets_of(new), GROUPS, strict=True)]
    return Hop(old, manifest_of(old).digest, tuple(map(len, blobs))), blobs


class FakeInbox:
    """Blobs from memory through two buffers that take turns, as thrifty as the interface allows."""

    def __init__(
        self, blobs: Sequence[bytes], *, blob_s: float = 0.0, before: Callable[[int], None] = lambda number: None
    ) -> None:
        self.blobs = blobs
        self.blob_s = blob_s
        self.before = before
        self.threads: set[int] = set()
        self.reads: list[tuple[int, float, float]] = []
        self.closed = 0
        self.buffers = [bytearray(), bytearray()]

    def open(self) -> None:
        self.threads.add(threading.get_ident())

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        self.threads.add(threading.get_ident())
        assert number == len(self.reads) and not self.closed
        started = time.monotonic()
        time.sleep(self.blob_s)
        self.before(number)
        buffer = self.buffers[number % 2]
        buffer[:] = b"\xee" * len(buffer)
        size = len(self.blobs[number])
        if len(buffer) < size:
            buffer = self.buffers[number % 2] = bytearray(size)
        buffer[:size] = self.blobs[number]
        self.reads.append((number, started, time.monotonic()))
        return memoryview(buffer)[:size]

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


class Member(PlainMember):
    """A member with one of the engines above; the world closes it."""

    def __init__(self, world: World, name: str, engine: Engine, **settings: Any) -> None:
        super().__init__(world, name, engine, **settings)
        world.cleanups.append(self.close)

    def holds(self, version: int) -> bool:
        held = [bytes(self.engine.held.get(n, b"")) for n in range(len(GROUPS))]
        return self.receiver.version == version and held == buckets_of(version)
