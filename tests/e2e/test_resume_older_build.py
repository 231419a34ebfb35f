"""A run that an earlier build started, and that was killed with -9, goes on with this one: the formats are the same.

The earlier build is the commit before the product's modules moved to the folders that their purposes name. It comes
from the repository's own history; without it (a source archive, a shallow clone) the test is skipped.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from test_pipeline import assert_complete, need_redis

from asyncrl.demo import tasks
from asyncrl.plugins import load_object

EARLIER = "eebf0bf2eabb"
ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncrl", "buffers", "configs", "learners", "producers", "weightsync")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def earlier_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the earlier build."""
    done = subprocess.run(
        ["git", "archive", EARLIER, *PACKAGES], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip("the repository's history does not hold the earlier build")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="tar")
    return folder


@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=pytest.mark.chaos)])
def test_a_run_of_an_earlier_build_goes_on(run, earlier_build: Path, store: str) -> None:  # type: ignore[no-untyped-def]
    if store == "redis":
        need_redis()
    environment = {**run.environment(), "PYTHONPATH": f"{run.folder}{os.pathsep}{earlier_build}"}
    settings = (f"buffer.store={store}", "learner.steps=8")
    words = [word for setting in settings for word in ("--set", setting)]
    earlier = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "launch", "all", str(run.config), *words],
        cwd=run.folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    run.children.append(earlier)
    run.wait("three steps of the earlier build", lambda: len(run.steps()) >= 3)
    assert "buffers.server" in Path(f"/proc/{run.pid('buffer')}/cmdline").read_text(), "not the earlier build"
    os.kill(earlier.pid, signal.SIGKILL)
    run.close()
    run.wait("the end of every process", lambda: run.living() == [])
    steps_before = max(run.steps())
    done = run.launch(*settings)
    assert done.returncode == 0, done.stdout + run.logs()
    assert steps_before < 8 == run.steps()[-1]
    assert_complete(run, steps=8)


def test_rows_and_rewards_of_the_demonstrations_are_those_of_earlier_builds(earlier_build: Path) -> None:
    """A configuration of an earlier build names its reward; its rows come from the same seeds."""
    code = (
        "import sys; tasks = __import__(sys.argv[1], fromlist=['tasks']).tasks\n"
        "print([tasks.prompt_rows(task, 5, 3) for task in ('add', 'running_sum')])"
    )
    rows = [
        subprocess.run(
            [sys.executable, "-c", code, package],
            env={**os.environ, "PYTHONPATH": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for folder, package in ((earlier_build, "asyncrl.recipes"), (ROOT, "asyncrl.demo"))
    ]
    assert rows[0] == rows[1].replace("asyncrl.demo", "asyncrl.recipes")
    assert load_object("asyncrl.recipes.tasks:running_sum_reward", code="config.reward") is tasks.running_sum_reward
