"""What bounds, corrections, updates per batch and presets do to learning: held-out reward of fixed weights, by seeds.

    python benchmarks/learning.py ages [--task running_sum] [--seeds 8] [--ages 0 1 2 4 8 16] [--ways default ...]
    python benchmarks/learning.py averages [--seeds 8] [--ages 0 4 8]
    python benchmarks/learning.py presets [--task running_sum] [--seeds 8] [--only dapo,ppo]
    python benchmarks/learning.py bounds [--seeds 3]
    python benchmarks/learning.py full_pipeline [--ages 8] [--ways default "sequence ratio"] [--seeds 3]
    python benchmarks/learning.py layouts --seeds 2 [--only "one process;FSDP2 on 2 ranks"]
    python benchmarks/learning.py table

- `averages` are runs like those of `ages`, in the default way: the figures are of averages of the weights;
- `ages` and `presets` train on samples of an exact age (benchmarks/exact_age.py): equal seeds have equal prompts and
  random numbers, so ways are compared in pairs, and the load of the machine changes nothing;
- `bounds` are whole runs through all processes, `asyncrl launch all configs/quickstart.toml`, at `buffer.max_staleness`
  of 0, 1, 2, 4, 8 and 16 and otherwise default settings; the exported weights answer the same held-out prompts;
- `full_pipeline` are whole runs with `buffer.pipeline_depth = "max"`: samples are about as old as the bound (`--ages`);
- `layouts` are whole runs too, with the learner's back-ends and layouts.

Runs that stand in benchmarks/results/learning.json are not repeated (`--again` does), so a sweep can be stopped at any
time. `--minutes` starts no run after that time. `table` writes the tables of docs/learning.md.
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

import exact_age  # noqa: E402, RUF100
from intervals import interval  # noqa: E402, RUF100

from asyncrl.demo.demo import task_settings  # noqa: E402, RUF100

RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
PAGE = ROOT / "docs" / "learning.md"
AGES = (0, 1, 2, 4, 8, 16)
STEPS, LOOK_EVERY = 40, 20
_ALGORITHM = "learner.algorithm."
#: Ways to train on old samples: name -> settings.
WAYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "no correction": (f'{_ALGORITHM}loss="ppo"', f'{_ALGORITHM}correction="none"'),
    "4 updates": (f"{_ALGORITHM}minibatches=4",),
    "16 updates": (f"{_ALGORITHM}minibatches=16",),
    "clip against behaviour": (f"{_ALGORITHM}clip_against=behaviour",),
    "geometric mean": (f'{_ALGORITHM}correction_options={{level="geometric"}}',),
    "sequence ratio": (f'{_ALGORITHM}correction_options={{level="sequence"}}',),
    "IcePop": (f"{_ALGORITHM}correction=icepop",),
    "second moment (M2PO)": (f"{_ALGORITHM}correction=m2po",),
    "preset very_stale": ("learner.algorithm.preset=very_stale",),
    "no momentum": ("learner.optim.beta1=0.0",),
    "momentum 0.5": ("learner.optim.beta1=0.5",),
    "linear decay": ("learner.optim.schedule=linear",),
    "half the learning rate": ("learner.optim.lr=5e-5",),
    "warm-up of 16 steps": ("learner.optim.warmup_steps=16",),
}
WHOLE_BOUNDS = (0, 1, 2, 4, 8, 16)
BUSY = "busy bounds"  # like `bounds`, while the machine did other work
EARLIER = "deeper bounds"  # runs in which `pipeline_depth = "auto"` began at two (ADR 28), and from other start weights
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


def run_whole(task: str, settings: tuple[str, ...], *, steps: int, seed: int) -> dict[str, Any]:
    """A run through all processes: its reward curve, lag, held-out reward of the exported weights, and the audit."""
    folder = ROOT / "runs" / f"learning-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    base = (
        *task_settings(task), f"run.dir={folder}", f"run.seed={seed}", f"learner.steps={steps}",
        "log.tensorboard=false", "log.archive=false", "evaluation.every=0", "evaluation.at_start=false",
        "evaluation.at_end=false", "learner.checkpoint_every=1000",
    )  # fmt: skip
    options = [word for setting in (*base, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", "configs/quickstart.toml", *options]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200, check=False)
    metrics = folder / "metrics" / "learner.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(folder)], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    rewards = [round(float(line["reward_mean"]), 4) for line in lines]
    values = [line.get(name, 0.0) for line in lines for name in ("loss", "grad_norm", "entropy")]
    return {
        "settings": list(settings),
        "seed": seed,
        "steps": len(lines),
        "code": done.returncode,
        "audit": audit.returncode,
        "finite": all(math.isfinite(value) for value in values),
        "rewards": rewards,
        "last5": round(statistics.fmean(rewards[-5:]), 4) if rewards else 0.0,
        "lag_mean": round(statistics.fmean(line["lag_mean"] for line in lines), 3) if lines else 0.0,
        "lag_max": max((line["lag_max"] for line in lines), default=0),
        "held_out": {str(steps): run_in_child(exact_age.held_out_reward, str(folder / "export"), task, seed)},
        "seconds": round(time.monotonic() - began, 1),
        "error": "" if done.returncode == 0 else done.stdout[-600:],
    }


def run_in_child(function: Any, *given: Any) -> Any:
    """The result of a function in a process of its own, which ends with its torch."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(function, *given).result()


# ---------------------------------------------------------------- what was measured


def known() -> dict[str, Any]:
    """What was measured so far: run name -> result."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(name: str, result: dict[str, Any]) -> None:
    """Write a result at once."""
    found = {**known(), name: result}
    text = json.dumps(dict(sorted(found.items())), separators=(",", ":")).replace('},"', '},\n"')
    RESULTS.write_text(text + "\n")
    print(name, result["held_out"], f"{result['seconds']} s", flush=True)


def train_at_ages(cells: Iterable[tuple[str, int, str, tuple[str, ...], int]], args: argparse.Namespace) -> None:
    """Runs of an exact age, two side by side: (kind, age, way, settings, seed)."""
    until = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    missing = [cell for cell in cells if args.again or run_name(args.task, *cell) not in known()]
    with ProcessPoolExecutor(args.workers) as pool:
        waiting = {pool.submit(_train_cell, args.task, cell, until): cell for cell in missing}
        for one in as_completed(waiting):
            name = run_name(args.task, *waiting[one])
            if isinstance(error := one.exception(), RuntimeError):
                print(f"{name}: {error}", flush=True)
            elif (result := one.result()) is not None:
                keep(name, result)


def _train_cell(task: str, cell: tuple[str, int, str, tuple[str, ...], int], until: float) -> dict[str, Any] | None:
    kind, age, _way, settings, seed = cell
    if time.monotonic() > until:
        return None
    decays = exact_age.AVERAGES if kind == "averages" else ()
    return exact_age.measure(
        task, list(settings), age=age, seed=seed, steps=STEPS, look_every=LOOK_EVERY, decays=decays
    )


def run_name(task: str, kind: str, age: int, way: str, _settings: tuple[str, ...], seed: int) -> str:
    return f"{kind}/{task}/{way}/{age}/{seed}"


def ages(args: argparse.Namespace) -> None:
    """Ages against ways, seed by seed."""
    train_at_ages(
        (
            ("ages", age, way, WAYS[way], seed)
            for seed in range(args.first_seed, args.first_seed + args.seeds)
            for way in args.ways
            for age in args.ages
        ),
        args,
    )


def averages(args: argparse.Namespace) -> None:
    """Ages, seed by seed."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    train_at_ages((("averages", age, "default", (), seed) for seed in seeds for age in args.ages), args)


def presets(args: argparse.Namespace) -> None:
    """Every preset with every seed, on samples of age 2; but `spin`, which trains on answers of the data too."""
    names = sorted({path.stem for path in (ROOT / "configs" / "presets").glob("*.toml")} - {"spin"})
    train_at_ages(
        (
            ("presets", 2, preset, (f"learner.algorithm.preset={preset}", *EXTRA.get(preset, ())), seed)
            for seed in range(args.first_seed, args.first_seed + args.seeds)
            for preset in (args.only.split(",") if args.only else names)
        ),
        args,
    )


def bounds(args: argparse.Namespace) -> None:
    """Whole runs at several bounds, interleaved."""
    cells = [(bound, seed) for seed in range(args.seeds) for bound in WHOLE_BOUNDS]
    for bound, seed in cells:
        name = f"bounds/{args.task}/{bound}/{seed}"
        if args.again or name not in known():
            keep(name, run_whole(args.task, (f"buffer.max_staleness={bound}",), steps=STEPS, seed=seed))


def full_pipeline(args: argparse.Namespace) -> None:
    """Whole runs with as much work in flight as the bound allows, so that samples are old, in several ways."""
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for bound in args.ages:
            for way in args.ways:
                name = f"full pipeline/{args.task}/{way}/{bound}/{seed}"
                if args.again or name not in known():
                    deep = (f"buffer.max_staleness={bound}", "buffer.pipeline_depth=max")
                    keep(name, run_whole(args.task, (*deep, *WAYS[way]), steps=STEPS, seed=seed))


def layouts(args: argparse.Namespace) -> None:
    """Back-ends and layouts, interleaved."""
    wanted = args.only.split(";") if args.only else LAYOUTS
    for seed in range(args.seeds):
        for layout in wanted:
            name = f"layouts/{args.task}/{layout}/{seed}"
            if args.again or name not in known():
                keep(name, run_whole(args.task, LAYOUTS[layout], steps=STEPS, seed=seed))


# ---------------------------------------------------------------- tables


def table(_: argparse.Namespace) -> None:
    """docs/learning.md: the tables; what they say stands above them, by hand."""
    runs: dict[str, list[tuple[list[str], dict[str, Any]]]] = {}
    for name, run in known().items():
        kind, *rest = name.split("/")
        runs.setdefault(kind, []).append((rest, run))
    lines: list[str] = []
    for task in sorted({rest[0] for rest, _ in runs.get("ages", [])}):
        cells = {(way, int(age), int(seed)): run for (of, way, age, seed), run in runs["ages"] if of == task}
        lines += [f"### Samples of an exact age: `{task}`", "", *age_rows(cells), ""]
    if "averages" in runs:
        lines += ["### Averages of the weights, on samples of an exact age", "", *average_rows(runs["averages"]), ""]
    if "bounds" in runs:
        lines += ["### Whole runs", "", *bound_rows(runs["bounds"]), ""]
    if BUSY in runs:
        synchronous_runs = [(rest, run) for rest, run in runs["bounds"] if rest[:2] == ["running_sum", "0"]]
        rows = bound_rows([*synchronous_runs, *runs[BUSY]])
        lines += ["### Whole runs, while the machine did other work", "", *rows, ""]
    if "full pipeline" in runs:
        synchronous = {(task, int(seed)): run for (task, bound, seed), run in runs["bounds"] if bound == "0"}
        rows = full_pipeline_rows(runs["full pipeline"], synchronous=synchronous)
        lines += ["### Whole runs with a full pipeline", "", *rows, ""]
    if EARLIER in runs:
        lines += ["### Whole runs with the earlier rule of the depth", "", *bound_rows(runs[EARLIER]), ""]
    for task in sorted({rest[0] for rest, _ in runs.get("presets", [])}):
        of_task = {(preset, int(seed)): run for (of, preset, _, seed), run in runs["presets"] if of == task}
        lines += [f"### Presets: `{task}`", "", *preset_rows(of_task), ""]
    if "layouts" in runs:
        lines += ["### Back-ends and layouts", "", *layout_rows(runs["layouts"]), ""]
    head = PAGE.read_text().split("<!-- tables -->")[0].rstrip()
    PAGE.write_text(head + "\n\n<!-- tables -->\n\n" + "\n".join(lines).rstrip() + "\n")


Cells = dict[tuple[str, int, int], dict[str, Any]]


def age_rows(cells: Cells) -> list[str]:
    """Rows: way and age. Columns: held-out reward at half and at all of the steps, at equal tokens, and the differences
    to the same seeds of the default way, at age 0 and at the same age."""
    budget = min(sum(run["tokens"]) for run in cells.values())
    lines = [
        f"| way | age | seeds | after {STEPS // 2} steps | after {STEPS} steps | after {budget:,} tokens | "
        "difference to default, age 0 | difference to default, same age |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way in WAYS:
        for age in sorted({age for name, age, _ in cells if name == way}):
            mine = {seed: run for (name, at, seed), run in cells.items() if (name, at) == (way, age)}
            columns = [
                [run["held_out"][str(STEPS // 2)] for run in mine.values()],
                [last(run) for run in mine.values()],
                [reward_at_tokens(run, budget) for run in mine.values()],
            ]
            said = " | ".join(f"{statistics.fmean(column):.3f}" for column in columns)
            fresh, same = (interval(list(paired(mine, cells, at))) for at in (0, age))
            lines.append(f"| {way} | {age} | {len(mine)} | {said} | {fresh} | {same if way != 'default' else '-'} |")
    return lines


def paired(runs: dict[int, dict[str, Any]], cells: Cells, age: int) -> Iterator[float]:
    """Last held-out reward less that of the default way at this age, by equal seeds."""
    for seed, run in runs.items():
        if ("default", age, seed) in cells:
            yield last(run) - last(cells["default", age, seed])


def last(run: dict[str, Any]) -> float:
    return float(run["held_out"][str(STEPS)])


def reward_at_tokens(run: dict[str, Any], budget: int) -> float:
    """Held-out reward after this many trained tokens, between the two nearest looks."""
    looks = sorted((int(version), value) for version, value in run["held_out"].items())
    before = (0, looks[0][1])
    for version, value in looks:
        spent = sum(run["tokens"][:version])
        if spent >= budget and spent > before[0]:
            return float(before[1] + (value - before[1]) * (budget - before[0]) / (spent - before[0]))
        before = (spent, value)
    return float(looks[-1][1])


def average_rows(runs: list[tuple[list[str], dict[str, Any]]]) -> list[str]:
    """Held-out reward after all steps by age: of the last weights, and of averages of all versions."""
    decays = [f"average, {decay} a step" for decay in exact_age.AVERAGES]
    lines = [
        f"| task | age | seeds | last weights | {' | '.join(decays)} | {decays[-1]}, less the last weights |",
        "| --- " * (5 + len(decays)) + "|",
    ]
    cells: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for (task, _, age, _), run in runs:
        cells.setdefault((task, int(age)), []).append(run)
    for (task, age), mine in sorted(cells.items()):
        ways = [[last(run) for run in mine]]
        ways += [[run["averaged"][str(decay)] for run in mine] for decay in exact_age.AVERAGES]
        said = " | ".join(f"{statistics.fmean(way):.3f}" for way in ways)
        differences = [after - before for before, after in zip(ways[0], ways[-1], strict=True)]
        lines.append(f"| `{task}` | {age} | {len(mine)} | {said} | {interval(differences)} |")
    return lines


def bound_rows(runs: list[tuple[list[str], dict[str, Any]]]) -> list[str]:
    """Whole runs by task and bound; bounds that no sample reached are one experiment, and have a line together too.
    Runs of one seed have the same prompts, not the same random numbers."""
    lines = [
        "| task | bound | seeds | mean lag | largest lag | held-out reward | difference to bound 0 | audit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cells = {(task, int(bound), int(seed)): run for (task, bound, seed), run in runs}
    for task in sorted({task for task, _, _ in cells}):
        bounds = sorted({bound for of, bound, _ in cells if of == task})
        free = [at for at in bounds if at > max(run["lag_max"] for key, run in cells.items() if key[:2] == (task, at))]
        for together in [*([bound] for bound in bounds), *([free] if len(free) > 1 else [])]:
            mine = {key: run for key, run in cells.items() if key[0] == task and key[1] in together}
            seeds = sorted(seed for _, bound, seed in mine if bound == together[0] and (task, 0, seed) in cells)
            differences = [
                statistics.fmean(last(mine[task, bound, seed]) for bound in together) - last(cells[task, 0, seed])
                for seed in seeds
                if all((task, bound, seed) in mine for bound in together)
            ]
            lag = statistics.fmean(run["lag_mean"] for run in mine.values())
            lines.append(
                f"| `{task}` | {', '.join(map(str, together))} | {len(differences)} | {lag:.2f} | "
                f"{max(run['lag_max'] for run in mine.values())} | {statistics.fmean(map(last, mine.values())):.3f} | "
                f"{interval(differences)} | {sound(mine.values())} |"
            )
    return lines


def full_pipeline_rows(
    runs: list[tuple[list[str], dict[str, Any]]], *, synchronous: dict[tuple[str, int], Any]
) -> list[str]:
    """Whole runs by task, bound and way; differences to the same seeds of bound 0 and of the default way.

    `synchronous`: runs at bound 0 by task and seed.
    """
    lines = [
        "| task | bound | way | seeds | mean lag | held-out reward | difference to bound 0 | "
        "difference to default | audit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cells = {(task, int(bound), way, int(seed)): run for (task, way, bound, seed), run in runs}
    for task, bound, way in sorted({name[:3] for name in cells}):
        mine = {name[3]: run for name, run in cells.items() if name[:3] == (task, bound, way)}
        fresh = [last(run) - last(synchronous[task, seed]) for seed, run in mine.items() if (task, seed) in synchronous]
        usual = [
            last(run) - last(cells[task, bound, "default", seed])
            for seed, run in mine.items()
            if (task, bound, "default", seed) in cells
        ]
        lag = statistics.fmean(run["lag_mean"] for run in mine.values())
        reward = statistics.fmean(map(last, mine.values()))
        lines.append(
            f"| `{task}` | {bound} | {way} | {len(mine)} | {lag:.2f} | {reward:.3f} | {interval(fresh)} | "
            f"{interval(usual) if way != 'default' else '-'} | {sound(mine.values())} |"
        )
    return lines


def sound(runs: Iterable[dict[str, Any]]) -> str:
    return "OK" if all(run["audit"] == run["code"] == 0 and run["finite"] for run in runs) else "NOT OK"


def preset_rows(cells: dict[tuple[str, int], dict[str, Any]]) -> list[str]:
    """Held-out reward of each preset, and the difference to `grpo` with the same seeds. `cells`: by preset and seed."""
    steps = f"after {STEPS // 2} steps | after {STEPS} steps"
    lines = [
        f"| preset | seeds | {steps} | difference to grpo | acts on | also set |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for preset in sorted({preset for preset, _ in cells}):
        mine = {seed: run for (name, seed), run in cells.items() if name == preset}
        paired = [last(run) - last(cells["grpo", seed]) for seed, run in mine.items() if ("grpo", seed) in cells]
        half = statistics.fmean(run["held_out"][str(STEPS // 2)] for run in mine.values())
        extra = ", ".join(f"`{setting}`" for setting in EXTRA.get(preset, ()))
        lines.append(
            f"| {preset} | {len(mine)} | {half:.3f} | {statistics.fmean(map(last, mine.values())):.3f} | "
            f"{interval(paired)} | {acting(mine.values())} | {extra} |"
        )
    return lines


def acting(runs: Iterable[dict[str, Any]]) -> str:
    """The largest mean share of tokens that a clip, gate or truncation changed."""
    lines = [line for run in runs for line in run["log"]]
    shares = {
        name: statistics.fmean(line.get(name, 0.0) for line in lines)
        for name in ("clip_share", "gated_share", "tis_capped_share")
    }
    name, share = max(shares.items(), key=lambda pair: pair[1])
    return f"`{name}` {share:.4f}" if share else "-"


def layout_rows(runs: list[tuple[list[str], dict[str, Any]]]) -> list[str]:
    """Back-ends and layouts: reward at the end by seed, and how far the reward curve is from that of one process."""
    lines = [
        "| learner | training reward, last 5 steps, per seed | mean distance of the curve to one process | audit |",
        "| --- | --- | --- | --- |",
    ]
    split: dict[str, list[dict[str, Any]]] = {}
    for (_task, layout, _seed), run in runs:
        split.setdefault(layout, []).append(run)
    alone = [statistics.fmean(values) for values in zip(*(run["rewards"] for run in split["one process"]), strict=True)]
    for name in (name for name in LAYOUTS if name in split):
        apart = " ".join(
            f"{statistics.fmean(abs(one - mean) for one, mean in zip(run['rewards'], alone, strict=False)):.3f}"
            for run in split[name]
        )
        rewards = " ".join(f"{run['last5']:.3f}" for run in split[name])
        lines.append(f"| {name} | {rewards} | {apart} | {sound(split[name])} |")
    return lines


PARTS = {part.__name__: part for part in (ages, averages, presets, bounds, full_pipeline, layouts, table)}


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ages", type=int, nargs="+", default=list(AGES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--task", default="running_sum")
    parser.add_argument("--only", default="", help="presets with commas between them, layouts with semicolons")
    parser.add_argument("--again", action="store_true", help="measure what is known too")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run of an exact age after this time")
    parser.add_argument("--workers", type=int, default=2, help="runs of an exact age side by side")
    args = parser.parse_args()
    if args.what != "table":
        prepare(args.task)
    PARTS[args.what](args)


if __name__ == "__main__":
    main()
