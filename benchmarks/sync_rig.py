"""The processes of `bench_weightsync.py`: a world of one service, one publisher and generators; the Gloo baselines.

`python benchmarks/sync_rig.py --member NAME --config FILE --gib N` is a generator process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl import config as settings  # noqa: E402, RUF100
from asyncrl.engine import EngineCapabilities  # noqa: E402, RUF100
from asyncrl.errors import AsyncRLError  # noqa: E402, RUF100
from asyncrl.runtime.run_dir import RunDir, endpoint
from weightsync.plan.buckets import Plan, TensorSpec
from weightsync.publisher.direct import digest_tensors
from weightsync.publisher.publisher import Publisher
from weightsync.publisher.senders import Peers
from weightsync.receiver.receiver import Receiver

LAYERS, HIDDEN, KEYS, MLP, WORDS = 24, 896, 128, 4864, 151_936  # Qwen2.5-0.5B
STEP_S = 0.001
LIMIT_S = 300.0  # of a round, a broadcast, a start


def specs_of(gib: float) -> list[TensorSpec]:
    """290 tensors of about `gib` GiB in all."""
    small = LAYERS * (2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * HIDDEN + 2 * KEYS) + HIDDEN
    grow = max(0.01, (gib * 2**30 / 2 - small) / (WORDS * HIDDEN + LAYERS * 3 * MLP * HIDDEN))
    words, mlp = int(WORDS * grow), int(MLP * grow)
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed.weight", (words, HIDDEN)), ("norm.weight", (HIDDEN,))]
    for layer in range(LAYERS):
        for name, shape in (
            ("q.weight", (HIDDEN, HIDDEN)),
            ("q.bias", (HIDDEN,)),
            ("k.weight", (KEYS, HIDDEN)),
            ("k.bias", (KEYS,)),
            ("v.weight", (KEYS, HIDDEN)),
            ("v.bias", (KEYS,)),
            ("o.weight", (HIDDEN, HIDDEN)),
            ("gate.weight", (mlp, HIDDEN)),
            ("up.weight", (mlp, HIDDEN)),
            ("down.weight", (HIDDEN, mlp)),
            ("norm1.weight", (HIDDEN,)),
            ("norm2.weight", (HIDDEN,)),
        ):
            shapes.append((f"layers.{layer}.{name}", shape))
    return [TensorSpec(name.replace(".", "_"), "BF16", shape) for name, shape in shapes]


def config_of(run: Path, transport: str) -> settings.Config:
    """A run of weight sync alone."""
    sync = settings.WeightSyncConfig(
        transport=transport,
        in_place=transport == "direct",
        timeout_s=LIMIT_S,
        member_timeout_s=LIMIT_S,  # type: ignore[arg-type]
    )
    return settings.Config(
        run=settings.RunConfig(dir=str(run)),
        model=settings.ModelConfig(path="none"),
        weightsync=sync,
        data=settings.DataConfig(source="a:b"),
        reward=(settings.RewardFunctionConfig(function="a:b"),),
    )


# ---------------------------------------------------------------- a generator


class Decoding:
    """A decode loop without a model: a step every millisecond, commands between two steps."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], asyncio.Future[float], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(STEP_S)
            with contextlib.suppress(queue.Empty):
                work, answer, loop = self._commands.get_nowait()
                stopped = time.perf_counter()
                work()
                loop.call_soon_threadsafe(answer.set_result, time.perf_counter() - stopped)

    async def poll(self, work: Callable[[], None]) -> float:
        """Run it between two steps; how long decoding stood still."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[float] = loop.create_future()
        self._commands.put((work, answer, loop))
        return await answer


class BenchEngine:
    """The weights of the hf engine with random content, and their times of the last update."""

    def __init__(self, specs: Sequence[TensorSpec], *, in_place: bool) -> None:
        import torch

        from producers.engines.hf.weights import ModelWeights

        model = torch.nn.Module()
        for spec in specs:
            value = torch.zeros(spec.shape, dtype=torch.bfloat16)
            model.register_parameter(spec.name, torch.nn.Parameter(value, requires_grad=False))
        self._weights = ModelWeights(model, in_place=in_place)
        self._in_place = in_place
        self._groups: list[Any] = []
        self._decoding = Decoding()
        self.times: dict[str, float] = {}

    def fingerprint(self) -> str:
        return "bench"

    async def begin_update(self, manifest: Any, tensors: Any) -> None:
        self.times = {"version": manifest.version, "begin": time.monotonic(), "apply_s": 0.0}
        await asyncio.to_thread(self._weights.begin, manifest, tensors)

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            "bench", max_samples=1, max_tokens=1, kv_tokens=1, encodings=("full",), in_place=self._in_place
        )

    async def receive_update(self, instruction: Any, tensors: Any) -> None:
        from producers.engines.hf.direct import receive

        await self.begin_update(instruction.manifest, tensors)
        await asyncio.to_thread(receive, self._weights, instruction, self._groups)
        self.times["taken"] = time.monotonic()

    def bucket_room(self, number: int) -> memoryview | None:
        return self._weights.bucket_room(number)

    async def apply_bucket(self, number: int, data: Any) -> str:
        started = time.monotonic()
        digest = await asyncio.to_thread(self._weights.apply, number, data)
        self.times["taken"] = time.monotonic()
        self.times["apply_s"] += self.times["taken"] - started
        return digest

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        return await asyncio.to_thread(self._weights.read, number, into)

    async def commit_update(self) -> str:
        self.times["pause_s"] = await self._decoding.poll(self._weights.exchange)
        exchanged = time.monotonic()
        if self._in_place:  # nothing is decoded from the first byte on
            self.times["pause_s"] = exchanged - self.times["begin"]
        digest = await asyncio.to_thread(self._weights.digest)
        self.times["committed"] = time.monotonic()
        self.times["attest_s"] = self.times["committed"] - exchanged
        return digest

    async def abort_update(self) -> None:
        await asyncio.to_thread(self._weights.abort)


def member(config_path: str, name: str, gib: float) -> None:
    """A generator process: follows the service; commands on stdin, answers and times on stdout, a line of JSON each."""
    config, specs = settings.load(Path(config_path)), specs_of(gib)
    engine = BenchEngine(specs, in_place=config.weightsync.in_place)
    receiver = Receiver(
        endpoint(config, "weightsync"),
        engine=engine,
        name=name,
        keys=None,  # type: ignore[arg-type]
        config=config.weightsync,
        attest_every_s=0,
    )
    printing = threading.Lock()

    def say(line: dict[str, Any]) -> None:
        with printing:
            print(json.dumps(line), flush=True)

    def listen() -> None:
        held: list[Any] = []
        for line in sys.stdin:
            command = json.loads(line)
            say(broadcast_all(command, sizes=[spec.nbytes for spec in specs], held=held))
            del held[:-1]
        os._exit(0)

    async def follow() -> None:
        running = asyncio.ensure_future(receiver.run(asyncio.Event()))
        seen = -1
        while not running.done():
            if receiver.version != seen:
                seen = receiver.version
                say({**engine.times, "waited_s": receiver.waited_s, "error": ""})
            await asyncio.sleep(0.002)
        await running

    threading.Thread(target=listen, daemon=True).start()
    say({"ready": name})
    try:
        asyncio.run(follow())
    except AsyncRLError as error:
        say({"error": str(error)})


# ---------------------------------------------------------------- baselines


def broadcast_all(
    command: dict[str, Any], *, sizes: Sequence[int], source: Any = None, held: list[Any]
) -> dict[str, Any]:
    """Take part in one flat and one per-tensor broadcast; the seconds of each. `held` takes the group: who leaves the
    last barrier first must not end it under the others."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    rank, size, limit = command["rank"], command["size"], timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", command["port"], None, False, timeout=limit)
    group = dist.ProcessGroupGloo(dist.PrefixStore(str(command["number"]), store), rank, size, limit)
    held.append(group)
    flat = torch.from_numpy(source) if source is not None else torch.zeros(sum(sizes), dtype=torch.uint8)
    flat += 0  # its pages are there before the clock runs
    found = {}
    parts = [part for part in flat.split(list(sizes)) if part.numel()]
    for name, tensors in (("flat_s", [flat]), ("per_tensor_s", parts)):
        group.barrier().wait(limit)
        started = time.perf_counter()
        for tensor in tensors:
            group.broadcast(tensor, 0).wait(limit)
        group.barrier().wait(limit)
        found[name] = time.perf_counter() - started
    return found


def baselines(world: World, weights: Weights, number: int) -> dict[str, float]:
    """The broadcasts to the members of this world."""
    import torch.distributed

    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    command = {"port": store.port, "size": len(world.members) + 1, "number": number}
    for rank, process in enumerate(world.members, start=1):
        process.tell({**command, "rank": rank})
    held: list[Any] = []
    mine = broadcast_all({**command, "rank": 0}, sizes=weights.sizes, source=weights.data, held=held)
    for process in world.members:
        process.answer("flat_s", LIMIT_S)
    return {name: float(value) for name, value in mine.items()}


# ---------------------------------------------------------------- the publisher's side


class Weights:
    """All bytes in one array; `next` changes them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sizes = [tensor.nbytes for tensor in plan.tensors]
        self.data = np.random.default_rng(0).integers(0, 256, sum(self.sizes), dtype=np.uint8)
        self.copy = np.zeros_like(self.data)

    def next(self) -> None:
        """Another version: a byte in every 4 KiB changes."""
        self.data[:: 4 << 10] += 1

    def chunks(self) -> Iterator[tuple[str, Any]]:
        """As from a backend that has all at hand."""
        start = 0
        for tensor in self.plan.tensors:
            yield tensor.name, self.data[start : start + tensor.nbytes]
            start += tensor.nbytes

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The same as tensors of a device."""
        import torch

        return ((name, torch.from_numpy(data)) for name, data in self.chunks())

    def memcpy_s(self) -> float:
        """One copy of the same bytes."""
        started = time.perf_counter()
        self.copy[:] = self.data
        return time.perf_counter() - started


class Process:
    """A member, and the lines that it says."""

    def __init__(self, config: Path, name: str, gib: float) -> None:
        self.name = name
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--member", name, "--config", str(config), "--gib", str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(json.loads(line))
        self._lines.put({"error": f"{self.name} ended"})

    def tell(self, command: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()

    def answer(self, key: str, timeout_s: float, value: Any = None) -> dict[str, Any]:
        """The next line with that key (and value). Raises RuntimeError where the member says an error."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{self.name} says no {key} within {timeout_s:g} s") from None
            if line.get("error"):
                raise RuntimeError(line["error"])
            if key in line and value in (None, line[key]):
                return line

    def end(self) -> None:
        self._child.kill()
        self._child.wait(30)


class World:
    """The service, a publisher and members of one transport."""

    def __init__(self, root: Path, transport: str, members: int, gib: float) -> None:
        self.config = config_of(root / f"{transport}{members}", transport)
        run = RunDir(self.config.run_dir).create()
        run.config.write_text(settings.dump(self.config))
        self._service = subprocess.Popen(
            [sys.executable, "-m", "weightsync.main", "--config", str(run.config), "--name", "weightsync"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        self.members = [Process(run.config, f"g{number}", gib) for number in range(members)]
        self.publisher = Publisher(
            endpoint(self.config, "weightsync"),
            keys=None,
            config=self.config.weightsync,
            name="learner",
            fingerprint="bench",
            scratch=run.root / "staging",
        )
        self.version = 0

    def start(self) -> None:
        """Wait until all are there."""
        self.publisher.start(epoch=1)
        for process in self.members:
            process.answer("ready", LIMIT_S)

    def round(self, weights: Weights) -> dict[str, float]:
        """Publish a version and wait for its last commit."""
        weights.next()
        self.version += 1
        started = time.monotonic()
        if self.config.weightsync.transport == "direct":
            digests = digest_tensors(weights.tensors(), weights.plan)
            self.publisher.announce(self.version, weights.plan, digests)
            assert self.publisher.wait_group()
            peers = Peers(1, lambda told: None, str)  # one sender tells no other
            result = self.publisher.send_direct(weights.plan, weights.tensors(), peers)
            assert result == "sent", result
        else:
            self.publisher.publish(self.version, weights.plan, weights.chunks())
        ended = time.monotonic()
        said = [process.answer("version", LIMIT_S, self.version) for process in self.members]
        self.publisher.wait_committed(self.version, members=len(self.members), timeout_s=LIMIT_S)
        return {
            "blocked_s": ended - started,
            "whole_s": max(line["committed"] for line in said) - started,
            "round_s": max(line["committed"] for line in said) - ended,
            "transfer_s": max(line["taken"] for line in said) - ended,
            "begin_s": statistics.mean(line["begin"] for line in said) - ended,
            "pause_s": max(line["pause_s"] for line in said),
            "apply_s": statistics.mean(line["apply_s"] for line in said),
            "waited_s": statistics.mean(line["waited_s"] for line in said),
            "attest_s": statistics.mean(line["attest_s"] for line in said),
        }

    def end(self) -> None:
        """Stop all."""
        for process in self.members:
            process.end()
        self._service.kill()
        self._service.wait(30)
        self.publisher.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="one generator")
    parser.add_argument("--member", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gib", type=float, required=True)
    given = parser.parse_args()
    member(given.config, given.member, given.gib)
