"""The drill: the quickstart run on Redis, every role killed twice with SIGKILL while it trains, in random order.

    python benchmarks/drill.py [--seed 1] [--rounds 2] [--signal KILL] [--set key=value ...]

Undisturbed first, then the same run with faults; both must end by themselves with the same number of trained groups,
and `asyncrl audit` must say 0 lost, 0 doubled. Writes results/drill.json: what was killed when, how long it took until
the next step was trained, both audits. Needs a redis-server on the PATH. Exit code 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results") / "drill.json"
VICTIMS = ("producer", "reward", "buffer", "redis", "learner", "weightsync")
LIMIT_S = 600.0


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that may be growing."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def alive(pid: int) -> bool:
    """Running, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def redis_of(run: Path) -> list[int]:
    """The private Redis server of the run: the process whose working folder or command line names it."""
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            inside = str(run) in command or str((place / "cwd").readlink()).startswith(str(run))
        except OSError:
            continue
        if "redis-server" in command and inside:
            pids.append(int(place.name))
    return pids


def pids_of(run: Path, role: str) -> list[int]:
    """Living processes of a role."""
    if role == "redis":
        return redis_of(run)
    return [line["pid"] for line in lines(run / "processes.jsonl") if line["role"] == role and alive(line["pid"])]


def steps_of(run: Path) -> int:
    """How many lines the learner has written."""
    return len(lines(run / "metrics" / "learner.jsonl"))


def start(run: Path, settings: list[str], log: Path) -> subprocess.Popen[bytes]:
    """`asyncrl launch all` in the background."""
    shutil.rmtree(run, ignore_errors=True)
    words = [
        sys.executable,
        "-m",
        "asyncrl",
        "launch",
        "all",
        str(ROOT / "configs" / "quickstart.toml"),
        "--plain",
        "--set",
        f"run.dir={run}",
        "--set",
        "buffer.store=redis",
    ]
    for setting in settings:
        words += ["--set", setting]
    with log.open("wb") as file:
        return subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def audit(run: Path) -> dict[str, Any]:
    """`asyncrl audit RUN --json`."""
    words = [sys.executable, "-m", "asyncrl", "audit", str(run), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    verdict: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return verdict | {"exit": done.returncode}


def disturb(run: Path, child: subprocess.Popen[bytes], order: list[str], rng: random.Random) -> list[dict[str, Any]]:
    """Kill one process of each role in `order`, each after the run has moved on; how long until the next step."""
    faults: list[dict[str, Any]] = []
    deadline = time.monotonic() + LIMIT_S
    while not steps_of(run) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    for role in order:
        while not (pids := pids_of(run, role)) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if child.poll() is not None:
            break
        victim, before, now = rng.choice(pids), steps_of(run), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while steps_of(run) == before and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        faults.append(
            {"role": role, "pid": victim, "at_step": before, "until_next_step_s": round(time.monotonic() - now, 2)}
        )
        print(f"killed {role} (pid {victim}) after {before} steps; next step after {faults[-1]['until_next_step_s']} s")
        sys.stdout.flush()
        time.sleep(rng.uniform(0.2, 1.5))
    return faults


def finish(run: Path, child: subprocess.Popen[bytes], started: float) -> dict[str, Any]:
    """Wait for the end; the audit with the exit code and the duration."""
    try:
        code = child.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=60)
        code = -1
    return {"exit": code, "seconds": round(time.monotonic() - started, 1), "audit": audit(run)}


def main() -> int:
    """Both runs, the comparison, the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="how often each role is killed")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    folder = ROOT / "runs"
    prepare = [sys.executable, "-m", "asyncrl", "demo", "--prepare-only"]
    subprocess.run(prepare, cwd=ROOT, check=True, timeout=600)
    calm_run, run = folder / "drill-calm", folder / "drill"
    began = time.monotonic()
    calm = finish(calm_run, start(calm_run, args.settings, folder / "drill-calm.log"), began)
    order = list(VICTIMS) * args.rounds
    rng.shuffle(order)
    began = time.monotonic()
    child = start(run, args.settings, folder / "drill.log")
    faults = disturb(run, child, order, rng)
    shaken = finish(run, child, began)
    same = calm["audit"]["trained"] == shaken["audit"]["trained"]
    kept = not (calm["exit"] or shaken["exit"] or shaken["audit"]["exit"]) and same and len(faults) == len(order)
    result = {
        "command": f"python benchmarks/drill.py --seed {args.seed} --rounds {args.rounds}"
        + "".join(f" --set {setting}" for setting in args.settings),
        "kept": kept,
        "faults": faults,
        "undisturbed": calm,
        "disturbed": shaken,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{len(faults)} of {len(order)} kills; trained {shaken['audit']['trained']} against "
        f"{calm['audit']['trained']} undisturbed; promises {'kept' if kept else 'BROKEN'}; {RESULTS}"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
