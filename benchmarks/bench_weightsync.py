"""Weight sync, whole: a publisher, the service and 1, 2 and 4 generator processes, over every transport, on one host.

Run: `python benchmarks/bench_weightsync.py` (1 GB and up to 20 GB of memory; smaller: `--gib 0.1 --members 1,2`). The
model is random, bf16, with the 290 tensors of a 0.5B Qwen2.5 (its vocabulary and MLP scaled to the size). In every
repeat the rounds of all transports and the baselines follow one another, so that all see the same machine (where the
memory does not suffice, of one transport after the other); a figure is the median of the repeats, a ratio that of the
ratios within a repeat:
- memcpy: one numpy copy of the same bytes, by one thread, into memory that is there already;
- flat, per_tensor: one Gloo broadcast of all bytes, and one per tensor, to the same number of processes;
- blocked: `Publisher.publish`, from chunks that are there (what a learner's step waits for, without FSDP's gathering);
- whole: from the beginning of `publish` to the last generator's commit. Transport `direct` sends within `publish`, in
  place, so its blocked and pause include the transfer, and whole is what compares;
- round: from the end of `publish` to the last generator's commit, with the digest of what its model holds then;
- transfer: to the moment when the last generator has every byte in the room of its engine and has compared digests;
- pause: no decoding (the exchange between two steps), the longest of all generators.
Generators are processes with the receiver and the weights of the hf engine, without a forward pass: decoding is a
thread that steps every millisecond. Results, with the seconds of each stage, go to benchmarks/results/weightsync.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from sync_rig import Weights, World, baselines, specs_of  # noqa: E402, RUF100

from asyncrl import config as settings  # noqa: E402, RUF100
from asyncrl.errors import AsyncRLError  # noqa: E402, RUF100
from weightsync.copy_digest import copy_digest, cores
from weightsync.plan.buckets import Plan, plan_buckets
from weightsync.plan.digest import Digest

TRANSPORTS = ("local", "collective", "stream", "disk", "direct")
WARM_UP = 3

#: What is to be reached: figure, transport, operator, value.
GOALS = (
    ("blocked_over_memcpy", "", "<=", 1.5),
    ("transfer_over_memcpy_per_generator", "local", "<=", 1.5),
    ("transfer_over_flat", "collective", "<=", 1.3),
    ("per_tensor_over_transfer", "collective", ">=", 3.0),
    ("pause_share", "", "<", 0.1),
)


# ---------------------------------------------------------------- figures


def ratios(row: dict[str, float], generators: int) -> dict[str, float]:
    """What the goals are about, within one repeat."""
    return row | {
        "blocked_over_memcpy": row["blocked_s"] / row["memcpy_s"],
        "round_over_memcpy": row["round_s"] / row["memcpy_s"],
        "transfer_over_memcpy_per_generator": row["transfer_s"] / row["memcpy_s"] / generators,
        "round_over_flat": row["round_s"] / row["flat_s"],
        "transfer_over_flat": row["transfer_s"] / row["flat_s"],
        "per_tensor_over_transfer": row["per_tensor_s"] / row["transfer_s"],
        "per_tensor_over_round": row["per_tensor_s"] / row["round_s"],
        "pause_share": row["pause_s"] / row["round_s"],
    }


def measure(worlds: dict[str, World], weights: Weights, repeats: int) -> dict[str, dict[str, float]]:
    """Medians by transport; the first repeats make slots, connections and rooms, and do not count."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in worlds}
    for repeat in range(repeats + WARM_UP):
        base: dict[str, float] = {}
        for number, (name, world) in enumerate(worlds.items()):
            if not number:
                base = baselines(world, weights, repeat)
            copied = weights.memcpy_s()
            row = world.round(weights)
            if repeat >= WARM_UP:
                rows[name].append(ratios(base | row | {"memcpy_s": copied}, len(world.members)))
    return {
        name: {key: float(f"{statistics.median(row[key] for row in found):.4g}") for key in found[0]}
        for name, found in rows.items()
        if found
    }


def stages(weights: Weights, repeats: int) -> dict[str, float]:
    """Where the time of a publish goes: a copy, a digest, both at once, by one thread and by all. CPU and wall."""
    digest = Digest()
    pairs = [(weights.copy, weights.data)]
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(weights.copy, weights.data),
        "digest": lambda: digest.update(weights.data),
        "both_1_thread": lambda: copy_digest(pairs, threads=1),
        "both_all_threads": lambda: copy_digest(pairs),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(max(3, repeats)):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    result = {}
    for name, times in found.items():
        result[f"{name}_s"] = round(statistics.median(wall for wall, _ in times), 4)
        result[f"{name}_cpu_s"] = round(statistics.median(cpu for _, cpu in times), 4)
    return result


def judge(figures: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """A line per goal and number of generators, said so whether it is reached or not."""
    lines = []
    for key, transport, sign, limit in GOALS:
        for generators, by_transport in figures.items():
            for name, row in by_transport.items():
                within = name == "direct" and key in ("blocked_over_memcpy", "pause_share")  # it has another promise
                if key in row and transport in ("", name) and not within:
                    value = row[key]
                    good = value >= limit if sign == ">=" else value < limit or (sign == "<=" and value == limit)
                    verdict = "reached" if good else "NOT reached"
                    lines.append(f"{verdict:12} {key} {sign} {limit:g}: {value:.3g} ({name}, {generators} generators)")
    return lines


def needed_gib(gib: float, generators: int, transports: Sequence[str]) -> float:
    """Memory of all at once: source, its copy and two slots; a generator's two storages, its copy for others and the
    one that arrives, or the baseline's buffer."""
    return gib * (2 + len(transports) * (2 + 4 * generators))


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.95)
    parser.add_argument("--members", default="1,2,4")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/weightsync.json")
    options = parser.parse_args()
    plan = plan_buckets(specs_of(options.gib), bucket_bytes=settings.WeightSyncConfig().bucket_bytes)
    weights = Weights(plan)
    print(f"{plan.nbytes / 1e9:.3f} GB, {len(plan.tensors)} tensors, {len(plan.bucket_bytes)} buckets, {cores()} cores")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    notes: list[str] = []
    for generators in map(int, options.members.split(",")):
        figures[str(generators)] = run_all(options, weights, generators, notes)
    lines = judge(figures)
    print(*lines, *notes, sep="\n")
    write(options, plan, figures=figures, parts=stages(weights, options.repeats), goals=lines, notes=notes)


def run_all(options: Any, weights: Weights, generators: int, notes: list[str]) -> dict[str, dict[str, float]]:
    """All transports for a number of generators: together where the memory suffices, else one after the other."""
    names = options.transports.split(",")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    groups = [names] if needed_gib(options.gib, generators, names) < free else [[name] for name in names]
    found: dict[str, dict[str, float]] = {}
    for group in groups:
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
            worlds = {name: World(Path(folder), name, generators, options.gib) for name in group}
            try:
                with ThreadPoolExecutor(len(worlds)) as pool:
                    list(pool.map(World.start, worlds.values()))
                found |= measure(worlds, weights, options.repeats)
            except (RuntimeError, AsyncRLError) as error:
                notes.append(f"not run       {generators} generators, {', '.join(group)}: {error}")
            finally:
                for world in worlds.values():
                    world.end()
    for name, row in found.items():
        shown = (
            "memcpy_s",
            "blocked_s",
            "whole_s",
            "transfer_s",
            "round_s",
            "flat_s",
            "per_tensor_s",
            "pause_s",
            "waited_s",
            "apply_s",
            "attest_s",
        )
        print(f"{generators} x {name:11}", *(f"{key} {row[key]:.3f}" for key in shown))
    return found


def write(options: Any, plan: Plan, *, figures: dict[str, Any], parts: Any, goals: list[str], notes: list[str]) -> None:
    """The results file."""
    report = {
        "what": "rounds of weight sync on one host: medians in seconds, and ratios within a repeat",
        "command": " ".join(["python", *sys.argv]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "bytes": plan.nbytes, "tensors": len(plan.tensors), "buckets": len(plan.bucket_bytes),
        "repeats": options.repeats, "goals": goals, "not_run": notes, "publish_stages": parts,
        "figures_by_generators": figures,
        "machine": {"cores": os.cpu_count(), "load_1m": math.floor(os.getloadavg()[0] * 100) / 100,
                    "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "msgspec": msgspec.__version__},
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
