"""The four parts of the tutorial, and the notebook, as a reader meets them: files are written, commands run as written.

A test that follows the demo's model may wait where a reader waits: for steps of a run instead of seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import demo_model
import pytest

from asyncrl.metrics import read_lines

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
SET_UP = ("make ", "source ")  # done before this test
LIMIT_S = 400
pytestmark = pytest.mark.xdist_group("tutorial")  # the parts go on from each other's files


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def shell(command: str, folder: Path, *allowed: int) -> str:
    """Its output; it must end with 0 or an allowed code. 69 of a status: nothing runs any more."""
    words = ["bash", "-c", command]
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    codes = (0, *allowed, *((69,) if " status " in command else ()))
    assert done.returncode in codes, f"{command}\n{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the blocks that begin with the name of a file; the commands of the page, in order."""
    commands: list[str] = []
    for language, text in BLOCK.findall(page.read_text()):
        if language in ("python", "toml"):
            name = text.splitlines()[0].removeprefix("# ").strip()
            assert name.endswith((".py", ".toml")), f"a block without the name of its file: {name}"
            (folder / name).write_text(text)
        elif not language:
            commands += text.strip().splitlines()
    return commands


def find_producers(run: Path) -> set[str]:
    """Producers that have had work of a run."""
    lines = read_lines(run / "history.jsonl") if (run / "history.jsonl").exists() else []
    return {line["producer"] for line in lines if line["e"] == "lease"}


def wait_for_work(run: Path, producers: int) -> None:
    """Until the run has a step, and so many producers have had work."""
    until = time.monotonic() + LIMIT_S
    while not list(read_lines(run / "metrics" / "learner.jsonl")) or len(find_producers(run)) < producers:
        assert time.monotonic() < until, f"{run}: no step, or less than {producers} producers"
        time.sleep(0.2)


def follow(page: Path, folder: Path, *, run: str, failing: tuple[str, ...] = ()) -> dict[str, str]:
    """Run the commands of a page; what each said. `run`: of the launches in the background. `failing`: beginnings of
    commands that must fail.
    """
    said: dict[str, str] = {}
    behind: list[subprocess.Popen[bytes]] = []
    try:
        for command in write_files(page, folder):
            if command.endswith(" &"):
                behind.append(
                    subprocess.Popen(
                        ["bash", "-c", command[:-2]], cwd=folder, env=environment(), start_new_session=True
                    )
                )
                wait_for_work(folder / run, len(behind))
            elif command.startswith("sleep"):
                time.sleep(min(float(command.split()[1]), 8.0))
            elif command == "wait":
                for child in behind:
                    child.wait(timeout=LIMIT_S)
            else:
                fails = command.startswith(failing) if failing else False
                said[command] = shell(command, folder, *((1, 2, 65) if fails else ()))
    finally:
        for child in behind:
            if child.poll() is None:
                os.killpg(child.pid, 9)
    return said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a reader who has done part 1 up to its run: the model, the rows, the reward."""
    folder = tmp_path_factory.mktemp("tutorial")
    demo_model.place(folder)
    shell("asyncrl demo --prepare-only", folder)
    write_files(DOCS / "start.md", folder)
    shell("python make_rows.py", folder)
    yield folder


@pytest.mark.long
@pytest.mark.timeout(900)
def test_part_1_own_rows_and_an_own_reward(place: Path) -> None:
    """`make demo` leaves a warm model behind; here the demo only makes it."""
    commands = [command for command in write_files(DOCS / "start.md", place) if not command.startswith(SET_UP)]
    said = {command: shell(command, place) for command in commands}
    rewards = [line["reward_mean"] for line in read_lines(place / "runs/mine/metrics/learner.jsonl")]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"reward {first:.3f} -> {last:.3f}")
    assert len(rewards) == 30 and last > first + 0.15
    assert "lost 0" in said["asyncrl audit runs/mine"] and "doubled 0" in said["asyncrl audit runs/mine"]
    assert "my_rewards:total_is_right" in said["asyncrl check my.toml"] or "reward" in said["asyncrl check my.toml"]
    assert (place / "runs/mine/report.html").exists() and (place / "my-model/model.safetensors").exists()


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_part_2_a_notebook(place: Path) -> None:
    cells = [
        text
        for language, text in BLOCK.findall((DOCS / "tutorial" / "own-task.md").read_text())
        if language == "python"
    ]
    assert len(cells) > 7
    (place / "own_task.py").write_text("\n\n".join(cells))
    said = shell("python own_task.py", place)
    rewards = [line["reward_mean"] for line in read_lines(place / "runs/sums/metrics/learner.jsonl")]
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    assert len(rewards) == 30 and sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    assert "error[" not in said and "lost 0" in said and "step  30" in said
    assert "def truncated(" in (place / "runs/sums-truncated/code/functions.py").read_text()
    assert (place / "sums-model/model.safetensors").exists()


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_part_3_two_hosts_a_crash_and_a_backup(place: Path) -> None:
    said = follow(DOCS / "tutorial" / "two-hosts.md", place, run="runs/two")
    audits = [text for command, text in said.items() if command.startswith("asyncrl audit")]
    assert len(audits) == 2 and all("lost 0" in text and "doubled 0" in text for text in audits), audits
    result = json.loads((place / "runs/two/result.json").read_text())
    assert result["done"] and result["steps"] == 60 and sum(result["restarts"].values()) >= 1
    assert json.loads((place / "backup/result.json").read_text())["steps"] == 80
    assert len(find_producers(place / "runs/two")) >= 2


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_part_4_faults_are_seen_where_the_page_says(place: Path) -> None:
    failing = ("asyncrl check", "asyncrl test-reward", "asyncrl launch all my.toml broken.toml")
    said = follow(DOCS / "tutorial" / "wrong-run.md", place, run="runs/stuck", failing=failing)

    def of(beginning: str) -> str:
        return next(text for command, text in said.items() if command.startswith(beginning))

    wrong = of("asyncrl check")
    assert "did you mean buffer.max_staleness?" in wrong and "sampling.temperature" in wrong
    assert "no idea about" in of("asyncrl test-reward")
    broken = of("asyncrl launch all my.toml broken.toml")
    assert "no idea about" in broken and "sometimes" in broken
    assert "the reward has not moved in 20 steps" in of("asyncrl launch all my.toml --set run.dir=runs/flat")
    stuck = of("asyncrl status runs/stuck")
    assert "reward-0" in stuck and "stopped" in stuck
    assert "lost 0" in of("asyncrl audit runs/stuck")


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its cells are plain Python, in one process; each asserts what it shows."""
    book = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and all(not cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code")
    (tmp_path / "book.py").write_text("\n\n".join(cells))
    said = shell(f"{sys.executable} book.py", tmp_path)
    assert "step  17" in said and "audit" in said and "val-core" in said
