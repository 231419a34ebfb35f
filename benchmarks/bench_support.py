"""Cost of exact truncation at a vocabulary of 151 936: bytes per token on the wire, time of coding, step and draw.

Run: `python benchmarks/bench_support.py`. Supports have a geometric distribution of sizes with a given mean, and ids
without order in the vocabulary, the worst case for their coding. Times are of one core (`process_time`: other
processes do not count), compared with those without supports in the same round, in turns; figures are medians. "step"
is `chunked_logprobs`, forward and backward: the part of a learner's step that changes; "draw" is one decode step of the
hf engine's sampler with top_p = 0.9, recorded against not recorded. Results go to benchmarks/results/support.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from asyncrl.engine import GenRequest
from asyncrl.wire import Support, pack_support, unpack_support
from learners.models.logprobs import chunked_logprobs
from learners.models.support import Supports
from producers.engines.hf.sampling import Cut, sample
from producers.engines.hf.slots import SlotTable

VOCABULARY = 151_936
MEANS = (1, 8, 64, 512)
CPU = torch.device("cpu")


def make_support(tokens: int, mean: int, rng: np.random.Generator) -> Support:
    """Supports whose sizes have this mean."""
    counts = rng.geometric(1 / mean, tokens).clip(max=VOCABULARY)
    ids = [np.sort(rng.choice(VOCABULARY, count, replace=False)) for count in counts]
    return Support(counts.astype(np.int32), np.concatenate(ids).astype(np.int32))


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one core."""
    started = time.process_time()
    work()
    return time.process_time() - started


def compare(left: Callable[[], Any], right: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Median seconds of both, and the median of their ratio within a round."""
    left(), right()
    pairs = [(timed(left), timed(right)) for _ in range(rounds)]
    return {
        "without_ms": round(1e3 * statistics.median(a for a, _ in pairs), 3),
        "with_ms": round(1e3 * statistics.median(b for _, b in pairs), 3),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
    }


def wire(tokens: int, mean: int, rounds: int) -> dict[str, float]:
    """Bytes per token, and the time of both ways per thousand tokens."""
    held = make_support(tokens, mean, np.random.default_rng(mean))
    packed = pack_support(held)
    size = sum(array.nbytes for array in packed.values())
    tokens_of = held.ids[np.cumsum(held.counts) - held.counts]
    return {
        "ids_per_token": round(held.ids.size / tokens, 2),
        "bytes_per_token": round(size / tokens, 2),
        "bytes_as_i4": round((held.ids.nbytes + held.counts.nbytes) / tokens, 2),
        "bytes_as_bitmap": VOCABULARY / 8,
        "pack_ms_per_1000": round(
            1e6 * statistics.median(timed(lambda: pack_support(held)) for _ in range(rounds)) / tokens, 3
        ),
        "unpack_ms_per_1000": round(
            1e6
            * statistics.median(timed(lambda: unpack_support({"response": tokens_of, **packed})) for _ in range(rounds))
            / tokens,
            3,
        ),
    }


def step(shape: tuple[int, int], mean: int, rounds: int) -> dict[str, float]:
    """Forward and backward of log-probs."""
    tokens, width = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(VOCABULARY, width) / width**0.5).requires_grad_()
    held = make_support(tokens, mean, np.random.default_rng(mean))
    targets = torch.from_numpy(held.ids[np.cumsum(held.counts) - held.counts].astype(np.int64))
    on_device = Supports.from_arrays(*held, CPU)

    def run(support: Supports | None) -> None:
        logprobs, _ = chunked_logprobs(hidden, weight, targets, support=support)
        torch.autograd.grad(logprobs.sum(), (hidden, weight))

    return compare(lambda: run(None), lambda: run(on_device), rounds)


def draw(rows: int, rounds: int) -> dict[str, float]:
    """One decode step without the model."""
    torch.manual_seed(0)
    logits: Tensor = 4 * torch.randn(rows, VOCABULARY)
    cut = Cut(torch.full((rows,), 0.9), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows))
    kept: list[Tensor] = []

    def run(*, recorded: bool) -> None:
        table = SlotTable(rows, max_new_tokens=4, device=CPU)
        request = GenRequest("r", np.zeros(2, np.int32), tuple(range(rows)), 1, 4, top_p=0.9, support=recorded)
        table.add(request, list(range(rows)), version=0)
        found = sample(logits, torch.full((rows,), 0.5).double(), torch.ones(rows), cut=cut, exact=table.recording)
        table.record(table.state[:rows], found.tokens, found.logprobs, found.kept)
        kept[:] = [found.kept] if found.kept is not None else []

    figures = compare(lambda: run(recorded=False), lambda: run(recorded=True), rounds)
    return {**figures, "ids_per_token": float(kept[0].sum() / rows)}


def write(path: Path, what: str, shape: dict[str, Any], figures: dict[str, Any]) -> None:
    """The results file."""
    report = {
        "what": what,
        "command": " ".join(["python", *sys.argv]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "shape": shape, "figures": figures,
        "machine": {"cores": os.cpu_count(), "load_1m": os.getloadavg()[0], "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/support.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for mean in MEANS:
        figures[f"mean_{mean}"] = {
            "wire": wire(4096, mean, given.rounds),
            "step": step((given.tokens, given.width), mean, given.rounds),
        }
        print(mean, figures[f"mean_{mean}"], flush=True)
    figures["draw"] = draw(16, given.rounds)
    print(figures["draw"])
    what = "supports of truncated draws: bytes per token, coding, step of the learner, draw of the hf engine"
    write(given.results, what, {"tokens": given.tokens, "hidden": given.width, "vocabulary": VOCABULARY}, figures)


if __name__ == "__main__":
    main()
