"""docs/start.md and the notebook as a new user meets them: files are written, commands are run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.metrics import read_lines

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start.md").read_text()
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
SET_UP = ("make ", "source ")  # done before this test


def shell(command: str, folder: Path) -> str:
    """Its output; it must end well."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = command.split()
    if words[0] == "asyncrl":
        words = [sys.executable, "-m", *words]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)
    allowed = (0, 69) if "status" in words else (0,)  # 69: nothing runs any more
    assert done.returncode in allowed, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_new_user_trains_with_rows_and_a_reward_of_their_own(tmp_path: Path) -> None:
    """`make demo` leaves a warm model behind; here the demo only makes it."""
    shell("asyncrl demo --prepare-only", tmp_path)
    said: dict[str, str] = {}
    for language, text in BLOCK.findall(PAGE):
        if language:
            name = text.splitlines()[0].removeprefix("# ").strip()
            assert name.endswith((".py", ".toml")), f"a block without the name of its file: {name}"
            (tmp_path / name).write_text(text)
            continue
        for command in text.strip().splitlines():
            if not command.startswith(SET_UP):
                said[command] = shell(command, tmp_path)
    rewards = [line["reward_mean"] for line in read_lines(tmp_path / "runs/mine/metrics/learner.jsonl")]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"reward {first:.3f} -> {last:.3f}")
    assert len(rewards) == 30 and last > first + 0.15
    assert "lost 0" in said["asyncrl audit runs/mine"] and "doubled 0" in said["asyncrl audit runs/mine"]
    assert "my_rewards:total_is_right" in said["asyncrl check my.toml"] or "reward" in said["asyncrl check my.toml"]
    assert (tmp_path / "runs/mine/report.html").exists() and (tmp_path / "my-model/model.safetensors").exists()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its cells are plain Python, in one process; each asserts what it shows."""
    book = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and all(not cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code")
    (tmp_path / "book.py").write_text("\n\n".join(cells))
    said = shell(f"{sys.executable} book.py", tmp_path)
    assert "step  17" in said and "audit" in said and "val-core" in said
