"""Weight sync, whole: a publisher, the service and 1, 2 and 4 generator processes, over every transport, on one host.

Run: `python benchmarks/bench_weightsync.py` (1 GB and up to 20 GB of memory; smaller: `--gib 0.1 --members 1,2`). The
model is random, bf16, with the 290 tensors of a 0.5B Qwen2.5 (its vocabulary and MLP scaled to the size). In every
repeat the rounds of all transports and the baselines follow one another, so that all see the same machine (where the
memory does not suffice, of one transport after the other); a figure is the median of the repeats, a ratio that of the
ratios within a repeat:
- memcpy: one numpy copy of the same bytes, by one thread, into memory that is there already;
- flat, per_tensor: one Gloo broadcast of all bytes, and one per tensor, to the same number of processes;
- blocked: `Publisher.publish`, from chunks that are there (what a learner's step waits for, without FSDP's gathering);
- round: from the end of `publish` to the last generator's commit, with the digest of what its model holds then;
- transfer: to the moment when the last generator has every byte in the room of its engine and has compared digests;
- pause: no decoding (the exchange between two steps), the longest of all generators.
Generators are processes with the receiver and the weights of the hf engine, without a forward pass: decoding is a
thread that steps every millisecond. Results, with the seconds of each stage, go to benchmarks/results/weightsync.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl import config as settings  # noqa: E402
from asyncrl.errors import AsyncRLError  # noqa: E402
from asyncrl.rundir import RunDir, endpoint  # noqa: E402
from weightsync.copying import copy_digest, cores  # noqa: E402
from weightsync.digest import Digest  # noqa: E402
from weightsync.plan import Plan, TensorSpec, plan_buckets  # noqa: E402
from weightsync.publisher import Publisher  # noqa: E402
from weightsync.receiver import Receiver  # noqa: E402

TRANSPORTS = ("local", "collective", "stream", "disk")
LAYERS, HIDDEN, KEYS, MLP, WORDS = 24, 896, 128, 4864, 151_936  # Qwen2.5-0.5B
STEP_S = 0.001
WARM_UP = 3
LIMIT_S = 300.0  # of a round, a broadcast, a start

#: What is to be reached: figure, transport, operator, value.
GOALS = (
    ("blocked_over_memcpy", "", "<=", 1.5),
    ("transfer_over_memcpy_per_generator", "local", "<=", 1.5),
    ("transfer_over_flat", "collective", "<=", 1.3),
    ("per_tensor_over_transfer", "collective", ">=", 3.0),
    ("pause_share", "", "<", 0.1),
)


def specs_of(gib: float) -> list[TensorSpec]:
    """290 tensors of about `gib` GiB in all."""
    small = LAYERS * (2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * HIDDEN + 2 * KEYS) + HIDDEN
    grow = max(0.01, (gib * 2**30 / 2 - small) / (WORDS * HIDDEN + LAYERS * 3 * MLP * HIDDEN))
    words, mlp = int(WORDS * grow), int(MLP * grow)
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed.weight", (words, HIDDEN)), ("norm.weight", (HIDDEN,))]
    for layer in range(LAYERS):
        for name, shape in (
            ("q.weight", (HIDDEN, HIDDEN)), ("q.bias", (HIDDEN,)), ("k.weight", (KEYS, HIDDEN)), ("k.bias", (KEYS,)),
            ("v.weight", (KEYS, HIDDEN)), ("v.bias", (KEYS,)), ("o.weight", (HIDDEN, HIDDEN)),
            ("gate.weight", (mlp, HIDDEN)), ("up.weight", (mlp, HIDDEN)), ("down.weight", (HIDDEN, mlp)),
            ("norm1.weight", (HIDDEN,)), ("norm2.weight", (HIDDEN,)),
        ):  # fmt: skip
            shapes.append((f"layers.{layer}.{name}", shape))
    return [TensorSpec(name.replace(".", "_"), "BF16", shape) for name, shape in shapes]


def config_of(run: Path, transport: str) -> settings.Config:
    """A run of weight sync alone."""
    sync = settings.WeightSyncConfig(
        transport=transport,
        timeout_s=LIMIT_S,
        member_timeout_s=LIMIT_S,  # type: ignore[arg-type]
    )
    return settings.Config(
        run=settings.RunConfig(dir=str(run)), model=settings.ModelConfig(path="none"), weightsync=sync,
        data=settings.DataConfig(source="a:b"), reward=(settings.RewardFunctionConfig(function="a:b"),),
    )  # fmt: skip


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

    async def between_steps(self, work: Callable[[], None]) -> float:
        """Run it between two steps; how long decoding stood still."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[float] = loop.create_future()
        self._commands.put((work, answer, loop))
        return await answer


class BenchEngine:
    """The weights of the hf engine with random content, and their times of the last update."""

    in_place = False

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        import torch

        from producers.engines.weights import ModelWeights

        model = torch.nn.Module()
        for spec in specs:
            value = torch.zeros(spec.shape, dtype=torch.bfloat16)
            model.register_parameter(spec.name, torch.nn.Parameter(value, requires_grad=False))
        self._weights = ModelWeights(model)
        self._decoding = Decoding()
        self.times: dict[str, float] = {}

    def fingerprint(self) -> str:
        return "bench"

    async def begin_update(self, manifest: Any, tensors: Any) -> None:
        self.times = {"version": manifest.version, "begin": time.monotonic(), "apply_s": 0.0}
        await asyncio.to_thread(self._weights.begin, manifest, tensors)

    async def apply_bucket(self, number: int, data: Any) -> str:
        started = time.monotonic()
        digest = await asyncio.to_thread(self._weights.apply, number, data)
        self.times["taken"] = time.monotonic()
        self.times["apply_s"] += self.times["taken"] - started
        return digest

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        return await asyncio.to_thread(self._weights.read, number, into)

    async def commit_update(self) -> str:
        self.times["pause_s"] = await self._decoding.between_steps(self._weights.exchange)
        exchanged = time.monotonic()
        digest = await asyncio.to_thread(self._weights.digest)
        self.times["committed"] = time.monotonic()
        self.times["attest_s"] = self.times["committed"] - exchanged
        return digest

    async def abort_update(self) -> None:
        await asyncio.to_thread(self._weights.abort)


def member(config_path: str, name: str, gib: float) -> None:
    """A generator process: follows the service; commands on stdin, answers and times on stdout, a line of JSON each."""
    config, specs = settings.load(Path(config_path)), specs_of(gib)
    engine = BenchEngine(specs)
    receiver = Receiver(
        endpoint(config, "weightsync"), engine=engine, name=name, keys=None,  # type: ignore[arg-type]
        config=config.weightsync, attest_every_s=0,
    )  # fmt: skip
    printing = threading.Lock()

    def say(line: dict[str, Any]) -> None:
        with printing:
            print(json.dumps(line), flush=True)

    def listen() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            say(broadcast_all(command, sizes=[spec.nbytes for spec in specs]))
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


def broadcast_all(command: dict[str, Any], *, sizes: Sequence[int], source: Any = None) -> dict[str, Any]:
    """Take part in one flat and one per-tensor broadcast; the seconds of each."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    rank, size, limit = command["rank"], command["size"], timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", command["port"], None, False, timeout=limit)
    group = dist.ProcessGroupGloo(dist.PrefixStore(str(command["number"]), store), rank, size, limit)
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
    mine = broadcast_all({**command, "rank": 0}, sizes=weights.sizes, source=weights.data)
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
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
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
            [sys.executable, "-m", "weightsync.service", "--config", str(run.config), "--name", "weightsync"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.members = [Process(run.config, f"g{number}", gib) for number in range(members)]
        self.publisher = Publisher(
            endpoint(self.config, "weightsync"), keys=None, config=self.config.weightsync, name="learner",
            fingerprint="bench", scratch=run.root / "staging",
        )  # fmt: skip
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
        self.publisher.publish(self.version, weights.plan, weights.chunks())
        ended = time.monotonic()
        said = [process.answer("version", LIMIT_S, self.version) for process in self.members]
        self.publisher.wait_committed(self.version, members=len(self.members), timeout_s=LIMIT_S)
        return {
            "blocked_s": ended - started, "round_s": max(line["committed"] for line in said) - ended,
            "transfer_s": max(line["taken"] for line in said) - ended,
            "begin_s": statistics.mean(line["begin"] for line in said) - ended,
            "pause_s": max(line["pause_s"] for line in said),
            "apply_s": statistics.mean(line["apply_s"] for line in said),
            "waited_s": statistics.mean(line["waited_s"] for line in said),
            "attest_s": statistics.mean(line["attest_s"] for line in said),
        }  # fmt: skip

    def end(self) -> None:
        """Stop all."""
        for process in self.members:
            process.end()
        self._service.kill()
        self._service.wait(30)
        self.publisher.close()


# ---------------------------------------------------------------- figures


def ratios(row: dict[str, float], generators: int) -> dict[str, float]:
    """What the goals are about, within one repeat."""
    return row | {
        "blocked_over_memcpy": row["blocked_s"] / row["memcpy_s"],
        "round_over_memcpy": row["round_s"] / row["memcpy_s"],
        "transfer_over_memcpy_per_generator": row["transfer_s"] / row["memcpy_s"] / generators,
        "round_over_flat": row["round_s"] / row["flat_s"],
        "transfer_over_flat": row["transfer_s"] / row["flat_s"],
        "per_tensor_over_transfer": row["per_tensor_s"] / row["transfer_s"],
        "per_tensor_over_round": row["per_tensor_s"] / row["round_s"],
        "pause_share": row["pause_s"] / row["round_s"],
    }


def measure(worlds: dict[str, World], weights: Weights, repeats: int) -> dict[str, dict[str, float]]:
    """Medians by transport; the first repeats make slots, connections and rooms, and do not count."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in worlds}
    for repeat in range(repeats + WARM_UP):
        base: dict[str, float] = {}
        for number, (name, world) in enumerate(worlds.items()):
            if not number:
                base = baselines(world, weights, repeat)
            copied = weights.memcpy_s()
            row = world.round(weights)
            if repeat >= WARM_UP:
                rows[name].append(ratios(base | row | {"memcpy_s": copied}, len(world.members)))
    return {
        name: {key: float(f"{statistics.median(row[key] for row in found):.4g}") for key in found[0]}
        for name, found in rows.items() if found
    }  # fmt: skip


def stages(weights: Weights, repeats: int) -> dict[str, float]:
    """Where the time of a publish goes: a copy, a digest, both at once, by one thread and by all. CPU and wall."""
    digest = Digest()
    pairs = [(weights.copy, weights.data)]
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(weights.copy, weights.data), "digest": lambda: digest.update(weights.data),
        "both_1_thread": lambda: copy_digest(pairs, threads=1), "both_all_threads": lambda: copy_digest(pairs),
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(max(3, repeats)):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    result = {}
    for name, times in found.items():
        result[f"{name}_s"] = round(statistics.median(wall for wall, _ in times), 4)
        result[f"{name}_cpu_s"] = round(statistics.median(cpu for _, cpu in times), 4)
    return result


def judge(figures: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """A line per goal and number of generators, said so whether it is reached or not."""
    lines = []
    for key, transport, sign, limit in GOALS:
        for generators, by_transport in figures.items():
            for name, row in by_transport.items():
                if key in row and transport in ("", name):
                    value = row[key]
                    good = value >= limit if sign == ">=" else value < limit or (sign == "<=" and value == limit)
                    verdict = "reached" if good else "NOT reached"
                    lines.append(f"{verdict:12} {key} {sign} {limit:g}: {value:.3g} ({name}, {generators} generators)")
    return lines


def needed_gib(gib: float, generators: int, transports: Sequence[str]) -> float:
    """Memory of all at once: source, its copy and two slots; a generator's two storages, its copy for others and the
    one that arrives, or the baseline's buffer."""
    return gib * (2 + len(transports) * (2 + 4 * generators))


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.95)
    parser.add_argument("--members", default="1,2,4")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/weightsync.json")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        member(options.config, options.member, options.gib)
        return
    plan = plan_buckets(specs_of(options.gib), bucket_bytes=settings.WeightSyncConfig().bucket_bytes)
    weights = Weights(plan)
    print(f"{plan.nbytes / 1e9:.3f} GB, {len(plan.tensors)} tensors, {len(plan.bucket_bytes)} buckets, {cores()} cores")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    notes: list[str] = []
    for generators in map(int, options.members.split(",")):
        figures[str(generators)] = run_all(options, weights, generators, notes)
    lines = judge(figures)
    print(*lines, *notes, sep="\n")
    write(options, plan, figures=figures, parts=stages(weights, options.repeats), goals=lines, notes=notes)


def run_all(options: Any, weights: Weights, generators: int, notes: list[str]) -> dict[str, dict[str, float]]:
    """All transports for a number of generators: together where the memory suffices, else one after the other."""
    names = options.transports.split(",")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    groups = [names] if needed_gib(options.gib, generators, names) < free else [[name] for name in names]
    found: dict[str, dict[str, float]] = {}
    for group in groups:
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
            worlds = {name: World(Path(folder), name, generators, options.gib) for name in group}
            try:
                with ThreadPoolExecutor(len(worlds)) as pool:
                    list(pool.map(World.start, worlds.values()))
                found |= measure(worlds, weights, options.repeats)
            except (RuntimeError, AsyncRLError) as error:
                notes.append(f"not run       {generators} generators, {', '.join(group)}: {error}")
            finally:
                for world in worlds.values():
                    world.end()
    for name, row in found.items():
        shown = ("memcpy_s", "blocked_s", "transfer_s", "round_s", "flat_s", "per_tensor_s", "pause_s", "waited_s",
                 "apply_s", "attest_s")  # fmt: skip
        print(f"{generators} x {name:11}", *(f"{key} {row[key]:.3f}" for key in shown))
    return found


def write(options: Any, plan: Plan, *, figures: dict[str, Any], parts: Any, goals: list[str], notes: list[str]) -> None:
    """The results file."""
    report = {
        "what": "rounds of weight sync on one host: medians in seconds, and ratios within a repeat",
        "command": " ".join(["python", *sys.argv]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "bytes": plan.nbytes, "tensors": len(plan.tensors), "buckets": len(plan.bucket_bytes),
        "repeats": options.repeats, "goals": goals, "not_run": notes, "publish_stages": parts,
        "figures_by_generators": figures,
        "machine": {"cores": os.cpu_count(), "load_1m": math.floor(os.getloadavg()[0] * 100) / 100,
                    "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "msgspec": msgspec.__version__},
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
