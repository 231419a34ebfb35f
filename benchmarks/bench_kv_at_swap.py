"""What becomes of K/V at a swap: `kv_at_swap = "keep"` against `"recompute"`, on consecutive steps of a real run.

    python benchmarks/bench_kv_at_swap.py [--steps 24] [--repeats 2] [--python .venv-vllm/bin/python]

1. A run of the demo's task is trained with a checkpoint at every step. For pairs of steps (k, k + 1), samples are begun
   under the weights of k and finished under those of k + 1; the engine's log-probs of the tokens after the swap are
   compared with a plain forward of k + 1 over the whole sample: the gap per token, mean and largest. Beside it stands
   how far the two policies are apart on the same tokens.
2. Whole runs with either setting, interleaved: tokens trained per second after the first steps, reward of the last five
   steps, how long a swap took.
With `--python`, an interpreter that has vLLM and asyncrl, both are done on the vllm engine too.
Writes benchmarks/results/kv_at_swap.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WARM = 5
TASK = "running_sum"
POLICIES = ("keep", "recompute")
PAIRS = (4, 8, 12)  # swaps from step k to k + 1
PROMPTS, SAMPLES, NEW = 8, 4, 96
QUIET = ("log.tensorboard=false", "evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false")


def launch(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Run the quickstart with these settings; the learner's lines."""
    shutil.rmtree(folder, ignore_errors=True)
    reward = f'reward=[{{function="asyncrl.demo.tasks:{TASK}_reward"}}]'
    given = [f"run.dir={folder}", f"model.path=runs/models/{TASK}", f"data.path=runs/data/{TASK}.jsonl", reward]
    words = [word for setting in (*given, *QUIET, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", "configs/quickstart.toml", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{folder.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics" / "learner.jsonl").read_text().splitlines()]


def consecutive(steps: int) -> dict[int, Path]:
    """A model folder for each of the steps of PAIRS and those after them."""
    folder = ROOT / "runs" / "bench-kv-steps"
    launch(folder, f"learner.steps={steps}", "learner.checkpoint_every=1", f"learner.checkpoint_keep={steps}")
    wanted = sorted({step for first in PAIRS for step in (first, first + 1)})
    for step in wanted:
        command = [
            sys.executable,
            "-m",
            "learners.checkpoints.export",
            str(folder),
            "--step",
            str(step),
            "--out",
            str(folder / f"hf-{step}"),
        ]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return {step: folder / f"hf-{step}" for step in wanted}


def whole_run(engine: str, kv: str, python: str, steps: int) -> dict[str, float]:
    """Speed, reward and swaps of one run."""
    folder = ROOT / "runs" / f"bench-kv-{engine}-{kv}"
    own = (f"producers.python={python}",) if engine == "vllm" else ()
    lines = launch(
        folder,
        f"learner.steps={steps}",
        f"producers.engine={engine}",
        f"producers.kv_at_swap={kv}",
        "producers.count=1",
        "learner.checkpoint_every=1000",
        "weightsync.timeout_s=120",
        *own,
    )
    steady, seconds = lines[WARM:], lines[-1]["t"] - lines[WARM - 1]["t"]
    swaps = [line["swap_s"] for line in _lines(folder / "metrics" / "roles.jsonl") if line.get("swap_s")]
    return {
        "tokens_per_s": sum(line["tokens"] for line in steady) / seconds,
        "reward_last_5": statistics.mean(line["reward_mean"] for line in lines[-5:]),
        "logprob_gap_mean": statistics.mean(line["logprob_gap_mean"] for line in steady),
        "swap_s_median": statistics.median(swaps) if swaps else 0.0,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------- one engine, in its own environment


def gap(engine: str, kv: str, old: Path, new: Path) -> dict[str, float]:
    """Samples begun under `old` and finished under `new`: gaps of the tokens after the swap."""
    return asyncio.run(_gap(engine, kv, old, new))


async def _gap(engine: str, kv: str, old: Path, new: Path) -> dict[str, float]:
    from asyncrl.config import load
    from asyncrl.plugins import find

    settings = [
        f"run.dir={old.parent / 'gap'}",
        f"model.path={old}",
        f"data.path={ROOT}/runs/data/{TASK}.jsonl",
        f"producers.engine={engine}",
        f"producers.kv_at_swap={kv}",
        "producers.count=1",
        f"producers.slots={PROMPTS * SAMPLES}",
    ]
    config = load(ROOT / "configs" / "quickstart.toml", settings)
    made = find("asyncrl.engines", engine)(config)
    await made.start()
    try:
        await _push(made, old, 0)
        await _push(made, new, 1, commit=False)
        prompts = _prompts(old)
        going = [asyncio.create_task(_ask(made, number, prompt)) for number, prompt in enumerate(prompts)]
        while made.health().generated_tokens < PROMPTS * SAMPLES * 6:
            await asyncio.sleep(0.001)
        started = time.perf_counter()
        await made.commit_update()
        commit_s = time.perf_counter() - started
        samples = [
            (prompt, item)
            for prompt, group in zip(prompts, await asyncio.gather(*going), strict=True)
            for item in group
        ]
    finally:
        await made.close(grace_s=5)
    return _compare(samples, old, new) | {"commit_s": commit_s, "swap_s": made.health().swap_s}


def _prompts(folder: Path) -> list[list[int]]:
    from producers.data.tokenizer import Tokenizer

    rows = (ROOT / "runs" / "data" / f"{TASK}.jsonl").read_text().splitlines()[:PROMPTS]
    tokenizer = Tokenizer(folder, trust_remote_code=False)
    return [list(tokenizer.encode(json.loads(row)["prompt"])) for row in rows]


async def _ask(engine: Any, number: int, prompt: list[int]) -> list[Any]:
    import numpy as np

    from asyncrl.engine import GenRequest

    wanted = GenRequest(f"r{number}", np.asarray(prompt, dtype=np.int32), tuple(range(SAMPLES)), 7 + number, NEW)
    return [item async for item in engine.generate(wanted)]


async def _push(engine: Any, folder: Path, version: int, *, commit: bool = True) -> None:
    from asyncrl.wire import Manifest
    from weightsync.plan.buckets import TensorSpec, group_by_bucket, plan_buckets
    from weightsync.plan.digest import digest_tensors

    held = dict(_model(folder).named_parameters())
    raw = {name: value.detach().contiguous().flatten().numpy().view("uint8") for name, value in held.items()}
    plan = plan_buckets(
        [TensorSpec(name, "F32", tuple(value.shape)) for name, value in held.items()], bucket_bytes=1 << 20
    )
    digests, whole = digest_tensors(plan.tensors, lambda name: raw[name])
    await engine.begin_update(Manifest(version, plan.digest, plan.bucket_bytes, digests, whole), plan.tensors)
    for number, group in enumerate(group_by_bucket(plan.tensors, len(plan.bucket_bytes))):
        bucket = bytearray(plan.bucket_bytes[number])
        for tensor in group:
            bucket[tensor.offset : tensor.offset + tensor.nbytes] = raw[tensor.name].tobytes()
        await engine.apply_bucket(number, memoryview(bucket))
    if commit:
        await engine.commit_update()


def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def _compare(samples: list[Any], old: Path, new: Path) -> dict[str, float]:
    import numpy as np
    import torch

    from asyncrl.versions import expand

    models = [_model(old), _model(new)]
    gaps, moved, mixed = [], [], 0
    for prompt, item in samples:
        after = expand(item.runs) == 1
        if after.all() or not after.any():
            continue
        mixed += 1
        ids = torch.tensor([[*prompt, *item.token_ids.tolist()]])
        with torch.inference_mode():
            tables = [
                torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float(), -1) for model in models
            ]
        plain = [table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy() for table in tables]
        gaps.append(np.abs(plain[1] - item.logprobs)[after])
        moved.append(np.abs(plain[1] - plain[0])[after])
    every, apart = (np.concatenate(parts) if parts else np.zeros(1) for parts in (gaps, moved))
    return {
        "samples_of_both": mixed,
        "tokens_after": int(every.size),
        "gap_mean": float(every.mean()),
        "gap_p99": float(np.quantile(every, 0.99)),
        "gap_max": float(every.max()),
        "policies_apart_mean": float(apart.mean()),
    }


def gap_elsewhere(python: str, engine: str, kv: str, pair: tuple[Path, Path]) -> dict[str, float]:
    """`gap` in the engine's environment."""
    command = [python, str(Path(__file__).resolve()), "--gap", engine, kv, *map(str, pair)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{engine} {kv}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--python", default="", help="interpreter of vLLM's environment")
    parser.add_argument("--gap", nargs=4, metavar=("ENGINE", "KV", "OLD", "NEW"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kv_at_swap.json")
    args = parser.parse_args()
    if args.gap:
        engine, kv, old, new = args.gap
        print(json.dumps(gap(engine, kv, Path(old), Path(new))))
        return
    subprocess.run([sys.executable, "-m", "asyncrl", "demo", "--prepare-only"], cwd=ROOT, check=True, timeout=600)
    engines = {"hf": sys.executable} | ({"vllm": str(Path(args.python).absolute())} if args.python else {})
    folders = consecutive(max(PAIRS) + 1)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "gap": {},
        "runs": {},
    }
    for engine, python in engines.items():
        for kv in POLICIES:
            found = [gap_elsewhere(python, engine, kv, (folders[k], folders[k + 1])) for k in PAIRS]
            result["gap"][f"{engine}/{kv}"] = found
            print(engine, kv, found, flush=True)
    for _ in range(args.repeats):  # interleaved, so that a slow spell of the machine hits all
        for engine, python in engines.items():
            for kv in POLICIES:
                figures = whole_run(engine, kv, python, args.steps)
                result["runs"].setdefault(f"{engine}/{kv}", []).append(figures)
                print(engine, kv, {key: round(value, 4) for key, value in figures.items()}, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
