"""A fleet against one buffer on one core: 1,000 producers and 200 reward workers over TCP with CURVE keys.

Run: `python benchmarks/bench_fleet.py [--fleets 10:10 1000:200] [--seconds 20] [--core 0]`. The clients are the
product's own, 100 in a process, and give a host of their own, so that the service knows of their death by silence
alone. The service has one core for itself, everything else has the others: the service's CPU per group is the figure
to compare, groups/s also have the clients' cores in them. A group is 8 samples of 16 tokens, scored one by one by the
reward workers. For each fleet (producers:reward workers):

- joins: seconds from the first connection until all are admitted;
- heartbeats: the service's share of its core while all producers and workers send theirs and nothing else;
- groups/s in `--seconds`, the service's CPU per group, and the time of a submit (median, 99th percentile);
- the same with one producer stopped (SIGSTOP), from then on, and the longest time in which no step was trained: if it
  holds a group, the others go on to the end of the staleness bound, and the group goes to another after 10 s;
- the death of a tenth of the producers at once (SIGKILL): seconds until the last of their leases is taken from them
  (`lease_timeout_s` is 30);
- descriptors and resident memory of the service per peer, relative to the first fleet.

Writes benchmarks/results/fleet.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from bench_buffer import cpu_of

ROOT = Path(__file__).resolve().parents[1]

from asyncrl import wire
from asyncrl.config import dump, parse
from asyncrl.engine import GenDelta
from asyncrl.monitor.control import ServiceClient
from asyncrl.net.descriptors import raise_descriptor_limit
from asyncrl.net.keys import Keys, key_path, read_keys, write_keys
from asyncrl.runtime.run_dir import RunDir, endpoint
from asyncrl.wire.batch_arrays import ClaimedBatch
from buffers.client.learner import LearnerClient
from buffers.client.producer import ProducerClient
from buffers.client.reward import RewardClient

BATCH, LEASE_TIMEOUT_S, PER_PROCESS = 256, 30.0, 100
TOML = """
[run]
name = "fleet"
dir = "{dir}"
[model]
path = "none"
[data]
path = "none.jsonl"
[sampling]
group_size = 8
max_new_tokens = 16
[buffer]
batch_groups = {batch}
max_staleness = 8
pipeline_depth = 8
store = "sqlite"
lease_timeout_s = {lease_timeout_s}
[learner]
steps = 1000000
[network]
buffer = "tcp://127.0.0.1:{port}"
key_file = "{key}"
[[reward]]
function = "m:f"
"""
#: Of a heartbeat, as a producer sends them.
STATS = dict.fromkeys(
    ("busy_share", "generated_tokens", "generated_samples", "groups_in_flight", "samples_in_flight", "held_tokens",
     "kv_used", "preempted_samples", "live_slots", "engine_version", "swaps", "swap_s", "refused_samples"),
    1.0,
)  # fmt: skip


# ---------------------------------------------------------------- clients


class Client:
    """One producer or reward worker: joins, sends a heartbeat each second, works while it is told to."""

    def __init__(self, client: Any) -> None:
        self.client, self.work, self.version, self.held = client, asyncio.Event(), 0, []
        client._host = f"host-{client.name}"
        self.submits: list[float] = []

    async def beat(self) -> None:
        while True:
            await self.client.heartbeat(STATS, waiting_for="work", holds=self.held)
            await asyncio.sleep(self.client.interval(1.0))

    async def lease(self, wait_s: float) -> list[wire.Lease]:
        leases = await self.client.lease(engine_version=self.version, max_groups=1, wait_s=wait_s)
        self.version, self.held = max(self.version, leases.version), list(leases.leases)
        return self.held

    async def produce(self) -> None:
        tokens = np.arange(16, dtype=np.int32)
        while True:
            await self.work.wait()
            for lease in await self.lease(self.client.interval(0.25)):
                samples = [
                    GenDelta(str(index), index, tokens, -np.ones(16, np.float32), ((self.version, 16),), "stop")
                    for index in range(8)
                ]
                began = time.monotonic()
                await self.client.submit(lease, prompt_ids=tokens, samples=samples, digests={}, row={"answer": "1"})
                self.submits.append(time.monotonic() - began)
            self.held = []

    async def score(self) -> None:
        while True:
            await self.work.wait()
            tasks, _ = await self.client.work(max_samples=8, wait_s=self.client.interval(1.0))
            if tasks:
                scores = [wire.Score(task.item.group, task.item.index, task.item.token, 1.0) for task in tasks]
                await self.client.submit(scores, reward_version="1")


def clients(address: str, keys: Keys, kind: type[Any], names: list[str], pipe: Connection) -> None:
    """A process of clients; obeys `join`, `work`, `rest`, `hold` (lease and do nothing) and `submits`."""

    async def obey() -> None:
        raise_descriptor_limit()
        made: list[Client] = []
        tasks: set[asyncio.Task[Any]] = set()
        loop = asyncio.get_running_loop()
        while (word := await loop.run_in_executor(None, pipe.recv)) != "end":
            answer: Any = word
            if word == "join":
                made = [Client(kind(address, name=name, keys=keys)) for name in names]
                await asyncio.gather(*(one.client.hello() for one in made))
                for one in made:
                    tasks.add(asyncio.create_task(one.beat()))
                    tasks.add(asyncio.create_task(one.produce() if kind is ProducerClient else one.score()))
            elif word == "hold":
                await asyncio.gather(*(one.lease(10.0) for one in made))
                answer = sum(len(one.held) for one in made)
            elif word == "submits":
                answer = [seconds for one in made for seconds in one.submits]
                for one in made:
                    one.submits = []
            else:
                for one in made:
                    (one.work.set if word == "work" else one.work.clear)()
            pipe.send(answer)

    uvloop.run(obey())


class Fleet:
    """Client processes, told the same word at once."""

    def __init__(self, address: str, key: Path, producers: int, workers: int) -> None:
        self.processes: list[tuple[Any, Connection]] = []
        #: The last process of producers dies in the end; one producer of its own is stopped.
        dying = max(1, producers // 10)
        for kind, role, names in (
            (ProducerClient, "producer", [f"p{number}" for number in range(producers - dying - 1)]),
            (RewardClient, "reward", [f"r{number}" for number in range(workers)]),
        ):
            for first in range(0, len(names), PER_PROCESS):
                self.start(address, key, kind, role, names[first : first + PER_PROCESS])
        self.most = len(self.processes)
        self.start(address, key, ProducerClient, "producer", ["stopped"])
        self.start(address, key, ProducerClient, "producer", [f"dying{number}" for number in range(dying)])

    def start(self, address: str, key: Path, kind: type[Any], role: str, names: list[str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        mine, theirs = spawn.Pipe()
        keys = read_keys(key_path(key, role))
        process = spawn.Process(target=clients, args=(address, keys, kind, names, theirs), daemon=True)
        process.start()
        self.processes.append((process, mine))

    def tell(self, word: str, *, only: slice | None = None) -> list[Any]:
        told = self.processes[only or slice(None)]
        for _, pipe in told:
            pipe.send(word)
        answers = []
        for _, pipe in told:
            if not pipe.poll(120):
                raise SystemExit(f"no answer to {word} within 120 s")
            answers.append(pipe.recv())
        return answers


# ---------------------------------------------------------------- one fleet


def measure(producers: int, workers: int, *, seconds: float, core: int, port: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "run.key"
        owner = write_keys(key)
        text = TOML.format(dir=f"{folder}/run", batch=BATCH, port=port, key=key, lease_timeout_s=LEASE_TIMEOUT_S)
        config = parse(text)
        run = RunDir(config.run_dir).create()
        run.config.write_text(dump(config))
        with (Path(folder) / "buffer.log").open("wb") as log:
            service = subprocess.Popen(
                ["taskset", "-c", str(core), sys.executable, "-m", "buffers.main", "--config", str(run.config)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        address = endpoint(config, "buffer")
        observer = ServiceClient(address, keys=owner, timeout_s=60)
        try:
            observer.status()
            (run.segments / "nonce").unlink()  # by it clients know that they see the folder
            fleet = Fleet(address, key, producers, workers)
            where = {"pid": service.pid, "address": address, "history": run.history}
            return phases(fleet, observer, owner, **where, seconds=seconds)
        finally:
            observer.close()
            service.terminate()
            service.wait(60)


def phases(
    fleet: Fleet, observer: ServiceClient, owner: Keys, *, pid: int, address: str, history: Path, seconds: float
) -> dict[str, float]:
    fleet.tell("rest")  # all have started
    empty = {"descriptors": descriptors(pid), "mb": resident_mb(pid)}
    began = time.monotonic()
    fleet.tell("join")
    found: dict[str, float] = {"join_s": time.monotonic() - began}
    time.sleep(2)
    cpu, began = cpu_of(pid), time.monotonic()
    time.sleep(10)
    found["heartbeat_share"] = (cpu_of(pid) - cpu) / (time.monotonic() - began)
    found["descriptors"] = descriptors(pid) - empty["descriptors"]
    found["mb"] = resident_mb(pid) - empty["mb"]
    ended = threading.Event()
    learner = threading.Thread(target=learn, args=(address, owner, ended), daemon=True)
    learner.start()
    fleet.tell("work")
    found |= rate(fleet, observer, pid, seconds)
    stopped = fleet.processes[fleet.most][0]
    os.kill(stopped.pid, signal.SIGSTOP)
    found |= rate(fleet, observer, pid, seconds, name="_with_one_stopped", others=slice(0, fleet.most), warm_up_s=0.0)
    os.kill(stopped.pid, signal.SIGCONT)
    dying, pipe = fleet.processes[-1]
    fleet.tell("rest")  # otherwise the others take what there is
    found |= deaths(history, dying, pipe)
    ended.set()
    learner.join(60)
    for process, _ in fleet.processes:
        process.kill()
    return {name: round(value, 5) for name, value in found.items()}


def rate(
    fleet: Fleet,
    observer: ServiceClient,
    pid: int,
    seconds: float,
    *,
    name: str = "",
    others: slice | None = None,
    warm_up_s: float = 3.0,
) -> dict[str, float]:
    """Groups and CPU of a stretch of time, after `warm_up_s`; and the longest time in which no step was trained."""
    time.sleep(warm_up_s)
    fleet.tell("submits", only=others)
    scored, cpu, began = finished(observer), cpu_of(pid), time.monotonic()
    latest, changed, standstill = scored, began, 0.0
    while time.monotonic() < began + seconds:
        time.sleep(0.25)
        if (count := finished(observer)) != latest:
            latest, changed = count, time.monotonic()
        standstill = max(standstill, time.monotonic() - changed)
    groups, cpu, passed = finished(observer) - scored, cpu_of(pid) - cpu, time.monotonic() - began
    submits = sorted(one for answer in fleet.tell("submits", only=others) for one in answer)
    return {
        f"groups_s{name}": groups / passed,
        f"cpu_ms_per_group{name}": 1000 * cpu / max(1, groups),
        f"core_share{name}": cpu / passed,
        f"standstill_s{name}": standstill,
        f"submit_median_ms{name}": 1000 * statistics.median(submits),
        f"submit_p99_ms{name}": 1000 * submits[int(len(submits) * 0.99)],
    }


def deaths(history: Path, dying: Any, pipe: Connection) -> dict[str, float]:
    """A process of producers that hold leases is killed: when the last of these is lost."""
    time.sleep(3)
    pipe.send("hold")
    held = pipe.recv()
    before = history.stat().st_size
    dying.kill()
    began = time.monotonic()
    lost = 0
    while time.monotonic() - began < 60 and lost < held:
        time.sleep(0.1)
        with history.open("rb") as file:
            file.seek(before)
            lost = file.read().count(b'"why":"silent"')
    return {"died_with_leases": held, "leases_lost": lost, "noticed_s": time.monotonic() - began}


def finished(observer: ServiceClient) -> int:
    counts = observer.status()["ledger"]
    return int(counts["trained"] + counts["retired"])


def learn(address: str, keys: Keys, ended: threading.Event) -> None:
    """Claim and commit, as fast as batches come."""
    client = LearnerClient(address, name="l", keys=keys)
    client.register(step=0, ledger="")
    step = 1
    while not ended.is_set():
        if isinstance(client.claim(step=step, version=step - 1, wait_s=2.0), ClaimedBatch):
            client.commit(step=step, version=step, digest="")
            step += 1
    client.close()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fleets", nargs="+", default=["10:10", "1000:200"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--port", type=int, default=5961)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/fleet.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {args.core})
    results: dict[str, dict[str, float]] = {}
    load = round(os.getloadavg()[0], 2)
    for number, fleet in enumerate(args.fleets):
        producers, workers = map(int, fleet.split(":"))
        results[fleet] = measure(producers, workers, seconds=args.seconds, core=args.core, port=args.port + number)
        print(fleet, results[fleet], flush=True)
    report = {
        "what": "a fleet of producers and reward workers against one buffer on one core, TCP with CURVE",
        "command": " ".join(["python", *sys.argv]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "load_1m_before": load, "platform": platform.platform()},
        "lease_timeout_s": LEASE_TIMEOUT_S, "runs": results,
    }  # fmt: skip
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
