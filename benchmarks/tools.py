"""Does a policy learn to use each tool? The two commands of examples/tools, and the held-out reward at both ends.

    python benchmarks/tools.py search [python shell mcp browser]

Writes benchmarks/results/tools.json, one entry for each tool: the held-out reward of the start weights and after the
last step, the reward of every step, minutes of both commands, and what the audit says. Entries of other tools stay.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import reports

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tools.json"
EXAMPLE = "examples/tools"
TOOLS = ("python", "search", "shell", "mcp", "browser")
LIMIT_S = 3600.0


def measure(tool: str) -> dict[str, Any]:
    """Both commands of a tool and their figures. Raises CalledProcessError if one fails."""
    run = ROOT / "runs" / "tools" / tool / "rl"
    shutil.rmtree(run, ignore_errors=True)
    prepare = command(f"{EXAMPLE}/prepare.py", tool)
    launch = command("-m", "asyncrl", "launch", "all", f"{EXAMPLE}/rl.toml", f"{EXAMPLE}/{tool}.toml", "--plain")
    return read_run(tool, run) | {"warm_start_minutes": prepare, "minutes": launch}


def read_run(tool: str, run: Path) -> dict[str, Any]:
    """The figures of a run that has ended."""
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(run), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in (run / "metrics" / "learner.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (run / "metrics" / "evaluation.jsonl").read_text().splitlines()]
    name = f"val-core/{tool}/reward/mean@1"
    held_out = {int(one["evaluation_version"]): round(one[name], 4) for one in evaluations if name in one}
    return {
        "start": held_out[min(held_out)],
        "end": held_out[max(held_out)],
        "held_out_by_step": held_out,
        "steps": len(lines),
        "rewards": [round(line["reward_mean"], 4) for line in lines],
        "observed_share": round(sum(line["observed_share"] for line in lines) / len(lines), 4),
        "audit": audit.returncode,
    }


def command(*words: str) -> float:
    """Run it; minutes."""
    began = time.monotonic()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=LIMIT_S)
    return round((time.monotonic() - began) / 60, 2)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="+", choices=TOOLS)
    for tool in parser.parse_args().tools:
        found = measure(tool)
        known = json.loads(RESULTS.read_text())["tools"] if RESULTS.exists() else {}
        reports.write(RESULTS, "held-out reward of a tiny model that learns to use a tool", tools=known | {tool: found})
        print(f"{tool}: {found['start']} -> {found['end']} in {found['minutes']} minutes; audit {found['audit']}")


if __name__ == "__main__":
    main()
