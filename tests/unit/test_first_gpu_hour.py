"""The script of the first hour: parts that need nothing run, missing parts are said, what breaks is a verdict."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/first_gpu_hour.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("first_gpu_hour", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_report_has_a_verdict_for_every_check(tmp_path: Path) -> None:
    out = tmp_path / "hour.json"
    words = [sys.executable, str(SCRIPT), "--device", "cpu", "--parts", "d", "e", "g", "h", "--out", str(out)]
    done = subprocess.run(
        [*words, "--engine-python", str(tmp_path / "none")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    verdicts = {(row["part"], row["check"]): row["verdict"] for row in report["checks"]}
    assert verdicts.pop(("d", "copies to the host")) == verdicts.pop(("d", "digests of `direct`")) == "works"
    assert set(verdicts.values()) == {"not here"} and len(verdicts) == 5
    assert all(row["said"] for row in report["checks"] if row["verdict"] == "not here")


def test_what_breaks_is_wrong_and_ends_with_1(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Any:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(script, "PARTS", {"a": lambda hour: iter([("kernels", breaks)])})
    monkeypatch.setattr(sys, "argv", ["hour", "--parts", "a", "--device", "cpu", "--out", str(tmp_path / "o.json")])
    assert script.main() == 1
    [row] = json.loads((tmp_path / "o.json").read_text())["checks"]
    assert row["verdict"] == "wrong" and "no kernel for this device" in row["said"]


def test_a_run_that_fails_or_hangs_is_wrong(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.call([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.5)[0] == 124
    assert script.works([sys.executable, "-c", "raise SystemExit(3)"], limit_s=60).verdict == "wrong"
    monkeypatch.setattr(script, "RUNS", tmp_path)
    hour = script.Hour(argparse.Namespace(device="cpu"))
    found, lines = script.run(hour, "refused", "learner.steps=-1")
    assert found.verdict == "wrong" and "learner.steps" in found.said and lines == []
