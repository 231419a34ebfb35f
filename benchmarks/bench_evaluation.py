"""What an evaluation of one version costs training: steps per second of the demo with and without it, interleaved.

    python benchmarks/bench_evaluation.py [--repeats 3] [--lanes none before_swap second_weights evaluators]

Needs the model and data of `asyncrl demo`. Every run has one evaluation in its window of 20 steps: 64 held-out prompts
with 4 samples each, due at step 20. Counted is the time from the end of step 7 to the end of step 27. The ratio is of
neighbours: each lane against the run without evaluation of the same repeat, since the load of a machine changes. CPU
seconds are those of all processes of a run, its start included: the load of the machine matters less to them.
Writes benchmarks/results/evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EVERY = 20
FIRST, LAST = 7, 7 + EVERY
NONE = "none"
LANES = (NONE, "before_swap", "second_weights", "evaluators")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(lane: str) -> dict[str, Any]:
    """Steps per second of one run, and its evaluations."""
    folder = ROOT / "runs" / f"bench-evaluation-{lane}"
    shutil.rmtree(folder, ignore_errors=True)
    own = [f"evaluation.every={0 if lane == NONE else EVERY}"]
    own += [f"evaluation.lane={lane}"] if lane != NONE else []
    common = ["log.tensorboard=false", "evaluation.at_start=false", "evaluation.at_end=false"]
    given = [f"run.dir={folder}", f"learner.steps={LAST}", *common, *own]
    words = [word for setting in given for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", "configs/quickstart.toml", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{lane} failed:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ended = {line["step"]: line["t"] for line in read_lines(folder / "metrics" / "learner.jsonl")}
    versions = [
        {name: line[f"evaluation_{name}"] for name in ("version", "version_min", "version_max", "scored", "s")}
        for line in read_lines(folder / "metrics" / "evaluation.jsonl")
    ]
    assert all(one["version"] == one["version_min"] == one["version_max"] for one in versions), versions
    speed = EVERY / (ended[LAST] - ended[FIRST])
    return {"lane": lane, "steps_s": speed, "cpu_s": round(cpu_s, 1), "evaluations": versions}


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By measure and lane: the median of the ratios to the neighbour, and all; the spread without evaluation."""
    found: dict[str, Any] = {}
    for measure in ("steps_s", "cpu_s"):
        values = {lane: [one[measure] for one in runs if one["lane"] == lane] for lane in LANES}
        base = values.pop(NONE)
        found[measure] = {"spread_of_none": round((max(base) - min(base)) / statistics.median(base), 3)}
        for lane, mine in values.items():
            ratios = [round(one / beside, 3) for one, beside in zip(mine, base, strict=False)]
            if ratios:
                found[measure][lane] = {"ratio": statistics.median(ratios), "ratios": ratios}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=LANES)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for lane in options.lanes if repeat % 2 == 0 else reversed(options.lanes):
            runs.append({"repeat": repeat, **run(lane)})
            print(json.dumps(runs[-1]), flush=True)
    result = {"runs": runs, **(summarize(runs) if NONE in options.lanes else {})}
    path = ROOT / "benchmarks" / "results" / "evaluation.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=1))


if __name__ == "__main__":
    main()
