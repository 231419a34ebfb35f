"""Throughput of the durable buffer against raw ZeroMQ, in the same run.

Run: `python benchmarks/bench_buffer.py [--groups 3200] [--repeats 3] [--size typical]`. One producer process, one
learner process, the service (and its Redis). A group is 8 samples (prompt 256 tokens, response lengths lognormal with
median 1000, capped at 4096): about 90 KB on the wire. Rewards travel with the samples, so no reward worker takes part.
Payloads go by place (a file of the producer); `STORE:FSYNC+frames` sends them to the service instead.
`zmq_direct` is PUSH/PULL with the same codec (to the same per-sample arrays) and without a buffer, acknowledgements or
durability. Compare ratios of one run, not rates: the machine may be shared. Writes benchmarks/results/buffer.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
import zmq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

sys.path.insert(0, str(ROOT / "benchmarks"))

import stages  # noqa: E402, RUF100

from asyncrl import wire  # noqa: E402, RUF100
from asyncrl.allocator import keep_memory
from asyncrl.config import Config, dump, parse  # noqa: E402, RUF100
from asyncrl.engine import GenDelta  # noqa: E402, RUF100
from asyncrl.images.digests import image_digest
from asyncrl.monitor.control import ServiceClient
from asyncrl.runtime.run_dir import RunDir, endpoint
from asyncrl.wire.batch_arrays import ClaimedBatch, group_data
from buffers.client.learner import LearnerClient
from buffers.client.producer import ProducerClient

SIZES = {"small": (16, 0.0), "typical": (1000, 0.8), "large": (16384, 0.0)}
BATCH = 64
TOML = """
[run]
name = "bench"
dir = "{dir}"
[model]
path = "none"
[data]
path = "none.jsonl"
max_prompt_tokens = 256
[sampling]
group_size = 8
max_new_tokens = 16384
[buffer]
batch_groups = {batch}
max_staleness = 8
segment_bytes = 16777216
store = "{store}"
fsync = "{fsync}"
[learner]
steps = {steps}
micro_batch_tokens = 20000
[[reward]]
function = "m:f"
"""


def make_groups(size: str, count: int = 32) -> list[tuple[Any, list[GenDelta]]]:
    """Ready-made groups, so that making them is not measured."""
    generator = np.random.default_rng(0)
    median, sigma = SIZES[size]
    groups = []
    for _ in range(count):
        lengths = np.minimum(np.exp(generator.normal(np.log(median), sigma, 8)), max(4096, median)).astype(int)
        samples = [
            GenDelta(
                str(i),
                i,
                generator.integers(0, 32000, n).astype(np.int32),
                -generator.random(n, dtype=np.float32),
                ((0, int(n)),),
                "stop",
            )
            for i, n in enumerate(np.maximum(1, lengths))
        ]
        groups.append((generator.integers(0, 32000, 256).astype(np.int32), samples))
    return groups


ROW = {"data_source": "bench", "ground_truth": "42", "extra_info": {"text": "x" * 150}}
REWARDS = dict.fromkeys(range(8), 1.0)

# ---------------------------------------------------------------- raw ZeroMQ


def direct_producer(address: str, size: str, count: int, plain: bool, queue: Any) -> None:
    if not plain:
        keep_memory()
    groups = make_groups(size)
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(address)
    queue.get()
    cpu = time.process_time()
    for number in range(count):
        prompt, samples = groups[number % len(groups)]
        fields, payload = wire.pack_arrays(
            {
                "prompt": prompt,
                "response": np.concatenate([s.token_ids for s in samples]),
                "logprobs": np.concatenate([s.logprobs for s in samples]),
            }
        )
        heads = tuple(wire.SampleHead(s.index, len(s.token_ids), s.finish, s.runs) for s in samples)
        head = wire.Samples("p", number, 1, heads, {}, fields, json.dumps(ROW), 256, rewards=REWARDS)
        socket.send(wire.encode_header(head), zmq.SNDMORE)
        socket.send(payload, copy=not plain and len(payload) < wire.COPY_THRESHOLD_BYTES)
    queue.put(time.process_time() - cpu)
    socket.close(10000)


def run_direct(size: str, count: int, *, plain: bool = False) -> dict[str, float]:
    """Groups per second and CPU of the limit; `plain` without our settings of the allocator, payloads not copied."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PULL)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/direct.sock"
        socket.bind(address)
        spawn = multiprocessing.get_context("spawn")
        queue = spawn.Queue()
        process = spawn.Process(target=direct_producer, args=(address, size, count, plain, queue))
        process.start()
        time.sleep(1.5)
        queue.put("go")
        cpu, started, moved = time.process_time(), 0.0, 0
        for number in range(count):
            frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
            started = started or time.monotonic()
            head = wire.decode_samples(frames[0])
            group = group_data(wire.GroupHead(number, 0, head.row, (frames[0],), head.rewards, {}), [frames[1]])
            moved += frames[1].nbytes
            assert head.group == number and len(group.samples) == 8
        seconds = time.monotonic() - started
        cpu = time.process_time() - cpu
        process.join(30)
        cpu += queue.get(timeout=5)
    socket.close(0)
    context.term()
    return {"groups_s": count / seconds, "cpu_s_per_1000": 1000 * cpu / count, "kb": moved / count / 1000}


# ---------------------------------------------------------------- the buffer


def buffer_producer(
    address: str, size: str, count: int, by_place: bool, queue: Any, *, images: Sequence[bytes] = ()
) -> None:
    """Answer leases. `images`: PNG files of every prompt; each prompt gets bytes of its own."""

    async def submit(client: ProducerClient, lease: wire.Lease, prompt: Any, samples: list[GenDelta]) -> Any:
        own = {image_digest(data): data for data in (marked(image, lease.group) for image in images)}
        await client.store_images(own)
        row = ROW | ({"images": list(own)} if own else {})
        return await client.submit(lease, prompt_ids=prompt, samples=samples, digests={}, row=row, rewards=REWARDS)

    async def work() -> None:
        keep_memory()
        groups = make_groups(size)
        client = ProducerClient(address, name="p")
        if not by_place:
            client.place_from = 1 << 62
        await client.hello()
        queue.get()
        cpu, loop = time.process_time(), time.thread_time()
        version, sent = 0, 0
        credits, under_way = asyncio.Semaphore(128), set[asyncio.Task[Any]]()

        def answered(task: asyncio.Task[Any]) -> None:
            under_way.discard(task)
            credits.release()
            assert len(task.result().accepted) == 8

        def ask() -> asyncio.Future[Any]:  # asks anew after a short wait: versions move
            return asyncio.ensure_future(client.lease(engine_version=version, max_groups=64, wait_s=0.02))

        asked = ask()
        while sent < count:
            leases = await asked
            version = max(version, leases.version)
            if sent + len(leases.leases) < count:
                asked = ask()  # the next leases are under way while these groups are sent
            for lease in leases.leases:
                prompt, made = groups[lease.group % len(groups)]
                samples = [
                    GenDelta(s.id, s.index, s.token_ids, s.logprobs, ((version, s.token_ids.size),), s.finish)
                    for s in made
                ]
                await credits.acquire()
                task = asyncio.ensure_future(submit(client, lease, prompt, samples))
                under_way.add(task)
                task.add_done_callback(answered)
                sent += 1
        if under_way:
            await asyncio.wait(under_way, timeout=30)
        queue.put((time.process_time() - cpu, time.thread_time() - loop))
        client.close()

    uvloop.run(work())


def marked(png: bytes, number: int) -> bytes:
    """The same picture in a file of other bytes: with a private chunk before the last one."""
    body = b"prVt" + number.to_bytes(8, "big")
    return png[:-12] + struct.pack(">I", 8) + body + struct.pack(">I", zlib.crc32(body)) + png[-12:]


def main_thread_of(pid: int) -> float:
    """CPU seconds of its first thread so far: the rest are ZeroMQ's, and the flushing to disk."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def learn(client: LearnerClient, steps: int, images: int = 0) -> tuple[float, float]:
    """Claim, look at every array and count the images of a prompt, commit; when it began and when it ended."""
    started = time.monotonic()
    for step in range(1, steps + 1):
        batch = client.claim(step=step, version=step - 1, wait_s=20.0)
        assert isinstance(batch, ClaimedBatch) and len(batch.groups) == BATCH and not batch.invalid, batch
        for group in batch.groups:
            assert all(sample.logprobs.size == sample.response.size for sample in group.samples)
        assert len(batch.images) == BATCH * images
        client.commit(step=step, version=step, digest="")
        if step % 4 == 0:
            client.checkpointed(step=step)
    return started, time.monotonic()


def run_buffer(
    size: str, count: int, store: str, fsync: str, profile: str = "", *, images: Sequence[bytes] = (), port: int = 0
) -> dict[str, float]:
    """Groups per second and CPU through the service. With `port`, clients do not see its folder: all goes by TCP."""
    with tempfile.TemporaryDirectory() as folder:
        steps = count // BATCH
        fsync, _, how = fsync.partition("+")
        toml = TOML.format(dir=f"{folder}/run", store=store, fsync=fsync, steps=steps, batch=BATCH)
        config: Config = parse(toml + (f'[network]\nbuffer = "tcp://127.0.0.1:{port}"\n' if port else ""))
        run = RunDir(config.run_dir).create()
        run.config.write_text(dump(config))
        address = endpoint(config, "buffer")
        program = ["-m", "cProfile", "-o", profile] if profile else []
        service = subprocess.Popen(
            [sys.executable, *program, "-m", "buffers.main", "--config", str(run.config)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        observer = ServiceClient(address, timeout_s=20)
        observer.status()
        if port:
            (run.segments / "nonce").unlink()  # by it clients know that they see the folder
        spawn = multiprocessing.get_context("spawn")
        queue = spawn.Queue()
        producer = spawn.Process(
            target=buffer_producer,
            args=(address, size, count, how != "frames", queue),
            kwargs={"images": images},
        )
        producer.start()
        time.sleep(1.5)
        client = LearnerClient(address, name="l")
        client.register(step=0, ledger="")
        servers = [service.pid]
        if store == "redis":
            servers.append(int((run.store / "redis.pid").read_text()))
        before, own, loop = sum(map(cpu_of, servers)), time.process_time(), main_thread_of(service.pid)
        thread = time.thread_time()
        queue.put("go")
        started, ended = learn(client, steps, len(images))
        own, thread = time.process_time() - own, time.thread_time() - thread
        loop = main_thread_of(service.pid) - loop
        served = sum(map(cpu_of, servers)) - before
        producer.join(30)
        made, making = queue.get(timeout=5)
        counts = observer.status()["ledger"]
        assert counts["trained"] + counts["retired"] == steps * BATCH == counts["issued"], counts
        observer.close()
        client.close()
        service.terminate()
        service.wait(20)
    total = steps * BATCH
    return {
        "groups_s": total / (ended - started),
        "cpu_s_per_1000": 1000 * (own + served + made) / total,
        "service_cpu_s_per_1000": 1000 * served / total,
        "producer_cpu_s_per_1000": 1000 * made / total,
        "learner_cpu_s_per_1000": 1000 * own / total,
        "service_loop_s_per_1000": 1000 * loop / total,
        "producer_loop_s_per_1000": 1000 * making / total,
        "learner_loop_s_per_1000": 1000 * thread / total,
    }


def stages_of(size: str, count: int, store: str, fsync: str, how: str) -> dict[str, float]:
    """Microseconds of CPU per group by stage, in one thread without sockets."""
    toml = TOML.replace("{store}", store).replace("{fsync}", fsync).replace("{batch}", str(BATCH))
    found: dict[str, float] = stages.measure(
        toml, make_groups(size), count=count, batch=BATCH, row=ROW, rewards=REWARDS, how=how
    )
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--groups", type=int, default=3200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", choices=sorted(SIZES), default="typical")
    parser.add_argument("--systems", default="sqlite:everysec,redis:everysec")
    parser.add_argument("--profile", default="")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/buffer.json")
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    load = [round(os.getloadavg()[0], 2)]  # above 0 at the start: others work on the machine
    for repeat in range(args.repeats):
        results.setdefault("zmq_direct", []).append(run_direct(args.size, args.groups))
        results.setdefault("zmq_plain", []).append(run_direct(args.size, args.groups, plain=True))
        for system in args.systems.split(","):
            store, fsync = system.split(":")
            results.setdefault(system, []).append(run_buffer(args.size, args.groups, store, fsync, args.profile))
        print(
            f"repeat {repeat + 1}: "
            + ", ".join(f"{name} {runs[-1]['groups_s']:.0f}/s" for name, runs in results.items()),
            flush=True,
        )
    summary: dict[str, Any] = {}
    for name, runs in results.items():
        ratios = [run["groups_s"] / base["groups_s"] for run, base in zip(runs, results["zmq_direct"], strict=True)]
        cpus = [
            run["cpu_s_per_1000"] / base["cpu_s_per_1000"]
            for run, base in zip(runs, results["zmq_direct"], strict=True)
        ]
        summary[name] = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
        summary[name] |= {"ratio": round(statistics.median(ratios), 3), "cpu_ratio": round(statistics.median(cpus), 2)}
        print(f"{name:18} {summary[name]}")
    where = {
        how: stages_of(args.size, min(args.groups, 3200), "sqlite", "everysec", how) for how in ("place", "frames")
    }
    for how, found in where.items():
        stages.show(found, f"sqlite, by {how}")
    import redis

    load.append(round(os.getloadavg()[0], 2))
    report = {
        "what": "durable buffer against raw ZeroMQ", "size": args.size, "groups": args.groups, "repeats": args.repeats,
        "command": " ".join(["python", *sys.argv]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "load_1m": load, "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "pyzmq": zmq.__version__, "zmq": zmq.zmq_version(),
                     "msgspec": msgspec.__version__, "numpy": np.__version__, "redis-py": redis.__version__},
        "summary": summary, "stages_us_per_group": where, "runs": results,
    }  # fmt: skip
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
