"""Peak memory of the learner and of a producer against what `asyncrl check` says, with a 0.5B-shaped model on a CPU.

Run: `python benchmarks/bench_memory.py [--dtypes float32 bfloat16] [--layers 24] [--tokens 32]`. Weights are random. A
run has four steps of 16 answers of 32 tokens. Where the CPU has no instructions for bfloat16, take fewer (`--tokens`),
and packed rows that they fill (`--row-tokens`): the estimate is for full rows.
Resident memory is looked at 20 times a second: what a process has of its own, and versions of the weights in shared
memory, which the estimate counts at the learner. The results also say how long the run takes to its first step and in
all. Needs about 20 GiB. Results go to benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100

from asyncrl.demo.demo import task_settings  # noqa: E402, RUF100

TASK = "add"
STEPS, LIMIT_S, GIB = 4, 3600.0, 1 << 30
#: Qwen2.5-0.5B, with tied embeddings.
SHAPE = {
    "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def make_model(folder: Path, tokenizer: Path, *, layers: int, dtype: str) -> None:
    """In a process of its own, which ends with its memory."""
    code = (
        "import sys, json, torch\nfrom transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "torch.set_default_dtype(getattr(torch, sys.argv[2]))\n"
        "Qwen2ForCausalLM(Qwen2Config(**json.loads(sys.argv[3]))).save_pretrained(sys.argv[1])"
    )
    shape = json.dumps({**SHAPE, "num_hidden_layers": layers})
    subprocess.run([sys.executable, "-c", code, str(folder), dtype, shape], check=True, timeout=600)
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, folder)


def settings(folder: Path, dtype: str, tokens: int, row_tokens: int) -> list[str]:
    chosen = {
        "model.path": folder / "model", "model.dtype": dtype, "run.dir": folder / "run", "learner.steps": STEPS,
        "buffer.batch_groups": 4, "sampling.group_size": 4, "sampling.max_new_tokens": tokens, "producers.count": 1,
        "producers.slots": 16, "learner.micro_batch_tokens": row_tokens,
        "evaluation.every": 0, "evaluation.at_start": "false", "evaluation.at_end": "false",
        "log.archive": "false", "log.tensorboard": "false", "learner.checkpoint_every": 1000,
    }  # fmt: skip
    every = [*task_settings(TASK), *(f"{name}={value}" for name, value in chosen.items())]
    return [word for setting in every for word in ("--set", setting)]


def resident(pid: int) -> dict[str, int]:
    """Bytes by kind; empty for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines[:60])
             if name in ("RssAnon", "RssShmem", "RssFile")}  # fmt: skip
    return {"own": found["RssAnon"] + found["RssFile"], "shared": found["RssShmem"]} if found else {}


def run(folder: Path, dtype: str, tokens: int, row_tokens: int) -> dict[str, Any]:
    words = ["configs/quickstart.toml", *settings(folder, dtype, tokens, row_tokens)]
    asyncrl = [sys.executable, "-m", "asyncrl"]
    said = subprocess.run([*asyncrl, "check", "--json", *words], cwd=ROOT, capture_output=True, timeout=300, check=True)
    estimates = {one["role"]: one["total_bytes"] for one in json.loads(said.stdout)["memory"] if one["place"] == "host"}
    peaks: dict[str, dict[str, int]] = {}
    began = time.time()
    process = subprocess.Popen([*asyncrl, "launch", "all", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    roles = folder / "run" / "processes.jsonl"
    while process.poll() is None and time.time() < began + LIMIT_S:
        lines = roles.read_text().splitlines() if roles.exists() else []
        for line in map(json.loads, lines):
            for kind, size in resident(line["pid"]).items():
                of = peaks.setdefault(line["role"], {})
                of[kind] = max(of.get(kind, 0), size)
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
        raise SystemExit(f"the run took longer than {LIMIT_S:g} s; see {folder}")
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}; see {folder}")
    steps = [json.loads(line) for line in (folder / "run" / "metrics" / "learner.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"first_step_s": round(steps[0]["t"] - began, 1), "run_s": round(time.time() - began, 1)}
    for role in ("learner", "producer"):
        peak = peaks[role]["own"] + (peaks[role]["shared"] if role == "learner" else 0)
        found[role] = {
            "estimate_gib": round(estimates[role] / GIB, 2),
            "peak_gib": round(peak / GIB, 2),
            "shared_gib": round(peaks[role]["shared"] / GIB, 2),
            "estimate_over_peak": round(estimates[role] / peak, 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--row-tokens", type=int, default=512)
    args = parser.parse_args()
    subprocess.run(
        [sys.executable, "-m", "asyncrl", "demo", "--task", TASK, "--prepare-only"], cwd=ROOT, check=True, timeout=900
    )
    runs: dict[str, dict[str, Any]] = {}
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory(dir=ROOT / "runs") as made:
            folder = Path(made)
            make_model(folder / "model", ROOT / "runs" / "models" / TASK, layers=args.layers, dtype=dtype)
            runs[dtype] = run(folder, dtype, args.tokens, args.row_tokens)
            print(dtype, json.dumps(runs[dtype]), flush=True)
    what = "peak memory of a process against the estimate of `asyncrl check`, 0.5B-shaped model"
    reports.write(
        ROOT / "benchmarks" / "results" / "memory.json",
        what,
        layers=args.layers,
        tokens=args.tokens,
        row_tokens=args.row_tokens,
        runs=runs,
    )


if __name__ == "__main__":
    main()
