"""F4: the learner is killed at random points; the run ends with the bits of one that was never killed.

The same arrivals for both: a copied store (see `learner_lab`). Bits: the exported weights and the digest of every
version that was ever committed, also of those that were trained more than once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from learner_lab import Lab, Recorded, seed_of

Figure = Callable[[str], None]


def metrics_size(lab: Lab) -> int:
    path = lab.run.metrics / "learner.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_once(lab: Lab, rng: random.Random) -> str:
    """Start a learner, end it at a random point of its life; where it was: "start" or "step"."""
    before = metrics_size(lab)
    pid = lab.learner()
    started = time.monotonic()
    early = rng.random() < 0.3 or lab.committed() >= lab.steps - 12  # the run must not end before the last kill
    if early:
        until = started + rng.uniform(0.0, 0.8)
        while time.monotonic() < until and metrics_size(lab) == before:
            time.sleep(0.003)
    else:
        wanted = before + rng.randrange(1, 4)
        lab.wait("steps", lambda: metrics_size(lab) >= wanted)
        time.sleep(rng.uniform(0.0, 0.04))
    how = signal.SIGTERM if rng.random() < 0.3 else signal.SIGKILL
    assert lab.children.running(pid), "it ended before it was killed"
    os.kill(pid, how)
    code = lab.end_of(pid, 30)
    assert code in ((-9,) if how == signal.SIGKILL else (0, -15)), lab.tail()
    return f"{how.name} while {'starting' if metrics_size(lab) == before else 'training'}"


def killed_run(recorded: Recorded, folder: Path, figure: Figure, *, steps: int, kills: int) -> None:
    rng = seed_of("bit-equal resume")
    wanted = recorded.reference(folder, steps=steps)
    lab = recorded.lab(folder / "killed", steps=steps).serve()
    try:
        points: dict[str, int] = {}
        for _ in range(kills):
            point = kill_once(lab, rng)
            points[point] = points.get(point, 0) + 1
        lab.finish()
        lab.assert_accounted()
        found = lab.result()
    finally:
        lab.close()
    replayed = sum(1 for line in lab.lines() if line["replayed"])
    figure(f"kills {points}, steps replayed {replayed}, digest {found['export'][:12]}, undisturbed the same")
    assert sum(points.values()) == kills and points.get("SIGKILL while training", 0) >= kills // 5
    assert replayed > 0
    assert found == wanted


@pytest.mark.slow
def test_f04_twenty_kills_end_with_the_same_bits(recorded: Recorded, tmp_path: Path, figure: Figure) -> None:
    killed_run(recorded, tmp_path, figure, steps=60, kills=20)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_f04_two_hundred_kills_end_with_the_same_bits(recorded: Recorded, tmp_path: Path, figure: Figure) -> None:
    killed_run(recorded, tmp_path, figure, steps=400, kills=200)
