"""A buffer as a process, and who talks to it: producers, learners, all of a few lines. For the tests of the service."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from bare_config import BARE

from asyncrl import wire
from asyncrl.config import Config, dump
from asyncrl.engine import GenDelta
from asyncrl.metrics import read_lines
from asyncrl.monitor.control import ServiceClient
from asyncrl.runtime.run_dir import RunDir, endpoint
from asyncrl.wire.batch_arrays import ClaimedBatch
from buffers.client.learner import LearnerClient
from buffers.client.producer import ProducerClient

ROOT = Path(__file__).resolve().parents[2]
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
TOML = f"""{BARE}
max_staleness = 1
lease_timeout_s = 2.0
store = "{{store}}"
{{buffer}}
[run]
name = "t"
dir = "{{dir}}"
[network]
max_message_bytes = 1048576
"""


def need_redis() -> None:
    if SERVER is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no redis-server or valkey-server on the PATH")


class Service:
    """A buffer process of a configuration; started, killed and started again by the tests."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run = RunDir(config.run_dir).create()
        self.run.config.write_text(dump(config))
        self.address = endpoint(config, "buffer")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.run.logs / "buffer.log"

    def start(self, wait: bool = True) -> Service:
        with self.log.open("ab") as log:
            self.process = warm.popen(
                [sys.executable, "-m", "buffers.main", "--config", str(self.run.config)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        if wait:
            observer = ServiceClient(self.address, timeout_s=60)
            observer.status()
            observer.close()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
            raise AssertionError(f"no end after SIGTERM:\n{self.log.read_text()}") from None

    def status(self) -> dict[str, Any]:
        observer = ServiceClient(self.address, timeout_s=60)
        try:
            return observer.status()
        finally:
            observer.close()


Make = Callable[..., Service]


def sample(index: int, version: int = 0, tokens: int = 3, logprob: float = -0.5) -> GenDelta:
    return GenDelta(
        str(index),
        index,
        np.arange(tokens, dtype=np.int32) + index,
        np.full(tokens, logprob, np.float32),
        ((version, tokens),),
        "stop",
    )


class Producer:
    """A producer that answers every lease at once."""

    def __init__(self, address: str, name: str = "p0") -> None:
        self.client = ProducerClient(address, name=name, timeout_s=60)

    async def lease(self, version: int = 0, count: int = 8, wait_s: float = 2.0) -> wire.Leases:
        return await self.client.lease(engine_version=version, max_groups=count, wait_s=wait_s)

    async def answer(
        self, lease: wire.Lease, version: int = 0, rewards: bool = True, **kwargs: Any
    ) -> wire.SamplesReply:
        samples = [sample(index, version, **kwargs) for index in lease.missing]
        return await self.client.submit(
            lease,
            prompt_ids=np.array([lease.group, 7], np.int32),
            samples=samples,
            digests={version: f"d{version}"},
            row={"ground_truth": str(lease.group)},
            rewards={item.index: float(item.index) for item in samples} if rewards else {},
        )


def produce(address: str, groups: int, version: int = 0, rewards: bool = True, name: str = "p0") -> list[int]:
    """Lease and answer that many groups."""

    async def work() -> list[int]:
        producer = Producer(address, name)
        await producer.client.hello("model")
        done: list[int] = []
        try:
            while len(done) < groups:
                leases = await producer.lease(version, groups - len(done), wait_s=8.0)
                assert leases.leases, leases.reason
                for lease in leases.leases:
                    reply = await producer.answer(lease, version, rewards)
                    assert reply.accepted == lease.missing, reply
                    done.append(lease.group)
        finally:
            producer.client.close()
        return done

    return asyncio.run(work())


def learner(
    address: str, *, step: int = 0, ledger: str = "", takeover: bool = False, name: str = "learner"
) -> LearnerClient:
    client = LearnerClient(address, name=name, timeout_s=60)
    client.hello("model")
    client.register(step=step, ledger=ledger, takeover=takeover, fingerprint="model", digests={step: f"d{step}"})
    return client


def claim(client: LearnerClient, step: int, wait_s: float = 8.0) -> ClaimedBatch:
    batch = client.claim(step=step, version=step - 1, wait_s=wait_s)
    assert isinstance(batch, ClaimedBatch), batch
    return batch


def ids(batch: ClaimedBatch) -> list[int]:
    return [group.group for group in batch.groups]


def history(service: Service, event: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(service.run.history) if line["e"] == event]
