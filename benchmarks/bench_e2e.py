"""Asynchronous against synchronous on this machine: the same run with `max_staleness` 0 and above, interleaved.

    python benchmarks/bench_e2e.py [--steps 24] [--repeats 2] [--task running_sum]

Reports what is trained per second between the end of step `WARM` and the last step (start-up and the first batches,
which are all of version 0, are left out), the learner's idle share, the ratio asynchronous / synchronous, and where the
learner's time goes per group. Two limits:

- `of_limit`: a learner that never waits and trains as fast as in the synchronous run, where nothing else runs while it
  trains;
- `of_cores`: all cores are busy all the time, and a group costs the time of the CPUs that it costs in the synchronous
  run (all processes of the run, from step `WARM` to the last).

Writes benchmarks/results/e2e.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WARM = 5
CORES = os.cpu_count() or 1
PARTS = ("wait_s", "train_s", "proximal_s", "assemble_s", "publish_s", "commit_s")
VARIANTS = {"sync": 0, "async_1": 1, "async_2": 2, "async_4": 4}


def prepare(task: str) -> None:
    """Model and prompts of the demo (made once)."""
    command = [sys.executable, "-m", "asyncrl", "demo", "--task", task, "--prepare-only"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)


def measure(task: str, name: str, staleness: int, steps: int) -> dict[str, float]:
    """One run; figures from its metrics."""
    folder = ROOT / "runs" / f"bench-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    reward = f'reward=[{{function="asyncrl.demo.tasks:{task}_reward"}}]'
    settings = [
        f"run.dir={folder}",
        f"buffer.max_staleness={staleness}",
        f"learner.steps={steps}",
        f"model.path=runs/models/{task}",
        f"data.path=runs/data/{task}.jsonl",
        "log.tensorboard=false",
        "learner.checkpoint_every=1000",
        reward,
        "evaluation.every=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", "configs/quickstart.toml", *words]
    metrics, cpu = folder / "metrics" / "learner.jsonl", dict[int, float]()
    with tempfile.TemporaryFile("w+") as said:
        run = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, text=True, start_new_session=True)
        deadline = time.monotonic() + 900
        while run.poll() is None:
            trained = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if trained >= (steps if cpu else WARM) and len(cpu) < 2:
                cpu[trained] = cpu_of_tree(run.pid)
            time.sleep(0.02)
            if time.monotonic() > deadline:
                os.killpg(run.pid, signal.SIGKILL)
        if run.returncode or len(cpu) < 2:
            said.seek(0)
            raise SystemExit(f"{name} failed:\n{said.read()[-5000:]}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (_, before), (_, after) = cpu.items()
    counted = sum(line["groups"] for line in lines[min(cpu) : max(cpu)])
    first, last = lines[WARM - 1], lines[-1]
    seconds = last["t"] - first["t"]
    steady = lines[WARM:]
    tokens = sum(line["tokens"] for line in steady)
    return {
        "groups_per_s": sum(line["groups"] for line in steady) / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_group": tokens / sum(line["groups"] for line in steady),
        "learner_idle": sum(line["wait_s"] for line in steady) / seconds,
        "lag_mean": statistics.mean(line["lag_mean"] for line in steady),
        "lag_max": max(line["lag_max"] for line in steady),
        "seconds": seconds,
        "cpu_s": (after - before) / counted,
        **{part: sum(line[part] for line in steady) / sum(line["groups"] for line in steady) for part in PARTS},
    }


def cpu_of_tree(root: int) -> float:
    """Seconds of CPU time of a process and its living descendants, with those of their children that ended."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))

    def belongs(process: int) -> bool:
        return process == root or (process in parents and belongs(parents[process]))

    return sum(count for process, count in ticks.items() if belongs(process)) / os.sysconf("SC_CLK_TCK")


def limit_shares(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """By variant: its ratio to the limit, and each part's seconds per group (medians) with the rest of the time."""
    found = {}
    for name, some in runs.items():
        middle = {part: statistics.median(run[part] for run in some) for part in (*PARTS, "groups_per_s", "cpu_s")}
        period, cpu = 1 / middle.pop("groups_per_s"), middle.pop("cpu_s")
        found[name] = {"period_s": period, **middle, "other_s": period - sum(middle.values()), "cpu_s": cpu}
    busy = found["sync"]["period_s"] - found["sync"]["wait_s"]
    for one in found.values():
        one["of_limit"] = busy / one["period_s"]
        one["of_cores"] = found["sync"]["cpu_s"] / CORES / one["period_s"]
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--task", default="running_sum")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "e2e.json")
    args = parser.parse_args()
    prepare(args.task)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(args.repeats):  # interleaved, so that a slow spell of the machine hits all variants
        for name, staleness in VARIANTS.items():
            figures = measure(args.task, name, staleness, args.steps)
            runs[name].append(figures)
            print(name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    tokens = {name: statistics.median(run["tokens_per_s"] for run in found) for name, found in runs.items()}
    ratios = {name: tokens[name] / tokens["sync"] for name in VARIANTS}
    print("tokens/s against max_staleness = 0:", {name: round(ratio, 2) for name, ratio in ratios.items()})
    shares = limit_shares(runs)
    for limit in ("of_limit", "of_cores"):
        print(limit, {name: round(one[limit], 2) for name, one in shares.items()})
    result: dict[str, Any] = {
        "command": f"python benchmarks/bench_e2e.py --steps {args.steps} --repeats {args.repeats} --task {args.task}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpus": CORES,
            "arch": platform.machine(),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "pyzmq", "msgspec")},
        "runs": runs,
        "seconds_per_group": shares,
        "tokens_per_s_ratio_to_sync": ratios,
        "learner_idle_median": {
            name: statistics.median(run["learner_idle"] for run in found) for name, found in runs.items()
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
