"""Deltas of weights: how many bytes they are, how fast they are made and applied, and what limits it.

Run: `python benchmarks/bench_delta.py [synthetic] [trace]` (both where none is named; what is not run keeps its place
in the results file). Results go to benchmarks/results/delta.json.

- synthetic: bf16 weights of `--gb` in `--tensors` tensors, of which `--share` of the elements change, once to other
  random bits (nothing to compress) and once by the last places, as a small step of an optimizer does. Rates are bytes
  of weights (one version) per second of wall time on `--threads` threads, medians over rounds in which the parts take
  turns: a copy of the same bytes (memcpy), comparing alone, finding (comparing and picking out what changed), encode
  (that, and positions and zstd) and decode in place. Whatever share of encode a part takes says what limits it.
- trace: `delta_trace.py`: the demo's model in bf16 under three learning rates. The model must be there (`python -m
  asyncrl demo --prepare-only` makes it).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from weightsync.encoding import delta  # noqa: E402, RUF100
from weightsync.plan.buckets import Plan, TensorSpec, group_by_bucket, plan_buckets

RESULTS = ROOT / "benchmarks" / "results" / "delta.json"
MOST = 0.04  # of the bytes of the full weights, with 1 % changed
SCANNED = 1e9  # bytes of weights per second


class Synthetic(msgspec.Struct, frozen=True):
    """What is measured."""

    gb: float = 1.0
    tensors: int = 300
    share: float = 0.01
    threads: int = 2
    rounds: int = 5
    bucket_bytes: int = 64 << 20


class Versions:
    """Two versions of random weights; `kind` says what the changes look like."""

    def __init__(self, setting: Synthetic, kind: str, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        rows = max(1, int(setting.gb * 1e9) // (2 * setting.tensors * 1024))
        specs = [TensorSpec(f"layers.{i}.weight", "BF16", (rows, 1024)) for i in range(setting.tensors)]
        self.plan: Plan = plan_buckets(specs, bucket_bytes=setting.bucket_bytes)
        self.groups = group_by_bucket(self.plan.tensors, len(self.plan.bucket_bytes))
        self.old, self.new = [], []
        self.changed = 0
        for size in self.plan.bucket_bytes:
            numbers = rng.standard_normal(size // 2, dtype=np.float32) * np.float32(0.02)
            old = (numbers.view("<u4") >> np.uint32(16)).astype("<u2")  # bf16, cut
            where = np.flatnonzero(rng.random(len(old), dtype=np.float32) < setting.share)
            new = old.copy()
            if kind == "random bits":
                new[where] ^= rng.integers(1, 1 << 16, len(where), dtype=np.uint16)
            else:
                new[where] += rng.choice(np.array([-2, -1, 1, 2], dtype="<i2"), len(where)).view("<u2")
            self.changed += len(where)
            self.old.append(old.view(np.uint8))
            self.new.append(new.view(np.uint8))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time, and of all cores."""
    began, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - busy


def compare(old: np.ndarray, new: np.ndarray) -> None:
    """The comparison alone, in the chunks of the encoder."""
    left, right = old.view("<u2"), new.view("<u2")
    chunk = delta.CHUNK_BYTES // 2
    flags = np.empty(chunk, dtype=np.bool_)
    for start in range(0, len(left), chunk):
        part = left[start : start + chunk]
        np.not_equal(part, right[start : start + chunk], out=flags[: len(part)])


def find(old: np.ndarray, new: np.ndarray) -> None:
    """Comparing and picking out, as the encoder does."""
    for _ in delta._scan([old.view("<u2")], [new.view("<u2")], delta.CHUNK_BYTES // 2):
        pass


def synthetic(setting: Synthetic, kind: str) -> dict[str, Any]:
    """One kind of change: sizes, rates, and where the time of encode goes."""
    versions = Versions(setting, kind)
    old, new, groups, plan = versions.old, versions.new, versions.groups, versions.plan
    held = [bucket.copy() for bucket in old]
    blobs: list[bytes] = []
    with ThreadPoolExecutor(setting.threads) as pool:

        def over(function: Callable[..., Any], *columns: Sequence[Any]) -> Callable[[], list[Any]]:
            return lambda: list(pool.map(function, *columns))

        def encode() -> None:
            blobs[:] = pool.map(delta.encode, old, new, groups)

        writable = [memoryview(bucket) for bucket in held]
        parts: dict[str, Callable[[], object]] = {
            "memcpy": over(np.copyto, held, old),  # leaves the base for decode
            "compare": over(compare, old, new),
            "find": over(find, old, new),
            "encode": encode,
            "decode": over(delta.decode, blobs, writable, groups),
        }
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
        for round_ in range(setting.rounds + 1):  # the first warms up
            for name, work in parts.items():
                figures = timed(work)
                if round_:
                    spent[name].append(figures)
            assert all(np.array_equal(a, b) for a, b in zip(held, new, strict=True)), "decoded exactly"
    return figures_of(spent, plan, blobs, versions.changed)


def figures_of(
    spent: dict[str, list[tuple[float, float]]], plan: Plan, blobs: list[bytes], changed: int
) -> dict[str, Any]:
    """Rates and ratios of medians."""
    wall = {name: statistics.median(w for w, _ in rows) for name, rows in spent.items()}
    busy = {name: statistics.median(b for _, b in rows) for name, rows in spent.items()}
    rates = {name: round(plan.nbytes / seconds / 1e9, 3) for name, seconds in wall.items()}
    takes = {
        "compare": wall["compare"],
        "pick out": wall["find"] - wall["compare"],
        "pack": wall["encode"] - wall["find"],
    }
    share = sum(map(len, blobs)) / plan.nbytes
    return {
        "changed_elements": changed / (plan.nbytes / 2),
        "share_of_full": share,
        "bytes_per_changed_element": round(share * plan.nbytes / max(1, changed), 3),
        "gb_per_s": rates,
        "gb_per_core_s": {name: round(plan.nbytes / max(seconds, 1e-9) / 1e9, 3) for name, seconds in busy.items()},
        "memcpy_times": {name: round(seconds / wall["memcpy"], 2) for name, seconds in wall.items()},
        "encode_is": {name: round(seconds / wall["encode"], 3) for name, seconds in takes.items()},
        "small_enough": bool(share <= MOST),
        "fast_enough": bool(plan.nbytes / wall["encode"] >= SCANNED),
    }


def limits(found: dict[str, Any]) -> str:
    """What the largest part of encode is, in words."""
    name, share = max(found["encode_is"].items(), key=lambda item: item[1])
    words = {
        "compare": "reading both versions from memory and comparing them",
        "pick out": "finding the changed elements among the flags and gathering them",
        "pack": "positions and zstd",
    }
    return (
        f"{words[name]} takes {share:.0%} of encode; a copy of the weights runs at {found['gb_per_s']['memcpy']} GB/s"
    )


def run_synthetic(setting: Synthetic) -> dict[str, Any]:
    """Both kinds of change."""
    report: dict[str, Any] = {"setting": msgspec.structs.asdict(setting)}
    for kind in ("random bits", "last places"):
        found = synthetic(setting, kind)
        report[kind] = found | {"limited_by": limits(found)}
        print(
            f"{kind}: {found['share_of_full']:.3%} of full, GB/s {found['gb_per_s']}, {report[kind]['limited_by']}",
            flush=True,
        )
    return report


def run_trace(given: argparse.Namespace) -> dict[str, Any]:
    """Every learning rate."""
    import torch
    from delta_trace import Trace, run, settings, task_reward
    from transformers.utils import logging

    from learners.gang.gang import Gang

    logging.disable_progress_bar()
    report: dict[str, Any] = {"task": given.task, "model": given.model.name, "by_lr": []}
    first = Trace(0.0, given.steps, given.prompts, given.samples, given.new_tokens)
    config = settings(given.task, given.model, first)
    torch.set_num_threads(config.learner.torch_threads)
    gang = Gang.join(config)
    report["setting"] = msgspec.structs.asdict(first) | {"beta2": config.learner.optim.beta2}
    del report["setting"]["lr"]
    for lr in given.lrs:
        found = run(given.task, given.model, msgspec.structs.replace(first, lr=lr), gang, task_reward(given.task))
        report["by_lr"].append(found)
        print(
            {name: found[name] for name in ("lr", "share_of_full", "changed_elements", "encode_ms", "decode_ms")},
            flush=True,
        )
    gang.leave()
    return report


PARTS = ("synthetic", "trace")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", help="synthetic, trace; both where none is named")
    for name, default in msgspec.structs.asdict(Synthetic()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--task", default="running_sum")
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "models" / "running_sum")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    for name, default in (("steps", 50), ("prompts", 16), ("samples", 8), ("new-tokens", 112)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    given.what = given.what or list(PARTS)
    if unknown := set(given.what) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return given


def main(words: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    given = parse(words)
    report: dict[str, Any] = json.loads(given.results.read_text()) if given.results.exists() else {}
    said = list(sys.argv[1:] if words is None else words)
    paths = {at + step for at, word in enumerate(said) if word in ("--results", "--model") for step in (0, 1)}
    options = [word for at, word in enumerate(said) if at not in paths]
    about = {
        "command": " ".join(["python benchmarks/bench_delta.py", *options]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "zstandard": zstandard.__version__},
    }
    if "synthetic" in given.what:
        setting = Synthetic(**{name: getattr(given, name) for name in msgspec.structs.asdict(Synthetic())})
        report["synthetic"] = about | run_synthetic(setting)
    if "trace" in given.what:
        report["trace"] = about | run_trace(given)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
