"""The benchmark of deltas in small: its figures are those of the encoder, and its training is training."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benchmarks" / "bench_delta.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(BENCH), *words], env=env, capture_output=True, text=True, timeout=200, check=False
    )


def test_synthetic_figures(tmp_path: Path) -> None:
    results = tmp_path / "delta.json"
    results.write_text('{"trace": {"kept": true}}')
    done = run(
        "synthetic",
        "--gb",
        "0.01",
        "--tensors",
        "6",
        "--rounds",
        "1",
        "--bucket-bytes",
        str(1 << 20),
        "--results",
        str(results),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(results.read_text())
    assert report["trace"] == {"kept": True}, "what was not run keeps its place"
    assert report["synthetic"]["command"].endswith("--bucket-bytes 1048576"), "without the paths of this machine"
    kinds = {kind: report["synthetic"][kind] for kind in ("random bits", "last places")}
    for found in kinds.values():
        assert 0.009 < found["changed_elements"] < 0.011 and found["small_enough"]
        assert set(found["gb_per_s"]) == {"memcpy", "compare", "find", "encode", "decode"}
        assert "GB/s" in found["limited_by"] and abs(sum(found["encode_is"].values()) - 1) < 0.01
    assert 2.9 < kinds["random bits"]["bytes_per_changed_element"] < 3.1, "one for the place, two of noise"
    assert kinds["last places"]["share_of_full"] < kinds["random bits"]["share_of_full"]


@pytest.mark.chaos
def test_a_training_trace(tmp_path: Path) -> None:
    """With a model that knows nothing: rewards of our own, so that there is something to learn."""
    model = tmp_path / "model"
    model.mkdir()
    size = len(make_tokenizer(model))
    save_model(model, make_tiny_qwen3(size, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp_size=64))
    script = f"""
import sys
sys.path[:0] = [{str(BENCH.parent)!r}]
import bench_delta, delta_trace
delta_trace.task_reward = lambda task: lambda answer, truth: float(len(answer) % 2)
bench_delta.main(["trace", "--model", {str(model)!r}, "--steps", "3", "--prompts", "2", "--samples", "4",
                  "--new-tokens", "8", "--lrs", "1e-5", "1e-2", "--results", {str(tmp_path / "r.json")!r}])
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())["trace"]
    assert str(tmp_path) not in json.dumps(report), "no path of this machine"
    low, high = report["by_lr"]
    assert 0 < low["changed_elements"]["mean"] < high["changed_elements"]["mean"] <= 1
    assert 0 < low["share_of_full"]["mean"] < high["share_of_full"]["mean"] < 1
    assert low["elements"] * 2 == low["weights_bytes"] and low["encode_ms"]["mean"] > 0


def test_changes_are_counted_without_the_encoder() -> None:
    spec = importlib.util.spec_from_file_location("bench_delta", BENCH)
    assert spec and spec.loader
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    for kind in ("random bits", "last places"):
        made = bench.Versions(bench.Synthetic(gb=0.002, tensors=3, share=0.1), kind)
        differs = sum(
            int(np.count_nonzero(a.view("<u2") != b.view("<u2"))) for a, b in zip(made.old, made.new, strict=True)
        )
        assert differs == made.changed > 0


def test_both_parts_run_where_none_is_named() -> None:
    assert run("nonsense").returncode == 2
    spec = importlib.util.spec_from_file_location("bench_delta", BENCH)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["bench_delta"] = bench  # its structs look their annotations up there
    try:
        spec.loader.exec_module(bench)
        assert bench.parse([]).what == ["synthetic", "trace"] and bench.parse(["trace"]).what == ["trace"]
    finally:
        del sys.modules["bench_delta"]
