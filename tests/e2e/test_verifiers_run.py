"""A run whose samples an environment of verifiers 0.4 plays, in an interpreter of its own (`make test-verifiers`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import agent_openai  # noqa: E402, RUF100

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "agent-verifiers"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="make test-verifiers")]


def test_episodes_of_a_taskset_train(run: Any) -> None:
    agent = [str(PYTHON), str(EXAMPLE / "agent.py"), str(EXAMPLE / "environment.json")]
    agent_openai.make_model(run.folder / "model")
    text = agent_openai.configuration(run.folder, run.folder / "model", steps=2)
    usual = json.dumps([sys.executable, str(agent_openai.AGENT)])
    assert usual in text
    run.config.write_text(text.replace(usual, json.dumps(agent)))
    rows = subprocess.run([*agent, "--rows"], capture_output=True, text=True, timeout=120, check=True).stdout
    (run.folder / "rows.jsonl").write_text(rows)
    settings = ["buffer.batch_groups=2", "sampling.group_size=2", "environment.agent.max_processes=2"]
    done = run.launch(*settings, timeout=400)
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0 and (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 4), audit
    lines = [line for line in run.lines("metrics/learner.jsonl") if "reward_mean" in line]
    assert len(lines) == 2 and any(line["reward_mean"] > 0 for line in lines), "random answers hold digits below 5"
