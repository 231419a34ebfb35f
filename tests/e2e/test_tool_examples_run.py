"""An example of examples/tools as its two commands run it, with fewer steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tools"


def test_an_example_is_prepared_trained_and_audited(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = tmp_path / "search"
    words = [sys.executable, str(FOLDER / "prepare.py"), "search", "--steps", "40", "--out", str(files)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=250, env=run.environment())
    settings = {
        "run.dir": run.dir,
        "model.path": files / "sft" / "export",
        "data.path": files / "train.jsonl",
        "evaluation.path": files / "heldout.jsonl",
        "evaluation.max_prompts": 16,
        "environment.tool_args.search.path": files / "corpus.jsonl",
        "learner.steps": 3,
    }
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = run.command(
        "launch", "all", str(FOLDER / "rl.toml"), str(FOLDER / "search.toml"), "--plain", *given, timeout=250
    )
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 24)
    lines = run.lines("metrics/learner.jsonl")
    assert len(lines) == 3 and all(line["observed_share"] > 0 for line in lines), "the policy calls the tool"
    assert [line["evaluation_version"] for line in run.lines("metrics/evaluation.jsonl")] == [0, 3]
