"""How long `asyncrl demo` takes to its first step once model and prompts are made, and where the time goes.

Run: `python benchmarks/bench_start.py [--rounds 5] [--against CHECKOUT]`. With `--against` another checkout runs in
turn with this one: before and after in one run. `processor_s` is the time of all processes of a run of one step, which
other work on the machine changes less. Results go to benchmarks/results/start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100

#: Stage -> log of a role, and what it says then.
SAYS = {"producers ready": ("producer-*.log", "engine ready"), "learner ready": ("learner.log", "ready after")}
LIMIT_S = 300.0


def demo(checkout: Path, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asyncrl", "demo", "--plain", *words]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)


def measure(checkout: Path, folder: Path) -> dict[str, float]:
    """Seconds from the command to each stage, of a run of one step."""
    run = folder / "runs" / "demo-running_sum"
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    seen: dict[str, float] = {}
    process = demo(checkout, folder, "--set", "learner.steps=1", "--set", "log.tensorboard=false")
    while process.poll() is None and time.time() < began + LIMIT_S:
        for stage, (logs, text) in SAYS.items():
            found = [path for path in (run / "logs").glob(logs) if path.stat().st_mtime >= began]
            if stage not in seen and found and all(text in path.read_text(errors="replace") for path in found):
                seen[stage] = time.time() - began
        time.sleep(0.02)
    process.wait(timeout=60)  # with 1, since one step breaks the promise of a lag
    if json.loads((run / "result.json").read_bytes())["code"]:
        raise SystemExit(f"asyncrl demo of {checkout} ended with {process.returncode}; see {run}")
    events = [json.loads(line) for line in (run / "logs" / "launch.jsonl").read_text().splitlines()]
    started = {event["role"]: event["t"] - began for event in events if event["event"] == "start"}
    first = json.loads((run / "metrics" / "learner.jsonl").read_text().splitlines()[0])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "services start": started["buffer"],
        "roles start": started["learner"],
        **dict(sorted(seen.items())),
        "first step": first["t"] - began,
        "processor_s": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout")
    args = parser.parse_args()
    checkouts = {"here": ROOT} | ({"against": args.against.resolve()} if args.against else {})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    place = ROOT / "runs" / "bench-start"
    place.mkdir(parents=True, exist_ok=True)
    if demo(ROOT, place, "--prepare-only").wait(timeout=1800):
        raise SystemExit("the model could not be made")
    for number in range(args.rounds + 1):
        for name, checkout in checkouts.items():
            figures = measure(checkout, place)
            print(name, {stage: round(value, 2) for stage, value in figures.items()}, flush=True)
            runs[name] += [figures] if number else []  # the first one writes bytecode and fills the page cache
    medians = {
        name: {stage: round(statistics.median(run[stage] for run in found), 2) for stage in found[0]}
        for name, found in runs.items()
    }
    print(medians)
    reports.write(
        ROOT / "benchmarks" / "results" / "start.json",
        "seconds from `asyncrl demo` to each stage of its start (medians)",
        rounds=args.rounds,
        figures=medians,
    )


if __name__ == "__main__":
    main()
