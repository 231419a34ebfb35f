"""The recipe: prompts and a random model, supervised pre-training, reinforcement learning at three bounds, and figures.

    python examples/reasoning/recipe.py prepare          # a minute
    python examples/reasoning/recipe.py sft              # 80 minutes on two busy cores
    python examples/reasoning/recipe.py rl --bounds 0 2 4 --seeds 3 --hours 2
    python examples/reasoning/recipe.py report           # benchmarks/results/reasoning.json, tables of docs/recipes.md

`make recipe-reasoning` runs all four. Each stage continues where it stopped: a complete run is not repeated, and a run
that was stopped resumes from its checkpoint. `--hours` stops `rl` after that time.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "examples" / "reasoning"
RUNS = ROOT / "runs" / "reasoning"
RESULTS = ROOT / "benchmarks" / "results" / "reasoning.json"
LOGS = RESULTS.with_suffix("")  # a log of each run
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- tables of the reasoning recipe -->", "<!-- end of the tables -->"
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "benchmarks")]

import problems  # noqa: E402, RUF100
from intervals import interval  # noqa: E402, RUF100

from asyncrl.config import load  # noqa: E402, RUF100
from asyncrl.config.mode import derive_steps  # noqa: E402, RUF100
from asyncrl.demo.tasks import write_jsonl  # noqa: E402, RUF100
from asyncrl.metrics import drop_repeated_steps, read_lines  # noqa: E402, RUF100
from asyncrl.monitor.samples import group_by_step  # noqa: E402, RUF100
from asyncrl.preflight.files import count_rows  # noqa: E402, RUF100
from asyncrl.runtime.run_dir import RunDir, read_object  # noqa: E402, RUF100

DEMONSTRATIONS, TRAIN, HELD_OUT = 96_000, 20_000, 500
NOISE = 0.06  # of the teacher, per character
#: About 10 million parameters.
SIZES: dict[str, Any] = {"hidden_size": 320, "layers": 8, "heads": 10, "kv_heads": 5, "head_dim": 32, "mlp_size": 960}
STOP_S = 120.0  # for a stopped run to write its checkpoint
AUDIT_S = 300.0
CURVES = ("reward_mean", "lag_mean", "entropy", "grad_norm", "ess", "response_length_mean", "step_s")
SAMPLED_STEPS = 10  # the last ones, of which `report` keeps the best and the worst sample


def prepare(args: argparse.Namespace) -> None:
    """Rows, and a model with random weights."""
    from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

    RUNS.mkdir(parents=True, exist_ok=True)
    tokens = len(SPECIAL_TOKENS) + len(problems.CHARACTERS) + len(problems.WORDS)
    make_tokenizer(RUNS / "start", characters=problems.CHARACTERS, words=problems.WORDS)
    save_model(RUNS / "start", make_tiny_qwen3(tokens, seed=0, **SIZES))
    write_jsonl(RUNS / "demonstrations.jsonl", problems.demonstration_rows(args.demonstrations, 0, noise=NOISE))
    write_jsonl(RUNS / "train.jsonl", problems.rows(TRAIN, 0))
    write_jsonl(RUNS / "heldout.jsonl", problems.rows(HELD_OUT, 0, split="heldout"))


def sft(_: argparse.Namespace) -> None:
    """Pre-training; `runs/reasoning/sft/export` is the start of every run of reinforcement learning."""
    if not is_complete(RUNS / "sft"):
        launch("sft.toml", [], until=None)


def rl(args: argparse.Namespace) -> None:
    """One run for each bound and seed, seeds first, so that a stop leaves the bounds comparable."""
    until = time.monotonic() + 3600 * args.hours if args.hours else None
    for seed in range(args.seeds):
        for bound in args.bounds:
            folder = run_folder(bound, seed)
            if is_complete(folder):
                continue
            if until is not None and time.monotonic() >= until:
                return
            launch("rl.toml", [f"run.dir={folder}", f"run.seed={seed}", f"buffer.max_staleness={bound}"], until=until)


def run_folder(bound: int, seed: int) -> Path:
    return RUNS / f"rl-bound{bound}-seed{seed}"


def is_complete(folder: Path) -> bool:
    """Whether a run has ended with its last step, and exported those weights. An export alone may be of fewer steps."""
    result = read_object(RunDir(folder).result)
    return bool(result.get("done")) and result["steps"] >= wanted_steps(folder)


def wanted_steps(folder: Path) -> int:
    """The steps of a run by its configuration; of pre-training, by the demonstrations that there are."""
    config = load(HERE / ("sft.toml" if folder.name == "sft" else "rl.toml"))
    rows = count_rows(RUNS / "demonstrations.jsonl")
    return derive_steps(config, rows).learner.steps if rows else config.learner.steps


def launch(file: str, settings: list[str], *, until: float | None) -> None:
    """A run, or the rest of it; stopped at `until` with a checkpoint. Raises SystemExit if it fails."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", str(HERE / file), *words]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            code = process.wait(None if until is None else max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)
            return
    if code:
        raise SystemExit(code)


def report(_: argparse.Namespace) -> None:
    """Writes figures and a log of every complete run in `runs/reasoning`, and the tables. Runs in the results file that
    were made elsewhere stay if they began with the same weights."""
    folders = sorted(RUNS.glob("rl-bound*-seed*"))
    for folder in folders:
        if not is_complete(folder):
            print(f"{folder.name}: left out, it is not complete")
    found = [read_run(folder) for folder in folders if is_complete(folder)]
    if not found:
        print(f"no run in {RUNS} is complete: {RESULTS.name} stays as it is; `recipe.py rl` goes on with them")
        return
    names, starts = {run["run"] for run in found}, {run["digests"]["0"] for run in found}
    known = [run for run in json.loads(RESULTS.read_text()) if run["run"] not in names] if RESULTS.exists() else []
    kept = [run for run in known if run.get("digests", {}).get("0") in starts]
    runs = sorted([*found, *kept], key=lambda run: str(run["run"]))
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    for folder in (RUNS / "sft", *folders):
        if is_complete(folder):
            write_log(folder)
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{tables(runs)}\n{END}{rest.split(END)[1]}")
    for run in known:
        if run not in kept:
            (LOGS / f"{run['run']}.log").unlink(missing_ok=True)
            print(f"{run['run']}: left out, it began with other weights than the runs in {RUNS}")
    for run in found:
        print(
            f"{run['run']}: {run['steps']} steps, {run['hours']} h, held-out reward by version {run['held_out']['all']}"
        )


def read_run(folder: Path) -> dict[str, Any]:
    """The figures of a run: held-out reward by version and kind of problem, digests of the first and last weights,
    curves, the best and worst samples of the last steps, and whether the audit found the run correct."""
    evaluations = read_lines(folder / "metrics" / "evaluation.jsonl")
    steps = drop_repeated_steps(read_lines(folder / "metrics" / "learner.jsonl"))
    weights = read_lines(folder / "metrics" / "weightsync.jsonl")
    digests = {one["version"]: one["digest"] for one in weights if one["state"] == "committed"}
    by_step = group_by_step(read_lines(folder / "samples.jsonl"))
    samples = [one for step in range(len(steps) - SAMPLED_STEPS + 1, len(steps) + 1) for one in by_step.get(step, ())]
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(folder)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        timeout=AUDIT_S,
        check=False,
    )
    assert all(one["evaluation_version_min"] == one["evaluation_version_max"] for one in evaluations), folder
    return {
        "run": folder.name,
        "held_out": {source: rewards_of_source(evaluations, source) for source in ("all", *problems.KINDS)},
        "steps": len(steps),
        "tokens": sum(line["tokens"] for line in steps),
        "lag_mean": round(sum(line["lag_mean"] for line in steps) / max(1, len(steps)), 3),
        "hours": round(sum(line["step_s"] for line in steps) / 3600, 3),
        "audit": "OK" if audit.returncode == 0 else "wrong",
        "digests": {str(version): digests.get(version, "") for version in (0, len(steps))},
        "curves": {name: means(line[name] for line in steps) for name in CURVES},
        "samples": [{name: one[name] for name in ("step", "lag", "prompt", "response", "reward")} for one in samples],
    }


def write_log(folder: Path) -> None:
    """What the learner said of each step and evaluation. After a stop it says the earlier evaluations again."""
    LOGS.mkdir(exist_ok=True)
    said = (folder / "logs" / "learner.log").read_text().splitlines()
    kept = dict.fromkeys(line for line in said if line.startswith(("step ", "learner: evaluation of")))
    (LOGS / f"{folder.name}.log").write_text("\n".join(kept) + "\n")


def tables(runs: list[dict[str, Any]]) -> str:
    """Held-out reward by bound and version, means over seeds; then each run, by kind of problem at its last version."""
    by_bound: dict[int, dict[int, dict[str, Any]]] = {}
    for run in runs:
        bound, seed = map(int, re.findall(r"\d+", run["run"]))
        by_bound.setdefault(bound, {})[seed] = run
    heads = [f"bound {bound}, {len(of)} seed{'s' if len(of) > 1 else ''}" for bound, of in by_bound.items()]
    lines = [*table_head("version", *heads)]
    for version in min((run["held_out"]["all"] for run in runs), key=len):
        rewards = (statistics.fmean(run["held_out"]["all"][version] for run in of.values()) for of in by_bound.values())
        lines.append(f"| {version} | {' | '.join(f'{reward:.3f}' for reward in rewards)} |")
    fresh = by_bound.get(0, {})
    pairs = [
        [last(of[seed]) - last(fresh[seed]) for seed in of if bound and seed in fresh] for bound, of in by_bound.items()
    ]
    lines += [f"| last, less bound 0 | {' | '.join(map(interval, pairs))} |", ""]
    lines += table_head(
        "bound", "seed", "mean lag", "tokens trained", "held out", *problems.KINDS, "audit", "last weights"
    )
    before = [statistics.fmean(run["held_out"][kind]["0"] for run in runs) for kind in ("all", *problems.KINDS)]
    lines.append(f"| before | | | | {' | '.join(f'{reward:.3f}' for reward in before)} | | |")
    for bound, of in by_bound.items():
        for seed, run in of.items():
            rewards = (f"{last(run, kind):.3f}" for kind in ("all", *problems.KINDS))
            digest = run["digests"][str(run["steps"])][:8]
            lines.append(
                f"| {bound} | {seed} | {run['lag_mean']:.2f} | {run['tokens'] / 1e6:.2f} M | {' | '.join(rewards)} | "
                f"{run['audit']} | `{digest}` |"
            )
    return "\n".join(lines) + "\n"


def table_head(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]


def last(run: dict[str, Any], kind: str = "all") -> float:
    """Held-out reward of the last version."""
    return float(list(run["held_out"][kind].values())[-1])


def means(values: Iterable[float]) -> list[float]:
    """Of every ten values in a row."""
    all_values = list(values)
    return [round(statistics.fmean(all_values[at : at + 10]), 5) for at in range(0, len(all_values), 10)]


def rewards_of_source(evaluations: list[dict[str, Any]], source: str) -> dict[str, float]:
    """Version -> mean reward of one sample for each held-out prompt of the source."""
    name = f"val-core/{source}/reward/mean@1"
    return {str(int(one["evaluation_version"])): round(one[name], 4) for one in evaluations if name in one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", default=["prepare", "sft", "rl", "report"], help="all without any")
    parser.add_argument("--demonstrations", type=int, default=DEMONSTRATIONS, help="of `prepare`")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=0.0, help="of `rl`; 0: until it is complete")
    args = parser.parse_args()
    for stage in args.stages:
        {"prepare": prepare, "sft": sft, "rl": rl, "report": report}[stage](args)


if __name__ == "__main__":
    main()
