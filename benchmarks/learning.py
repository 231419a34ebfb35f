"""Do the algorithms learn? Reward curves of the presets, of bounds against corrections, and of the learner's back-ends
and layouts, on the demo's tasks.

    python benchmarks/learning.py presets [--seeds 1] [--steps 40] [--task running_sum] [--only dapo,ppo]
    python benchmarks/learning.py staleness --seeds 3 [--steps 40]
    python benchmarks/learning.py layouts --seeds 2 [--only "one process;FSDP2 on 2 ranks"]
    python benchmarks/learning.py table

Every run is a whole one: `asyncrl launch all configs/quickstart.toml --preset NAME` with its processes, then the audit.
Runs that stand in the results file already are not repeated (`--again` does); a run that ends with an error is kept as
such. Writes benchmarks/results/learning.json after every run; `table` writes docs/learning.md from it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
PAGE = ROOT / "docs" / "learning.md"
BOUNDS = (0, 1, 2, 4, 8)
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "decoupled PPO": (),
    "TIS": ('learner.algorithm.loss="reinforce"', 'learner.algorithm.correction="tis"'),
    "none": ('learner.algorithm.loss="ppo"', 'learner.algorithm.correction="none"'),
}
#: Back-ends and layouts of the learner that are compared with one process.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "FSDP2 on 2 ranks": ("learner.ranks=2",),
    "FSDP2, tensor parallel 2": ("learner.ranks=2", "learner.parallel.tensor=2"),
    "LoRA of rank 8, one process": ("learner.lora.rank=8", "learner.optim.lr=5e-4"),
    "Megatron, tensor parallel 2": ("learner.backend=megatron", "learner.ranks=2", "learner.parallel.tensor=2"),
    "Megatron, pipeline 2": ("learner.backend=megatron", "learner.ranks=2", "learner.parallel.pipeline=2"),
}
#: What a preset needs beside itself to learn in 40 steps at this size; said in the table.
EXTRA: dict[str, tuple[str, ...]] = {
    "ppo": ("learner.critic.lr=1e-3", "learner.critic.critic_warmup=2"),
    # alpha: lambda = 1 - 1 / (alpha * length) is 0 for the paper's 0.05 and answers of up to 20 tokens, as these are.
    "vapo": (
        "learner.critic.lr=1e-3",
        "learner.critic.critic_warmup=2",
        "learner.algorithm.advantage_options.alpha=1.0",
    ),
    "prime": ("learner.process_reward.lr=1e-4",),
}


def prepare(task: str) -> None:
    """Model and prompts of the demo (made once)."""
    command = [sys.executable, "-m", "asyncrl", "demo", "--task", task, "--prepare-only"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)


def train(task: str, words: list[str], settings: tuple[str, ...], *, steps: int, seed: int) -> dict[str, Any]:
    """One run: its reward curve and the audit's word."""
    folder = ROOT / "runs" / f"learning-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    base = (
        f"run.dir={folder}", f"run.seed={seed}", f"learner.steps={steps}", f"model.path=runs/models/{task}",
        f"data.path=runs/data/{task}.jsonl", "log.tensorboard=false", "log.archive=false",
        "evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false",
        "learner.checkpoint_every=1000", f'reward=[{{function="asyncrl.demo.tasks:{task}_reward"}}]',
    )  # fmt: skip
    options = [word for setting in (*base, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", "configs/quickstart.toml", *words, *options]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    metrics = folder / "metrics" / "learner.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(folder)], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    rewards = [round(float(line["reward_mean"]), 4) for line in lines]
    values = [line.get(name, 0.0) for line in lines for name in ("loss", "grad_norm", "entropy")]
    return {
        "settings": [*words, *settings],
        "seed": seed,
        "steps": len(lines),
        "code": done.returncode,
        "audit": audit.returncode,
        "finite": all(math.isfinite(value) for value in values),
        "rewards": rewards,
        "first5": round(statistics.fmean(rewards[:5]), 4) if rewards else 0.0,
        "last5": round(statistics.fmean(rewards[-5:]), 4) if rewards else 0.0,
        "lag_mean": round(statistics.fmean(line["lag_mean"] for line in lines), 3) if lines else 0.0,
        "ess": round(statistics.fmean(line.get("ess", 1.0) for line in lines), 4) if lines else 0.0,
        "seconds": round(time.monotonic() - began, 1),
        "error": "" if done.returncode == 0 else done.stdout[-600:],
    }


def known() -> dict[str, Any]:
    """What was measured so far: run name -> result."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def measure(name: str, args: argparse.Namespace, words: list[str], settings: tuple[str, ...], seed: int) -> None:
    """One run, unless it is known; written at once."""
    found = known()
    if name in found and not args.again:
        return
    found[name] = train(args.task, words, settings, steps=args.steps, seed=seed)
    RESULTS.write_text(
        json.dumps(dict(sorted(found.items())), indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n"
    )
    told = {key: found[name][key] for key in ("first5", "last5", "lag_mean", "code", "audit", "finite", "seconds")}
    print(name, told, flush=True)


def presets(args: argparse.Namespace) -> None:
    """Every preset with every seed."""
    names = sorted(path.stem for path in (ROOT / "configs" / "presets").glob("*.toml"))
    wanted = args.only.split(",") if args.only else names
    for seed in range(args.seeds):
        for preset in wanted:
            words = ["--preset", preset]
            measure(f"{args.task}/{preset}/{seed}", args, words, EXTRA.get(preset, ()), seed)


def staleness(args: argparse.Namespace) -> None:
    """Bounds against corrections, interleaved."""
    for seed in range(args.seeds):
        for bound in BOUNDS:
            for correction, settings in CORRECTIONS.items():
                name = f"{args.task}/bound {bound}/{correction}/{seed}"
                measure(name, args, [], (f"buffer.max_staleness={bound}", *settings), seed)


def layouts(args: argparse.Namespace) -> None:
    """Back-ends and layouts, interleaved."""
    wanted = args.only.split(";") if args.only else LAYOUTS
    for seed in range(args.seeds):
        for name in wanted:
            measure(f"{args.task}/layout/{name}/{seed}", args, [], LAYOUTS[name], seed)


def table(_: argparse.Namespace) -> None:
    """docs/learning.md: the tables and curves; what they say stands above them, by hand."""
    named = [(name.split("/"), run) for name, run in known().items()]
    runs = [(name, run) for name, run in named if name[1] != "layout"]
    split: dict[str, list[dict[str, Any]]] = {}
    for name, run in named:
        if name[1] == "layout":
            split.setdefault(name[2], []).append(run)
    single = {tuple(name): run for name, run in runs if len(name) == 3}
    swept: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, run in runs:
        if len(name) == 4:
            swept.setdefault(name[1], {}).setdefault(name[2], []).append(run)
    lines = [*preset_rows(single), "", *sweep_rows(swept), "", *layout_rows(split)]
    text = PAGE.read_text() if PAGE.exists() else "# What the algorithms learn\n"
    head = text.split("<!-- tables -->")[0].rstrip()
    PAGE.write_text(head + "\n\n<!-- tables -->\n\n" + "\n".join(lines) + "\n")
    draw(
        PAGE.with_name("learning-presets.png"),
        columns=5,
        panels={preset: [("", run["rewards"])] for (_task, preset, _seed), run in sorted(single.items())},
    )
    draw(
        PAGE.with_name("learning-staleness.png"),
        columns=len(CORRECTIONS),
        panels={
            f"{bound}, {correction}": [(f"seed {run['seed']}", run["rewards"]) for run in swept[bound][correction]]
            for bound in sorted(swept)
            for correction in CORRECTIONS
            if correction in swept[bound]
        },
    )


def preset_rows(single: dict[tuple[str, ...], dict[str, Any]]) -> list[str]:
    """The table of the presets."""
    lines = [
        "| preset | seed | reward, first 5 -> last 5 steps | steps | mean lag | finite, audit | also set |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (_task, preset, seed), run in sorted(single.items()):
        extra = ", ".join(f"`{setting}`" for setting in run["settings"][2:])
        sound = f"{'yes' if run['finite'] else 'NO'}, {'OK' if run['audit'] == 0 and run['code'] == 0 else 'NOT OK'}"
        lines.append(
            f"| {preset} | {seed} | {run['first5']:.3f} -> {run['last5']:.3f} | {run['steps']} | "
            f"{run['lag_mean']:.2f} | {sound} | {extra} |"
        )
    return lines


def sweep_rows(swept: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """The table of bounds against corrections: last 5 and middle steps, the seeds in turn, then their mean."""
    lines = [f"| bound | mean lag | {' | '.join(CORRECTIONS)} |", "| --- " * (2 + len(CORRECTIONS)) + "|"]
    for bound, found in sorted(swept.items()):
        lag = statistics.fmean(run["lag_mean"] for runs in found.values() for run in runs)
        cells = []
        for correction in CORRECTIONS:
            last = [run["last5"] for run in found.get(correction, [])]
            middle = [statistics.fmean(run["rewards"][15:25]) for run in found.get(correction, [])]
            means = f"; mean {statistics.fmean(last):.3f}, steps 16-25 {statistics.fmean(middle):.3f}" if last else ""
            cells.append(" ".join(f"{value:.3f}" for value in last) + means)
        lines.append(f"| {bound.removeprefix('bound ')} | {lag:.2f} | {' | '.join(cells)} |")
    return lines


def layout_rows(split: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table of back-ends and layouts: seeds in turn, and how far the curve is from one process's mean of seeds."""
    lines = [
        "| learner | reward, last 5 steps, per seed | steps 16-25, per seed | distance to one process | audit |",
        "| --- | --- | --- | --- | --- |",
    ]
    alone = [run["rewards"] for run in split.get("one process", [])]
    means = [statistics.fmean(values) for values in zip(*alone, strict=True)]
    for name in (name for name in LAYOUTS if name in split):
        found = split[name]
        last = " ".join(f"{run['last5']:.3f}" for run in found)
        middle = " ".join(f"{statistics.fmean(run['rewards'][15:25]):.3f}" for run in found)
        apart = " ".join(
            f"{statistics.fmean(abs(one - mean) for one, mean in zip(run['rewards'], means, strict=False)):.3f}"
            for run in found
        )
        sound = "OK" if all(run["audit"] == run["code"] == 0 and run["finite"] for run in found) else "NOT OK"
        lines.append(f"| {name} | {last} | {middle} | {apart} | {sound} |")
    return lines


def draw(path: Path, *, panels: dict[str, list[tuple[str, list[float]]]], columns: int) -> None:
    """Reward over steps, one panel each, all on one scale. Needs matplotlib (`pip install asyncrl[bench]`)."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2.4 * columns, 1.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        axis.set_axis_on()
        axis.set_title(title, fontsize=8)
        axis.set_ylim(0, 1)
        axis.grid(visible=True, linewidth=0.3)
        axis.tick_params(labelsize=6)
        for label, rewards in curves:
            axis.plot(range(1, len(rewards) + 1), rewards, linewidth=1, label=label)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("mean reward", fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("presets", "staleness", "layouts", "table"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--task", default="running_sum")
    parser.add_argument("--only", default="", help="presets with commas between them, layouts with semicolons")
    parser.add_argument("--again", action="store_true", help="measure what is known too")
    args = parser.parse_args()
    if args.what != "table":
        prepare(args.task)
    {"presets": presets, "staleness": staleness, "layouts": layouts, "table": table}[args.what](args)


if __name__ == "__main__":
    main()
