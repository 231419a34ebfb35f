"""What it is worth that the freed tensors of a CPU's steps stay in the process (`asyncrl.allocator.keep_tensors`).

    python benchmarks/bench_heap.py [--rounds 3]

- `decode`: a step of the `hf` engine with 64 rows over a vocabulary of 151,936, in a thread as in a producer; the model
  itself is tiny, so the step is mostly logits and sampling;
- `train`: a step of the learner on the demo's `running_sum`, 16 groups of 8 samples (`asyncrl demo --task running_sum
  --prepare-only` is run first).

Each way is a process of its own, in turn: `kept` with `keep_tensors`, `mapped` as a learner of a large model has it
(tensors of 1 MiB go back to the system), `plain` without a setting. Figures: CPU time of a step (median), pages faulted
in by a step, resident memory at the peak. Writes benchmarks/results/heap.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
STEPS = {"decode": 20, "train": 8}
WAYS = ("kept", "mapped", "plain")


def steps(step: Callable[[], Any], count: int) -> dict[str, float]:
    """Figures of `count` calls, after two that are not counted."""
    took = []
    for number in range(count + 2):
        if number == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.thread_time()
        step()
        took.append(time.thread_time() - began)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms": 1e3 * statistics.median(took[2:]),
        "faults": (usage.ru_minflt - before) / count,
        "peak_mb": usage.ru_maxrss / 1024,
    }


def decode() -> Callable[[], Any]:
    """A step of the `hf` engine."""
    import torch

    from asyncrl.engine import GenRequest
    from learners.warm_start.tiny_model import make_tiny_qwen3
    from producers.engines.hf import attention
    from producers.engines.hf.decoder import Decoder
    from producers.engines.hf.slot_cache import SlotMemory
    from producers.engines.hf.slots import SlotTable

    model = make_tiny_qwen3(151_936, hidden_size=128, mlp_size=256, layers=2, head_dim=32, max_positions=288)
    model.requires_grad_(False).eval().set_attn_implementation("sdpa")
    attention.install(model)
    cpu = torch.device("cpu")
    memory = SlotMemory(model, slots=64, max_len=288, device=cpu, where="")
    decoder = Decoder(memory, SlotTable(64, max_new_tokens=256, device=cpu), recompute=False)
    decoder.swap(0, lambda: None)
    for row in range(64):
        decoder.submit(GenRequest(f"r{row}", np.arange(20, dtype=np.int32), (0,), row, 256))
    return decoder.step


def train() -> Callable[[], Any]:
    """A step of the learner."""
    from exact_age import Prompts, Sampler, Task, Trainer, load

    config = load("running_sum", [], seed=0, steps=40)
    trainer = Trainer(config)
    sampler = Sampler(config.model.path, max_new=config.sampling.max_new_tokens)
    batch = Prompts(config, sampler, Task("running_sum", sampler.tokenizer, seed=0), age=0).batch(1)
    return lambda: trainer.train(batch)


def measure(what: str, way: str) -> None:
    """Print the figures as JSON; in a process of its own."""
    import torch

    from asyncrl.allocator import keep_memory, keep_tensors

    torch.set_num_threads(1)
    if way == "kept":
        keep_tensors()
    elif way == "mapped":
        keep_memory(mapped_bytes=1 << 20)
    step = {"decode": decode, "train": train}[what]()
    found: dict[str, float] = {}
    if what == "decode":
        thread = threading.Thread(target=lambda: found.update(steps(step, STEPS[what])))
        thread.start()
        thread.join()
    else:
        found = steps(step, STEPS[what])
    print(json.dumps(found))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(*args.one)
        return
    prepare = [sys.executable, "-m", "asyncrl", "demo", "--task", "running_sum", "--prepare-only"]
    subprocess.run(prepare, cwd=ROOT, check=True, timeout=600)
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {what: {way: [] for way in WAYS} for what in STEPS}
    for _ in range(args.rounds):
        for what, ways in rounds.items():
            for way, found in ways.items():
                command = [sys.executable, __file__, "--one", what, way]
                done = subprocess.run(command, cwd=ROOT, check=True, timeout=600, capture_output=True, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
                print(what, way, found[-1], flush=True)
    result = {
        "command": f"python benchmarks/bench_heap.py --rounds {args.rounds}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpus": os.cpu_count(), "libc": " ".join(platform.libc_ver()), "python": platform.python_version()},
        "medians": {
            what: {
                way: {name: round(statistics.median(one[name] for one in found), 1) for name in found[0]}
                for way, found in ways.items()
            }
            for what, ways in rounds.items()
        },
        "rounds": rounds,
    }
    print(json.dumps(result["medians"], indent=1))
    (ROOT / "benchmarks" / "results" / "heap.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
