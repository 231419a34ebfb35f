"""What every online tracker promises: values by step, a step that comes again, a run that goes on, secrets, an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tracker_rigs import RIGS, STANDINS, Rig, is_real, standin_lines, standin_told

ROOT = Path(__file__).parents[2]
REAL = {rig.name: is_real(rig.name) for rig in RIGS}
SECRET = "s3cret-0123456789-0123456789-0123456789"
TELL = """
import json, sys
from pathlib import Path
from asyncrl.plugins import TrackerRun, find
name, folder, secret, points = sys.argv[1:5]
config = {"run": {"name": "run"}, "buffer": {"max_staleness": 2, "filters": []}}
run = TrackerRun(project="proj", name="run", id="0123456789abcdef", folder=Path(folder), offline=True, secret=secret,
                 config=config)
tracker = find("asyncrl.trackers", name)(run)
for step, values in json.loads(points):
    tracker.log(values, step=step)
tracker.close()
"""


@pytest.fixture(params=RIGS, ids=lambda rig: rig.name)
def rig(request: pytest.FixtureRequest) -> Rig:
    found: Rig = request.param
    return found


def environment(rig: Rig) -> dict[str, str]:
    """Of a process with the tracker: the stand-in comes first on the path where the package is missing."""
    path = [str(ROOT)] if REAL[rig.name] else [str(STANDINS), str(ROOT)]
    env = {key: value for key, value in os.environ.items() if key not in {one.secret for one in RIGS}}
    return {**env, "PYTHONPATH": os.pathsep.join(path)}


def tell(rig: Rig, folder: Path, points: list[tuple[int, dict[str, float]]]) -> str:
    """A process that makes the tracker, tells it and ends; what it printed."""
    command = [sys.executable, "-c", TELL, rig.name, str(folder), SECRET, json.dumps(points)]
    done = subprocess.run(
        command, env=environment(rig), cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(not os.environ.get("REAL_TRACKERS"), reason="make test-trackers: with the packages themselves")
def test_no_stand_in_was_used() -> None:
    assert all(REAL.values()), REAL


def name_there(rig: Rig, name: str) -> str:
    return name.replace("@", "_") if rig.name == "mlflow" else name


def test_values_arrive_under_their_step_and_a_run_goes_on(rig: Rig, tmp_path: Path) -> None:
    """Two processes, as after a restart: the second one tells step 2 again, with other numbers."""
    score = "val-core/add/reward/mean@4"
    said = tell(rig, tmp_path, [(1, {"health/lag_mean": 0.5, score: 0.25}), (2, {"health/lag_mean": 1.5})])
    said += tell(rig, tmp_path, [(2, {"health/lag_mean": 1.75}), (3, {"health/lag_mean": 2.0})])
    wanted = {
        ("health/lag_mean", 1): 0.5,
        (name_there(rig, score), 1): 0.25,
        ("health/lag_mean", 2): 1.75,
        ("health/lag_mean", 3): 2.0,
    }
    if not REAL[rig.name]:
        assert standin_told(tmp_path) == wanted
        lines = standin_lines(tmp_path)
        begun = [line["begin"] for line in lines if "begin" in line]
        assert len(begun) == 2 and len(set(begun)) == 1  # one run for both processes
        assert {line["mode"] for line in lines if "begin" in line} == {"offline"}
        assert {line["secret"] for line in lines if "secret" in line} == {SECRET}
        assert sum("end" in line for line in lines) == 2
    elif rig.told is not None:
        told = rig.told(tmp_path)
        assert {key: told.get(key) for key in wanted} == wanted
    else:
        text = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert b"health/lag_mean" in text and score.encode() in text
    assert SECRET not in said


def test_a_tracker_imports_its_package_when_it_is_made(tmp_path: Path) -> None:
    """The modules themselves are light: the process of one tracker never pays for another."""
    modules = ", ".join(f"learners.trackers.{rig.name}" for rig in RIGS)
    heavy = {"torch", *(rig.name for rig in RIGS)}
    code = f"import sys, learners.trackers.main, {modules}\nassert not {heavy!r} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], env=environment(RIGS[0]), cwd=tmp_path, timeout=120, check=True)
