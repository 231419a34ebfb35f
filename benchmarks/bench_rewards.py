"""Rewards per second: a real buffer, a producer that fills it, and real reward workers with a function of 10 ms.

Run: `python benchmarks/bench_rewards.py [--workers 4] [--samples 1600] [--repeats 3]`. The samples lie in the buffer
before the workers start; the clock runs from the first score to the last, which the buffer's status tells. Functions:
`nap` sleeps for 10 ms (one that asks a server), `nap_async` the same as a coroutine, `work` computes for 10 ms of CPU
time (a verifier). `ideal` is what the function alone allows: 100/s per worker, or per core where it computes.
Writes benchmarks/results/rewards.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

import reports  # noqa: E402, RUF100

from asyncrl.config import Config, dump, parse  # noqa: E402, RUF100
from asyncrl.engine import GenDelta  # noqa: E402, RUF100
from asyncrl.monitor.control import ServiceClient
from asyncrl.runtime.run_dir import RunDir, endpoint
from buffers.client.producer import ProducerClient

CALL_S = 0.010
GROUP = 8
FUNCTIONS = f"""
import asyncio, time
def nap(sample):
    time.sleep({CALL_S})
    return float(len(sample.response_ids) % 3)
async def nap_async(sample):
    await asyncio.sleep({CALL_S})
    return float(len(sample.response_ids) % 3)
def work(sample):
    until, n = time.thread_time() + {CALL_S}, 0
    while time.thread_time() < until:
        n += sum(range(200))
    return float(n % 3)
"""
TOML = """
run.name = "bench"
run.dir = "{folder}/run"
model.path = "{folder}/model"
data.path = "{folder}/none.jsonl"
sampling.group_size = 8
buffer.batch_groups = 25
buffer.max_staleness = {eta}
learner.steps = 1000
reward_workers.batch_samples = {batch}
[[reward]]
function = "bench_functions:{function}"
"""


def prepare(folder: Path, function: str, *, samples: int, batch: int) -> Config:
    """A model folder (a tokenizer), the functions, the configuration."""
    from tokenizers import Tokenizer, models

    (folder / "model").mkdir()
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, 100)}
    Tokenizer(models.WordLevel(words, unk_token="<pad>")).save(str(folder / "model/tokenizer.json"))
    (folder / "model/config.json").write_text('{"eos_token_id": 2}')
    (folder / "bench_functions.py").write_text(FUNCTIONS)
    eta = -(-samples // (GROUP * 25))
    return parse(TOML.format(folder=folder, function=function, eta=eta, batch=batch))


async def fill(config: Config, samples: int) -> None:
    """So many samples of 200 tokens, without rewards."""
    client = ProducerClient(endpoint(config, "buffer"), name="p", timeout_s=60)
    await client.hello()
    prompt, sent = np.arange(3, 60, dtype=np.int32), 0
    while sent < samples:
        leases = (await client.lease(engine_version=0, max_groups=16, wait_s=5)).leases
        assert leases, "the buffer gives no leases"
        for lease in leases:
            made = [
                GenDelta(
                    str(index),
                    index,
                    np.full(200, 3 + index, np.int32),
                    np.full(200, -0.5, np.float32),
                    ((0, 200),),
                    "stop",
                )
                for index in lease.missing
            ]
            await client.submit(lease, prompt_ids=prompt, samples=made, digests={}, row={"prompt": "p"})
            sent += len(made)
    client.close()


def start(stack: ExitStack, config: Config, module: str, name: str) -> None:
    """A role as a process, ended with the stack."""
    run = RunDir(config.run_dir).create()
    folder = Path(config.run.dir).parent
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    with (run.logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(run.config), "--name", name],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=log,
        )
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


def measure(function: str, *, workers: int, samples: int, batch: int) -> dict[str, float]:
    """One run: rewards per second between the first look with a score and the last score."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        config = prepare(Path(name), function, samples=samples, batch=batch)
        RunDir(config.run_dir).create().config.write_text(dump(config))
        start(stack, config, "buffers.main", "buffer")
        observer = ServiceClient(endpoint(config, "buffer"), timeout_s=60)
        stack.callback(observer.close)
        asyncio.run(fill(config, samples))
        for number in range(workers):
            start(stack, config, "producers.rewards.main", f"reward-{number}")
        first = scored(observer, at_least=1)
        while len(observer.status()["rewards"]) < workers:  # all of them are at work
            first = scored(observer, at_least=1)
        last = scored(observer, at_least=samples)
        return {"per_s": round((last[1] - first[1]) / (last[0] - first[0]), 1), "scored": last[1] - first[1]}


def scored(observer: ServiceClient, *, at_least: int, limit_s: float = 300.0) -> tuple[float, int]:
    """When, and how many scores were in, once these were."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        [judge] = observer.status()["judges"]
        if judge["scored"] >= at_least:
            return time.monotonic(), int(judge["scored"])
        time.sleep(0.02)
    raise TimeoutError(f"{at_least} scores did not come within {limit_s:g} s: {observer.status()}")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=64, help="reward_workers.batch_samples")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for function in ("nap", "nap_async", "work"):
        rates = [
            measure(function, workers=args.workers, samples=args.samples, batch=args.batch)["per_s"]
            for _ in range(args.repeats)
        ]
        busy = min(args.workers, os.cpu_count() or 1) if function == "work" else args.workers
        figures[function] = {"per_s": statistics.median(rates), "rates": rates}
        if function != "nap_async":
            figures[function]["ideal_per_s"] = round(busy / CALL_S, 1)
        print(f"{function:10} {figures[function]}", flush=True)
    reports.write(
        ROOT / "benchmarks/results/rewards.json",
        f"rewards per second with {args.workers} workers of one core each, a function of 10 ms",
        packages=("pyzmq", "msgspec", "tokenizers"),
        workers=args.workers,
        samples=args.samples,
        batch_samples=args.batch,
        figures=figures,
    )


if __name__ == "__main__":
    main()
