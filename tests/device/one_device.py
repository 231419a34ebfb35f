"""A learner and an engine in one process and on one device, one after the other as `cluster.devices = "turns"` has it.

Run as `python one_device.py CONFIG`; prints the peaks of the device's memory by phase, and what stays in between.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_npu
from made_batches import a_batch, a_group, a_sample
from torch_npu import _C

from asyncrl.config import Config, load
from asyncrl.device_turn import DeviceTurn
from asyncrl.engine import GenRequest
from asyncrl.wire import Manifest
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.device_turns import DeviceTurns
from learners.gang.gang import Gang
from learners.main import publish_plans
from learners.step.resilient_step import StepRunner
from producers.engines.hf.engine import HFEngine
from producers.engines.turns import LINGER_S, TurnTaking
from weightsync.plan.buckets import group_by_bucket
from weightsync.plan.digest import bucket_digest, version_digest

assert torch_npu is not None
GROUPS, SAMPLES, LENGTH = 8, 4, 24


def measured(what: Any) -> tuple[Any, int]:
    """A result, and the peak of the device's memory meanwhile."""
    _C.reset_peak(0)
    result = what()
    torch.npu.synchronize()
    return result, _C.peak(0)


class Side:
    """The learner's."""

    def __init__(self, config: Config) -> None:
        self.gang = Gang.join(config)
        self.turns = DeviceTurns(config, self.gang)
        self.turns.begin()
        self.backend = FSDP2Backend(config, self.gang)
        self.plan, _ = publish_plans(self.backend, bucket_bytes=config.weightsync.bucket_bytes)
        self.runner = StepRunner(
            config.learner, gang=self.gang, backend=self.backend, say=str, quarantine=lambda *_: None
        )
        self.sums: list[float] = []

    def step(self, number: int) -> None:
        rng = np.random.default_rng(number)
        groups = [
            a_group(
                n, rng.integers(3, 20, 5), [a_sample(i, rng.integers(3, 20, LENGTH), reward=i % 2) for i in range(4)]
            )
            for n in range(GROUPS)
        ]
        self.turns.begin()
        batch, shares = self.runner.cut(a_batch(number, number - 1, groups))
        self.runner.train(shares[0], step=number, batch=batch)

    def publish(self, version: int) -> tuple[Manifest, list[bytes]]:
        buckets = [bytearray(size) for size in self.plan.bucket_bytes]
        places = {place.name: place for place in self.plan.tensors}
        for name, data in self.backend.iter_hf_weights():
            place = places[name]
            buckets[place.bucket][place.offset : place.offset + place.nbytes] = data.tobytes()
        groups = group_by_bucket(self.plan.tensors, len(buckets))
        digests = tuple(bucket_digest(group, data) for group, data in zip(groups, buckets, strict=True))
        digest = version_digest(digests)
        return Manifest(version, self.plan.digest, self.plan.bucket_bytes, digests, digest), [*map(bytes, buckets)]

    def state(self) -> list[bytes]:
        return [tensor.detach().cpu().numpy().tobytes() for tensor in self.backend.resident()]


async def take(engine: TurnTaking, plan: Any, version: tuple[Manifest, list[bytes]]) -> None:
    manifest, buckets = version
    await engine.begin_update(manifest, plan.tensors)
    for number, data in enumerate(buckets):
        await engine.apply_bucket(number, data)
    assert await engine.commit_update() == await engine.attest() == manifest.digest


async def answer(engine: TurnTaking) -> list[list[int]]:
    """Generate, and wait until the engine sleeps."""
    prompt = np.arange(3, 9, dtype=np.int32)
    requests = [GenRequest(f"{n}:1", prompt, tuple(range(SAMPLES)), n, LENGTH) for n in range(GROUPS)]

    async def one(request: GenRequest) -> list[list[int]]:
        return [delta.token_ids.tolist() async for delta in engine.generate(request)]

    found = await asyncio.gather(*map(one, requests))
    await asyncio.sleep(LINGER_S)
    while engine._turn.held:  # bounded: the test's time limit
        await asyncio.sleep(0.01)
    return sorted(tokens for several in found for tokens in several)


async def main() -> None:
    config = load(Path(sys.argv[1]))
    found: dict[str, int] = {}
    learner, _ = measured(lambda: Side(config))
    learner.step(1)  # makes the optimizer's states
    _, found["learner"] = measured(lambda: learner.step(2))
    first = learner.publish(1)
    before = learner.state()
    learner.turns.end(learner.backend)
    found["between"] = _C.used(0)

    engine = TurnTaking(HFEngine(config), DeviceTurn(config.run_dir, together=True, limit_s=60.0))
    _C.reset_peak(0)
    await engine.start()
    await take(engine, learner.plan, first)
    answers = await answer(engine)
    torch.npu.synchronize()
    found["engine"] = _C.peak(0)
    found["between"] = max(found["between"], _C.used(0))

    learner.turns.begin()
    assert learner.state() == before, "every byte of the learner's states came back"
    _, found["learner again"] = measured(lambda: learner.step(3))
    second = learner.publish(2)
    learner.turns.end(learner.backend)
    await take(engine, learner.plan, second)
    _C.reset_peak(0)
    assert await answer(engine) != answers, "by other weights"
    found["engine again"] = _C.peak(0)
    found["between"] = max(found["between"], _C.used(0))
    found["version"] = sum(learner.plan.bucket_bytes)
    await engine.close(grace_s=5.0)
    print("found", json.dumps(found), flush=True)
    learner.gang.leave()


if __name__ == "__main__":
    asyncio.run(main())
