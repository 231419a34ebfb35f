"""F25: the learner is restarted from nothing five times (its checkpoints are gone): versions grow by (epoch, n).

A real weight receiver takes every version, a producer samples with what the receiver holds. The generator goes back
with the learner: it accepts a lower version of a higher epoch, and its digest is the one that was committed.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from learner_lab import Lab, Recorded, make_group

from asyncrl.audit.prove import audit_file
from asyncrl.engine import EngineCapabilities
from asyncrl.errors import AsyncRLError
from asyncrl.metrics import read_lines
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.runtime.run_dir import endpoint
from buffers.client.producer import ProducerClient
from weightsync.plan.digest import digest_tensors
from weightsync.receiver.receiver import Receiver

KILLS = ("after_commit", "before_commit", "after_step", "after_checkpointed", "after_commit")
RESTARTS = len(KILLS)
STEPS = 6


class Engine:
    """Holds the bytes it was sent; says their digest."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._staged: dict[str, bytes] = {}
        self._tensors: tuple[Any, ...] = ()

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("bytes", max_samples=1, max_tokens=64, encodings=("full", "adapter"))

    def fingerprint(self) -> str:
        return self._fingerprint

    async def begin_update(self, manifest: Any, tensors: Any) -> None:
        self._tensors, self._staged = tuple(tensors), {}

    async def apply_bucket(self, number: int, data: Any) -> None:
        for tensor in self._tensors:
            if tensor.bucket == number:
                self._staged[tensor.name] = bytes(data[tensor.offset : tensor.offset + tensor.nbytes])

    async def commit_update(self) -> str:
        return digest_tensors(self._tensors, self._staged.__getitem__)[1]

    async def abort_update(self) -> None:
        self._staged = {}


class Generator:
    """A thread: a receiver of weights, and a producer that samples under the version that it holds."""

    def __init__(self, lab: Lab) -> None:
        self.error: BaseException | None = None
        self._lab = lab
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except AsyncRLError as error:
            self.error = error

    async def _main(self) -> None:
        config = self._lab.config
        fingerprint = model_fingerprint(config.model.path, dtype=config.model.dtype)
        receiver = Receiver(
            endpoint(config, "weightsync"), engine=Engine(fingerprint), name="gen", keys=None, config=config.weightsync
        )  # type: ignore[arg-type]
        client = ProducerClient(endpoint(config, "buffer"), name="gen", timeout_s=60)
        stop = asyncio.Event()
        running = asyncio.ensure_future(receiver.run(stop))
        await client.hello(fingerprint)
        try:
            while not self._stop.is_set() and not running.done():
                if receiver.version < 0:
                    await asyncio.sleep(0.01)
                    continue
                await self._sample(client, receiver)
        finally:
            stop.set()
            await running
            client.close()

    @staticmethod
    async def _sample(client: ProducerClient, receiver: Receiver) -> None:
        leases = await client.lease(engine_version=receiver.version, max_groups=2, wait_s=0.2)
        for lease in leases.leases:
            version = receiver.version
            prompt, samples = make_group(lease.group, version)
            await client.submit(
                lease,
                prompt_ids=prompt,
                samples=samples,
                digests={version: receiver.digests[version]},
                row={},
                rewards={item.index: float(item.index % 2) for item in samples},
            )

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.mark.slow
def test_f25_versions_grow_by_epoch(recorded: Recorded, tmp_path: Path) -> None:
    lab = recorded.fresh(tmp_path, steps=STEPS, extra="buffer.max_staleness=2;learner.checkpoint_every=1").serve()
    generator = Generator(lab)
    try:
        for place in KILLS:
            assert lab.end_of(lab.learner(failpoint=f"learner.{place}:kill:4")) == -9, lab.tail()
            shutil.rmtree(lab.run.checkpoints)
            lab.run.create()
        lab.finish()
        assert generator.error is None, generator.error
    finally:
        generator.close()
        lab.close()
    registered = lab.history("register")
    assert [line["step"] for line in registered] == [0] * (RESTARTS + 1)
    assert [line["epoch"] for line in registered] == list(range(1, RESTARTS + 2))
    committed = [(line["epoch"], line["version"]) for line in lab.history("commit")]
    assert committed == sorted(set(committed)) and len(committed) >= 3 * RESTARTS + STEPS
    digests: dict[int, set[str]] = {}
    for line in lab.history("commit"):
        digests.setdefault(line["version"], set()).add(line["digest"])
    taken = [line for line in read_lines(lab.run.metrics / "weightsync.jsonl") if line.get("members")]
    wrong = [
        line
        for line in taken
        for digest in line["members"].values()
        if line["version"] and digest not in digests[line["version"]]
    ]
    assert taken and len(wrong) <= RESTARTS
    for line in wrong:  # of a learner that was killed between publish and commit; nothing made by them is trained
        before = [event for event in lab.history("commit", "register") if event["t"] < line["t"]]
        assert line["version"] == before[-1]["step"] + 1, (line, before[-1])
    back = sum(1 for one, two in itertools.pairwise(taken) if two["version"] < one["version"])
    assert back == RESTARTS, [line["version"] for line in taken]  # the generator went back each time, and served
    audit = audit_file(lab.run.history)
    assert (audit.lost, audit.doubled) == (0, 0), audit.violations
    print(f"{RESTARTS} restarts, {len(committed)} commits in order, {len(taken)} rounds taken; {audit.violations}")
    assert audit.ok, audit.violations
