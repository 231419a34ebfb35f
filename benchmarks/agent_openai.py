"""Does a policy learn through an agent that it does not know? The unmodified OpenAI client trains a tiny model.

    python benchmarks/agent_openai.py [--steps 24] [--out benchmarks/results/agent_openai.json]

A random tiny model, `examples/agent-openai/agent.py` in processes of its own, the whole pipeline by `asyncrl launch
all`, then the audit. The agent's reward is the share of letters that are digits below 5, over two turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reports import write

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "agent_openai.json"
AGENT = ROOT / "examples" / "agent-openai" / "agent.py"
EDGE = 5  # steps at both ends that are averaged


def configuration(folder: Path, model: Path, *, steps: int, python: str = sys.executable) -> str:
    """The run's TOML."""
    rows = [{"prompt": f"{n}=", "letters": 8} for n in range(10, 74)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f'[run]\nname = "agent"\ndir = "{folder}/run"\n[model]\npath = "{model}"\ndtype = "float32"\n'
        f'[data]\npath = "{folder}/rows.jsonl"\nmax_prompt_tokens = 24\n'
        "[sampling]\ngroup_size = 8\nmax_new_tokens = 24\n"
        "[buffer]\nbatch_groups = 8\nmax_staleness = 2\n[producers]\ncount = 1\nslots = 16\n"
        f"[learner]\nsteps = {steps}\nmicro_batch_tokens = 2048\ncheckpoint_every = 1000\n"
        "[learner.optim]\nlr = 5e-3\n[log]\ntensorboard = false\n"
        '[environment]\nname = "agent"\n[environment.agent]\nsessions = 100000\nmax_processes = 6\n'
        f"command = {json.dumps([python, str(AGENT)])}\n"
    )


def make_model(folder: Path) -> None:
    """Random weights."""
    from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

    tokenizer = make_tokenizer(folder)
    save_model(folder, make_tiny_qwen3(len(tokenizer), seed=1, layers=2, hidden_size=64, head_dim=16, mlp_size=128))


def curve(run: Path) -> list[float]:
    """Mean reward by step."""
    lines = [json.loads(line) for line in (run / "metrics" / "learner.jsonl").read_text().splitlines()]
    return [float(line["reward_mean"]) for line in lines if "reward_mean" in line]


def ends(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first and of the last steps."""
    return statistics.mean(rewards[:EDGE]), statistics.mean(rewards[-EDGE:])


def measure(folder: Path, *, steps: int) -> dict[str, Any]:
    """One run and its audit."""
    make_model(folder / "model")
    config = folder / "run.toml"
    config.write_text(configuration(folder, folder / "model", steps=steps))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "launch", "all", str(config)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    seconds = time.monotonic() - began
    told = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(folder / "run"), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    audit = json.loads(told.stdout[told.stdout.index("{") :])
    rewards = curve(folder / "run")
    first, last = ends(rewards)
    return {
        "steps": steps,
        "sessions": steps * 64,
        "turns_per_session": 2,
        "seconds": round(seconds, 1),
        "reward_first": round(first, 3),
        "reward_last": round(last, 3),
        "rewards": [round(item, 3) for item in rewards],
        "lost": audit["lost"],
        "doubled": audit["doubled"],
        "trained_groups": audit["trained"],
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), steps=args.steps)
    print(f"reward {found['reward_first']} -> {found['reward_last']} in {args.steps} steps, {found['seconds']} s")
    what = "reward of a tiny model that the unmodified OpenAI client trains: share of digits below 5, two turns"
    write(args.out, what, packages=("torch", "transformers", "openai"), **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
