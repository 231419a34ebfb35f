"""Does `asyncrl plan` say what runs then do? One run is measured; the others are forecast from its logs, then run.

    python benchmarks/plan_accuracy.py [--steps 30] [--only "1 producer, bound 0"] [--task running_sum]

Compares steps per second and the mean lag after the first five steps. The machine must be quiet: every run has all its
cores. Writes benchmarks/results/plan_accuracy.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl.planner.forecast import play
from asyncrl.planner.measure import measure
from asyncrl.planner.search import build_scenario
from asyncrl.runtime.run_dir import RunDir

RESULTS = ROOT / "benchmarks" / "results" / "plan_accuracy.json"
#: name -> producers, max_staleness, batch_groups. The first one is measured.
SETTINGS: dict[str, tuple[int, int, int]] = {
    "2 producers, bound 2": (2, 2, 16),
    "1 producer, bound 2": (1, 2, 16),
    "2 producers, bound 0": (2, 0, 16),
    "1 producer, bound 0": (1, 0, 16),
    "2 producers, bound 4": (2, 4, 16),
    "1 producer, bound 4": (1, 4, 16),
    "2 producers, bound 2, batch 8": (2, 2, 8),
    "2 producers, bound 2, batch 24": (2, 2, 24),
}
LIMIT = 0.10
LAG_LIMIT = 0.15  # steps; of small lags 10 % says nothing


def prepare(task: str) -> None:
    """Model and prompts of the demo (made once)."""
    command = [sys.executable, "-m", "asyncrl", "demo", "--task", task, "--prepare-only"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)


def run_of(task: str, name: str, steps: int) -> RunDir:
    """One run, to its end."""
    producers, bound, groups = SETTINGS[name]
    folder = ROOT / "runs" / f"plan-{producers}-{bound}-{groups}"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        f"run.dir={folder}",
        f"producers.count={producers}",
        f"buffer.max_staleness={bound}",
        f"buffer.batch_groups={groups}",
        f"learner.steps={steps}",
        f"model.path=runs/models/{task}",
        f"data.path=runs/data/{task}.jsonl",
        "log.tensorboard=false",
        "learner.checkpoint_every=10",
        f'reward=[{{function="asyncrl.demo.tasks:{task}_reward"}}]',
        "log.archive=false",
        "evaluation.every=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", "configs/quickstart.toml", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return RunDir(folder)


def compared(task: str, names: list[str], steps: int) -> dict[str, Any]:
    """Every setting: what was forecast from the first run, and what was measured."""
    rows: dict[str, Any] = {}
    plant = None
    for name in names:
        began = os.getloadavg()[0]
        run = run_of(task, name, steps)
        found, did, config = measure(run)
        plant = plant or found
        [got] = play(plant, [build_scenario(config, steps=steps)])
        rows[name] = {
            "steps_s": [round(got.steps_s, 4), round(did.steps_s, 4)],
            "steps_s_error": round(got.steps_s / did.steps_s - 1, 4),
            "lag_mean": [round(got.lag_mean, 3), round(did.lag_mean, 3)],
            "lag_error": round(got.lag_mean - did.lag_mean, 3),
            "learner_waits": [round(got.learner_wait_share, 3), round(did.learner_wait_share, 3)],
            "load_1m": [round(began, 2), round(os.getloadavg()[0], 2)],
        }
        row = rows[name]
        print(
            f"{name:<32} steps/s {got.steps_s:.3f} forecast, {did.steps_s:.3f} made ({row['steps_s_error']:+.0%}); "
            f"lag {got.lag_mean:.2f}, {did.lag_mean:.2f}",
            flush=True,
        )
    return rows


def within(row: dict[str, Any]) -> bool:
    """Throughput within 10 %, mean lag within 10 % or a seventh of a step."""
    lag = max(LAG_LIMIT, LIMIT * row["lag_mean"][1])
    return abs(row["steps_s_error"]) <= LIMIT and abs(row["lag_error"]) <= lag


def main() -> None:
    """Run, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--task", default="running_sum")
    parser.add_argument("--only", action="append", choices=list(SETTINGS), help="beside the one that is measured")
    args = parser.parse_args()
    prepare(args.task)
    first, *others = SETTINGS
    rows = compared(args.task, [first, *(args.only or others)], args.steps)
    good = sum(within(row) for name, row in rows.items() if name != first)
    worst = max((abs(row["steps_s_error"]) for name, row in rows.items() if name != first), default=0.0)
    words = " ".join(sys.argv[1:])
    result = {
        "what": "asyncrl plan against runs", "measured": first, "steps": args.steps, "task": args.task,
        "command": f"python benchmarks/plan_accuracy.py {words}".strip(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "within_limits": f"{good} of {len(rows) - 1}", "worst_steps_s_error": round(worst, 4), "settings": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{good} of {len(rows) - 1} other settings within {LIMIT:.0%} of the speed and {LAG_LIMIT} steps (or "
        f"{LIMIT:.0%}) of the lag; worst speed {worst:+.0%} -> {RESULTS.relative_to(ROOT)}"
    )


if __name__ == "__main__":
    main()
