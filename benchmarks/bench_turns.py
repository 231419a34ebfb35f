"""Peak memory of a learner and an engine on one CPU: apart, and one after the other (`cluster.devices = "turns"`).

    python benchmarks/bench_turns.py [--width 768] [--layers 8]

Two whole runs of a few steps at a bound of 0 with the same seed. Every 20 ms the memory of both processes that is in no
file (`RssAnon`) is read and added; what the processes hold before their models are loaded is taken off. Writes
benchmarks/results/turns.json, with the digest of the exported weights of each run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "turns.json"
LOOK_S = 0.02
LIMIT_S = 1500
STEPS = 3
WAYS = {"apart": (), "turns": ("cluster.devices=turns",)}
MODEL = """
import sys
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model
folder, width, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tokenizer = make_tokenizer(folder)
sizes = dict(hidden_size=width, layers=layers, mlp_size=4 * width, heads=8, kv_heads=8, head_dim=width // 8)
save_model(folder, make_tiny_qwen3(len(tokenizer), **sizes))
"""


def roles(folder: Path) -> Iterator[tuple[str, int]]:
    """Role and pid of the processes of a run."""
    path = folder / "processes.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        found = json.loads(line)
        if found["role"] in ("learner", "producer"):
            yield found["role"], found["pid"]


def resident(pid: int) -> int:
    """Bytes of a process that are in no file; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) << 10
    except (OSError, IndexError):
        return 0


def measure(folder: Path, model: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    run = folder / "run"
    base = (
        f"run.dir={run}", "run.seed=1", f"model.path={model}", f"data.path={folder.parent}/prompts.jsonl",
        f"learner.steps={STEPS}",
        "buffer.max_staleness=0", "buffer.batch_groups=4", "sampling.group_size=4", "sampling.max_new_tokens=16",
        "producers.count=1", "producers.slots=16", "weightsync.in_place=true", "evaluation.every=0",
        "evaluation.at_start=false", "evaluation.at_end=false", "log.archive=false", "log.tensorboard=false",
        "learner.micro_batch_tokens=512", "learner.checkpoint_every=100",
        'reward=[{function="asyncrl.demo.tasks:add_reward"}]',
    )  # fmt: skip
    words = [word for setting in (*base, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", "configs/quickstart.toml", *words]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    peaks = {"learner": 0, "producer": 0, "both": 0}
    began = time.monotonic()
    while child.poll() is None:
        if time.monotonic() - began > LIMIT_S:
            child.terminate()
        now = {role: resident(pid) for role, pid in roles(run)}
        for name, size in (*now.items(), ("both", sum(now.values()))):
            peaks[name] = max(peaks[name], size)
        time.sleep(LOOK_S)
    if child.returncode:
        raise SystemExit((folder / "log").read_text()[-4000:])
    weights = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((run / "export").glob("*.safetensors"))))
    return {**peaks, "weights": weights.hexdigest(), "seconds": round(time.monotonic() - began, 1)}


def make_model(folder: Path, width: int, layers: int) -> Path:
    subprocess.run(
        [sys.executable, "-c", MODEL, str(folder), str(width), str(layers)], cwd=ROOT, check=True, timeout=300
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    found: dict[str, Any] = {"width": args.width, "layers": args.layers, "ways": {}}
    with tempfile.TemporaryDirectory() as scratch:
        rows = [{"prompt": f"{n + 10}+{n + 11}=", "reward_model": {"ground_truth": str(2 * n + 21)}} for n in range(64)]
        Path(scratch, "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        small, large = Path(scratch, "small"), Path(scratch, "large")
        idle = {}
        for name, model, settings in (
            ("idle", make_model(small, 64, 2), WAYS["apart"]),
            *((way, make_model(large, args.width, args.layers), settings) for way, settings in WAYS.items()),
        ):
            folder = Path(scratch, name)
            folder.mkdir()
            peaks = measure(folder, model, settings)
            print(name, peaks, flush=True)
            if name == "idle":
                idle = peaks
                continue
            sizes = {role: peaks[role] - idle[role] for role in ("learner", "producer", "both")}
            larger = max(sizes["learner"], sizes["producer"])
            found["ways"][name] = {
                "megabytes": {role: round(size / 1e6) for role, size in sizes.items()},
                "of_the_larger": round(sizes["both"] / larger, 3),
                "weights": peaks["weights"][:16],
                "seconds": peaks["seconds"],
            }
    found["same_weights"] = len({way["weights"] for way in found["ways"].values()}) == 1
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
