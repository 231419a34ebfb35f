"""Does a policy learn to use a tool? The whole run of configs/tool-calculator.toml, from its warm start to its audit.

    python benchmarks/tool_calculator.py [--steps 24] [--seed 0]

Writes benchmarks/results/tool-calculator.json: the reward of every step (the share of samples whose last turn is the
product), the mean of the first and of the last three steps, and what the audit says.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import reports

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tool-calculator.json"
RUN = ROOT / "runs" / "tool-calculator"


def prepare(seed: int) -> float:
    """Model and prompts; seconds."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "learners.warm_start.calculator",
        "--out",
        "runs/models/calculator",
        "--data",
        "runs/data/calculator.jsonl",
        "--seed",
        str(seed),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    return time.monotonic() - began


def train(steps: int, seed: int) -> dict[str, Any]:
    """The run and its figures."""
    shutil.rmtree(RUN, ignore_errors=True)
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "asyncrl",
        "launch",
        "all",
        "configs/tool-calculator.toml",
        "--plain",
        "--set",
        f"learner.steps={steps}",
        "--set",
        f"run.seed={seed}",
        "--set",
        "log.tensorboard=false",
    ]
    done = subprocess.run(command, cwd=ROOT, timeout=1800, check=False)
    took = time.monotonic() - began
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(RUN), "--json"],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
        check=False,
        text=True,
    )
    found = json.loads(audit.stdout[audit.stdout.index("{") :])
    lines = [json.loads(line) for line in (RUN / "metrics" / "learner.jsonl").read_text().splitlines()]
    rewards = [round(line["reward_mean"], 4) for line in lines]
    return {
        "code": done.returncode,
        "audit": audit.returncode,
        "lost": found["lost"],
        "doubled": found["doubled"],
        "steps": len(lines),
        "seconds": round(took, 1),
        "rewards": rewards,
        "first3": round(statistics.fmean(rewards[:3]), 4),
        "last3": round(statistics.fmean(rewards[-3:]), 4),
        "observed_share": round(statistics.fmean(line["observed_share"] for line in lines), 4),
        "lag_mean": round(statistics.fmean(line["lag_mean"] for line in lines), 3),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warm_start_s = prepare(args.seed)
    run = train(args.steps, args.seed)
    reports.write(
        RESULTS,
        "a tiny model learns to call a calculator and to repeat its answer; two turns, on a CPU",
        warm_start_s=round(warm_start_s, 1),
        seed=args.seed,
        run=run,
    )
    print(f"reward {run['first3']} -> {run['last3']} in {run['steps']} steps, {run['seconds']} s; audit {run['audit']}")


if __name__ == "__main__":
    main()
