"""What a newcomer types: the demo learns within its promises, with and without lag, from text and from images."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo_model
import pytest

from asyncrl.demo import shapes

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the model that the demo makes."""
    place = tmp_path_factory.mktemp("demo")
    demo_model.place(place)
    yield place


def demo(
    folder: Path, *words: str, task: str = "running_sum", code: int = 0
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Run `asyncrl demo` to its end with this exit code: what it said, the learner's lines, the audit."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "asyncrl", "demo", "--task", task, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-2000:]
    run = folder / "runs" / f"demo-{task}"
    lines = [json.loads(line) for line in (run / "metrics" / "learner.jsonl").read_text().splitlines()]
    audited = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(run), "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, lines, json.loads(audited.stdout)


def gain(lines: list[dict[str, Any]]) -> float:
    rewards = [line["reward_mean"] for line in lines]
    return sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5


@pytest.mark.long
def test_the_demo_learns_within_its_bound(folder: Path) -> None:
    said, lines, audit = demo(folder)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert gain(lines) >= 0.25
    assert audit["lag_mean"] > 0
    assert audit["lag_max"] <= 2
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 640)
    assert "BROKEN" not in said
    run = folder / "runs" / "demo-running_sum"
    processes = [json.loads(line) for line in (run / "processes.jsonl").read_text().splitlines()]
    assert len({line["pid"] for line in processes}) >= 6


@pytest.mark.chaos
def test_the_synchronous_demo_has_no_lag_and_still_learns(folder: Path) -> None:
    said, lines, audit = demo(folder, "--set", "buffer.max_staleness=0", "--set", "learner.steps=25")
    assert [line["lag_max"] for line in lines] == [0] * 25
    assert audit["lag_max"] == 0
    assert gain(lines) >= 0.25
    assert "BROKEN" not in said


@pytest.mark.chaos
def test_the_demo_of_images_learns_from_them(folder: Path) -> None:
    said, lines, audit = demo(folder, task="shapes")
    assert [line["step"] for line in lines] == list(range(1, 61))
    rewards = [line["reward_mean"] for line in lines]
    assert rewards[0] < 0.5
    assert sum(rewards[-10:]) / 10 >= 0.85
    assert audit["lag_max"] <= 2
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 960)
    assert "BROKEN" not in said


@pytest.mark.chaos
def test_with_pictures_of_other_rows_the_reward_stays_at_chance(folder: Path) -> None:
    mixed = folder / "mixed.parquet"
    shapes.write_parquet(mixed, shapes.prompt_rows(1024, 0, permuted=True))
    said, lines, audit = demo(folder, "--set", f"data.path={mixed}", task="shapes", code=1)
    assert said.count("BROKEN") == 1 and "BROKEN  the reward rose by" in said
    assert audit["trained"] == 960
    late = [line["reward_mean"] for line in lines[10:]]  # 800 prompts
    assert sum(late) / len(late) < shapes.CHANCE + 0.05
