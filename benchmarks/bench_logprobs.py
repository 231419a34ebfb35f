"""Memory of log-probs and entropy, chunked against full logits: 8192 tokens, vocabulary of 32768, forward and backward.

Run: `python benchmarks/bench_logprobs.py`. Each way runs in a child process of its own. The child makes its inputs,
sets the kernel's high-water mark of its resident memory back (`/proc/self/clear_refs`), computes, and reads the mark
(`VmHWM`): extra memory is the mark less what was resident before, so it holds every temporary, the saved tensors and
the gradients. The parent compares log-probs, entropies and gradients of the ways. Linux only. Results go to
benchmarks/results/logprobs.json.

Ways: "full" is the usual text (logits, log_softmax, gather, entropy from both); "full_no_entropy" leaves the entropy
out, so it does less; "chunked" is `learners.models.logprobs.chunked_logprobs`, by tokens per chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from children import forget_peak, resident  # noqa: E402, RUF100

from learners.models.logprobs import chunked_logprobs

DEFAULT_CHUNK = 1024  # learner.logprob_chunk_tokens
CHUNKS = (256, 512, DEFAULT_CHUNK, 2048)
ALLOWED = 0.25
MIB = 1024 * 1024
Both = tuple[Tensor, Tensor]


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    """Log-probs and entropies from logits that exist whole."""
    logs = (hidden @ weight.T).log_softmax(-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


def full_no_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Both:
    """Log-probs alone."""
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    return logprobs, torch.zeros_like(logprobs)


def way_of(name: str) -> Callable[[Tensor, Tensor, Tensor], Both]:
    """The function of a name; a number is a chunk."""
    if name.isdigit():
        return lambda hidden, weight, targets: chunked_logprobs(hidden, weight, targets, chunk_tokens=int(name))
    return {"full": full, "full_no_entropy": full_no_entropy}[name]


# ---------------------------------------------------------------- the child


def inputs(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head weight, targets, and the upstream gradients of log-probs and entropies; from a seed."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(vocabulary, width) * 2 / width**0.5).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens), torch.randn(tokens)


def child(name: str, shape: tuple[int, int, int], out: Path | None) -> None:
    """One forward and backward; figures to stdout, what was computed to `out`."""
    warm = inputs(8, shape[1], 64)
    logprobs, entropy = way_of(name)(*warm[:3])
    torch.autograd.backward(logprobs.sum() + entropy.sum())  # libraries and threads are there before the mark
    hidden, weight, targets, up_logprobs, up_entropy = inputs(*shape)
    before = resident("VmRSS")
    forget_peak()
    started = time.perf_counter()
    logprobs, entropy = way_of(name)(hidden, weight, targets)
    torch.autograd.backward((logprobs * up_logprobs).sum() + (entropy * up_entropy).sum())
    seconds = time.perf_counter() - started
    extra = resident("VmHWM") - before
    if out is not None:
        assert hidden.grad is not None and weight.grad is not None
        np.savez(
            out,
            logprobs=logprobs.detach().numpy(),
            entropy=entropy.detach().numpy(),
            hidden=hidden.grad.numpy(),
            weight=weight.grad.numpy(),
        )
    print(json.dumps({"extra_mib": round(extra / MIB, 1), "seconds": round(seconds, 2)}))


# ---------------------------------------------------------------- the parent


def measure(name: str, shape: tuple[int, int, int], out: Path | None = None) -> dict[str, float]:
    """Figures of a way from a fresh process."""
    command = [sys.executable, __file__, "--child", name, "--shape", *map(str, shape)]
    done = subprocess.run(
        command + (["--out", str(out)] if out else []), capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def differences(wanted: Path, got: Path) -> dict[str, dict[str, float]]:
    """Largest difference of every array, and the largest value that it has."""
    with np.load(wanted) as left, np.load(got) as right:
        return {
            name: {
                "max_difference": float(np.abs(left[name] - right[name]).max()),
                "largest": float(np.abs(left[name]).max()),
            }
            for name in left.files
        }


def run(shape: tuple[int, int, int], folder: Path) -> dict[str, object]:
    """All ways, and what is asked of them."""
    extra, figures = {}, {}
    for name in ("full", "full_no_entropy", *map(str, CHUNKS)):
        kept = folder / f"{name}.npz" if name in ("full", str(DEFAULT_CHUNK)) else None
        figures[name if not name.isdigit() else f"chunked_{name}"] = found = measure(name, shape, kept)
        extra[name] = found["extra_mib"]
        print(f"{name:16} {found}", flush=True)
    for name, found in figures.items():
        found["of_full"] = round(found["extra_mib"] / extra["full"], 4)
        if name.startswith("chunked"):
            found["of_full_no_entropy"] = round(found["extra_mib"] / extra["full_no_entropy"], 4)
    difference = differences(folder / "full.npz", folder / f"{DEFAULT_CHUNK}.npz")
    share = figures[f"chunked_{DEFAULT_CHUNK}"]["of_full"]
    print(f"chunks of {DEFAULT_CHUNK}: {share:.3f} of the extra memory of full logits (allowed {ALLOWED})")
    print(json.dumps(difference, indent=1))
    return {"figures": figures, "differences": difference, "share": share, "allowed": ALLOWED, "met": share <= ALLOWED}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 1024, 32768), metavar=("N", "H", "V"))
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/logprobs.json")
    given = parser.parse_args()
    shape = tuple(given.shape)
    if given.child:
        child(given.child, shape, given.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(shape, Path(folder))
    report = {
        "what": "extra resident memory of log-probs and entropy, forward and backward, float32",
        "command": " ".join(["python", *sys.argv]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "shape": {"tokens": shape[0], "hidden": shape[1], "vocabulary": shape[2]}, **found,
        "machine": {"cores": os.cpu_count(), "load_1m": os.getloadavg()[0], "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }  # fmt: skip
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if found["met"] else 1)


if __name__ == "__main__":
    main()
