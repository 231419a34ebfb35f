"""Weight sync without a model as real processes: a service, a learner that publishes arrays, generators that hold them.

Run by `sync_plant` in forked children. The service, the publisher and the receiver are the real ones; the engine keeps
arrays and takes digests of what it holds. Words on the connection are tuples.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import weightsync.transports.collective
import weightsync.transports.disk
import weightsync.transports.stream
from asyncrl.config import Config, load
from asyncrl.engine import EngineCapabilities
from asyncrl.errors import AsyncRLError
from asyncrl.runtime import failpoints, role
from asyncrl.runtime.run_dir import RunDir, endpoint
from asyncrl.wire import Buffer, Manifest, Tensor
from weightsync.main import serve
from weightsync.plan.buckets import Plan, TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.publisher.publisher import Publisher
from weightsync.receiver.receiver import Receiver

assert all((weightsync.transports.collective, weightsync.transports.disk, weightsync.transports.stream))
BUCKETS = 3
PLAN: Plan = plan_buckets([TensorSpec(f"layer.{i}", "F32", (3000 + i,)) for i in range(BUCKETS)], bucket_bytes=12_000)
WAIT_S = 20.0  # at a gate; a test lets go sooner


def weights(version: int, epoch: int) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Arrays in which few elements differ from those of the version before."""
    for number, tensor in enumerate(PLAN.tensors):
        values = np.random.default_rng(number).standard_normal(tensor.nbytes // 4).astype(np.float32)
        for change in range(version + 1):
            values[(change * 37 + number) % values.size] += epoch + change
        yield tensor.name, values.view(np.uint8)


def settings(path: str) -> tuple[Config, str]:
    failpoints.arm()
    config = load(Path(path))
    return config, endpoint(config, "weightsync")


# ---------------------------------------------------------------- service and learner


def service(pipe: Connection, path: str) -> None:
    """Until it is killed."""
    config, address = settings(path)
    asyncio.run(serve(config, role.Stop(), address=address, keys=None))


def learner(pipe: Connection, path: str, epoch: int) -> None:
    """At `("publish", v)`: `("published", v, digest, seconds that it was held up)`."""
    config, address = settings(path)
    publisher = Publisher(
        address,
        keys=None,
        config=config.weightsync,
        name="learner",
        fingerprint="model",
        scratch=RunDir(config.run_dir).root / "scratch",
    )
    publisher.start(epoch=epoch)
    pipe.send(("up",))
    while (word := _hear(pipe)) is not None and word[0] == "publish":
        started = time.monotonic()
        manifest = publisher.publish(word[1], PLAN, weights(word[1], epoch))
        pipe.send(("published", word[1], manifest.digest, time.monotonic() - started))
    publisher.close()


def _hear(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


# ---------------------------------------------------------------- generator


class GatedEngine:
    """Holds arrays by bucket. At an armed gate it says so and waits; every commit is told with the digest of what is
    held then."""

    def __init__(self, pipe: Connection, *, in_place: bool) -> None:
        self.in_place = in_place
        self.version = -1
        self.held: dict[int, bytearray] = {}
        self.manifest: Manifest | None = None  # of what is current; None: nothing, or overwritten in part
        self._pipe = pipe
        self._lock = threading.Lock()
        self._gates: set[tuple[int, int]] = set()
        self._go = threading.Event()
        self._groups: list[list[Tensor]] = []
        self._update: Manifest | None = None
        self._staged: dict[int, bytearray] = {}

    def say(self, *word: Any) -> None:
        with self._lock:
            self._pipe.send(word)

    def obey(self, word: tuple[Any, ...]) -> None:
        """A word of the test, on a thread of its own."""
        if word[0] == "gate":
            self._go.clear()
            self._gates = {(word[1], word[2])}
        elif word[0] == "go":
            self._gates = set()
            self._go.set()
        elif word[0] == "look":
            self.say("holds", self.version, self.digest())

    def digest(self) -> str:
        """Of what is current, from its bytes; empty where nothing may be sampled from."""
        manifest, held = self.manifest, self.held
        if manifest is None:
            return ""
        return version_digest([bucket_digest(group, held[number]) for number, group in enumerate(self._groups)])

    def fingerprint(self) -> str:
        return "model"

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            "gated", max_samples=1, max_tokens=64, encodings=("full", "adapter"), in_place=self.in_place
        )

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        self._groups = group_by_bucket(tensors, len(manifest.bucket_bytes))
        self._update, self._staged = manifest, {}
        if self.in_place:
            self.manifest, self._staged = None, self.held

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        assert self._update is not None
        self._staged[number] = bytearray(data)
        if (self._update.version, number) in self._gates:
            self.say("bucket", self._update.version, number)
            await asyncio.to_thread(self._go.wait, WAIT_S)
        return bucket_digest(self._groups[number], self._staged[number])

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        if self.manifest is None:
            return False
        into[:] = self.held[number]
        return True

    async def commit_update(self) -> str:
        assert self._update is not None
        self.held, self.manifest, self.version = self._staged, self._update, self._update.version
        digest = self.digest()
        self.say("commit", self.version, digest)
        return digest

    async def abort_update(self) -> None:
        if self._update is not None:
            self.say("abort", self._update.version)
        self._update = None


def generator(pipe: Connection, path: str, name: str) -> None:
    """Until it is killed: `("bucket", v, k)` at a gate, `("commit", v, digest)`, `("holds", v, digest)` when asked."""
    config, address = settings(path)
    engine = GatedEngine(pipe, in_place=config.weightsync.in_place)
    threading.Thread(target=_listen, args=(pipe, engine), daemon=True).start()

    async def run() -> None:
        receiver = Receiver(address, engine=engine, name=name, keys=None, config=config.weightsync)
        engine.say("up")
        await receiver.run(asyncio.Event())

    try:
        asyncio.run(run())
    except AsyncRLError as error:
        engine.say("ended", error.code, error.message)


def _listen(pipe: Connection, engine: GatedEngine) -> None:
    while (word := _hear(pipe)) is not None:
        engine.obey(word)
    os._exit(0)  # the test is gone
