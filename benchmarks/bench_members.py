"""A round of weights to 8 and to 256 generators, with relays and without.

Run: `python benchmarks/bench_members.py [--members 8 256] [--mib 4] [--rounds 5]`. The service, the publisher and the
receivers are the product's own, over TCP (transport `stream`); the generators' engines are simulated: they copy what
comes, and digest it. 32 generators share a process. A version is small, so that the time is that of the service and of
the messages, not that of the bytes: on one host all generators copy and digest with the same cores. A round goes from
the end of `publish` to the commit of the last generator, as the service sees it. Medians of the rounds after the first.
Results go to benchmarks/results/members.json.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100
from bench_buffer import cpu_of  # noqa: E402, RUF100
from sync_rig import LIMIT_S, Weights, config_of  # noqa: E402, RUF100

from asyncrl import config as settings  # noqa: E402, RUF100
from asyncrl.engine import EngineCapabilities  # noqa: E402, RUF100
from asyncrl.runtime.run_dir import RunDir, endpoint
from weightsync.plan.buckets import Plan, TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.publisher.publisher import Publisher
from weightsync.receiver.receiver import Receiver

PER_PROCESS = 32


class SimulatedEngine:
    """Holds the bytes of a version."""

    def __init__(self) -> None:
        self._held: dict[int, bytearray] = {}
        self._next: dict[int, bytearray] = {}
        self._digests: list[str] = []

    def fingerprint(self) -> str:
        return "bench"

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("bench", max_samples=1, max_tokens=1, kv_tokens=1)

    async def begin_update(self, manifest: Any, tensors: Any) -> None:
        self._manifest, self._groups = manifest, group_by_bucket(tensors, len(manifest.bucket_bytes))
        self._next, self._digests = {}, []

    async def apply_bucket(self, number: int, data: Any) -> str:
        self._next[number] = bytearray(data)
        like = self._manifest.bucket_digests[number]
        self._digests.append(bucket_digest(self._groups[number], self._next[number], like=like))
        return self._digests[-1]

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        into[:] = self._held[number]
        return True

    async def commit_update(self) -> str:
        self._held = self._next
        return version_digest(self._digests)

    async def abort_update(self) -> None:
        self._next = {}


def generators(config_path: str, names: list[str]) -> None:
    """A process of them; ends by a signal."""
    config = settings.load(Path(config_path))

    async def follow() -> None:
        receivers = [
            Receiver(
                endpoint(config, "weightsync"),
                engine=SimulatedEngine(),
                name=name,
                keys=None,  # type: ignore[arg-type]
                config=config.weightsync,
                attest_every_s=0,
            )
            for name in names
        ]
        await asyncio.gather(*(one.run(asyncio.Event()) for one in receivers))

    asyncio.run(follow())


def measure(members: int, fanout: int, plan: Plan, weights: Weights, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as made:
        config = config_of(Path(made) / "run", "stream")
        config = msgspec.structs.replace(
            config,
            weightsync=msgspec.structs.replace(config.weightsync, relay_fanout=fanout),
            network=msgspec.structs.replace(config.network, weightsync="tcp://127.0.0.1:41235", insecure_no_auth=True),
        )
        run = RunDir(config.run_dir).create()
        run.config.write_text(settings.dump(config))
        command = [sys.executable, "-m", "weightsync.main", "--config", str(run.config), "--name", "weightsync"]
        service = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        spawn = multiprocessing.get_context("spawn")
        names = [f"g{number}" for number in range(members)]
        parts = [names[first : first + PER_PROCESS] for first in range(0, members, PER_PROCESS)]
        children: list[BaseProcess] = [
            spawn.Process(target=generators, args=(str(run.config), part), daemon=True) for part in parts
        ]
        for child in children:
            child.start()
        publisher = Publisher(
            endpoint(config, "weightsync"),
            keys=None,
            config=config.weightsync,
            name="learner",
            fingerprint="bench",
            scratch=run.root / "staging",
        )
        publisher.start(epoch=1)
        times, used = [], []
        try:
            for version in range(1, rounds + 2):
                weights.next()
                publisher.publish(version, plan, weights.chunks())
                began, cpu = time.monotonic(), cpu_of(service.pid)
                publisher.wait_committed(version, members=members, timeout_s=LIMIT_S)
                times.append(time.monotonic() - began)
                used.append(cpu_of(service.pid) - cpu)
        finally:
            for child in children:
                child.kill()
            service.kill()
            service.wait(30)
            publisher.close()
    return {"round_s": statistics.median(times[1:]), "service_cpu_s": statistics.median(used[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--mib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    specs = [TensorSpec(f"layers.{number}.weight", "BF16", (64, 512)) for number in range(int(16 * args.mib))]
    plan = plan_buckets(specs, bucket_bytes=1 << 20)
    weights, runs = Weights(plan), {}
    for members in args.members:
        for fanout in (2, 0):
            name = f"{members} generators, {'relays' if fanout else 'no relays'}"
            runs[name] = {
                key: round(value, 4) for key, value in measure(members, fanout, plan, weights, args.rounds).items()
            }
            print(name, runs[name], flush=True)
    what = "seconds of a round of weights to simulated generators, over TCP on one host"
    path = ROOT / "benchmarks" / "results" / "members.json"
    reports.write(path, what, packages=("pyzmq", "msgspec"), bytes=sum(weights.sizes), runs=runs)


if __name__ == "__main__":
    main()
