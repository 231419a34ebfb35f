"""Rendered jobs run: Slurm by stand-ins for its programs, the commands of the pods, the driver of Ray on a stand-in."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]
STANDINS = Path(__file__).parent / "standins"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(run: Any, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of the submitting host; every job that is left is ended."""
    programs, state = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    state.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        shutil.copy(STANDINS / "slurm.py", programs / name)
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    env = {**run.environment(), "PATH": path, "SLURM_STANDIN": str(state)}
    yield env
    for number in state.glob("*.json"):
        subprocess.run(["scancel", number.stem], env=env, timeout=60, check=False)


def free_ports() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(int(probe.getsockname()[1]), 65000)


def render(run: Any, backend: str, *settings: str) -> Path:
    jobs: Path = run.folder / "my jobs"
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--set", f"cluster.port={free_ports()}", "--set", "cluster.wait_s=120"]
    done = run.command("launch", "all", str(run.config), "--backend", backend, "--render", str(jobs), *words)
    assert done.returncode == 0, done.stdout
    return jobs


def texts(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("logs/*")))


def finished(run: Any, jobs: Path, steps: int) -> None:
    run.wait("the last step", lambda: (run.dir / "result.json").exists() and run.living() == [], timeout=240)
    audit = run.audit()
    assert audit["exit"] == 0 and (audit["lost"], audit["doubled"]) == (0, 0), (audit, texts(jobs))
    assert sorted(set(run.steps())) == list(range(1, steps + 1)), texts(jobs)


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.chaos), 2])
def test_slurm_jobs_train_and_end(run: Any, cluster: dict[str, str], hosts: int) -> None:
    jobs = render(run, "slurm", "cluster.producers=2", "producers.count=1", f"cluster.learner_hosts={hosts}")
    done = subprocess.run(
        [jobs / "submit.sh"], env=cluster, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learner 103" in done.stdout
    try:
        finished(run, jobs, 5)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{texts(jobs)}\n{run.logs()}") from None
    names = {line["name"] for line in run.lines("processes.jsonl") if line["role"] == "producer"}
    assert len(names) == 2, names
    ranks = {line["pid"] for line in run.lines("processes.jsonl") if line["role"] == "learner"}
    assert len(ranks) == hosts
    deadline = time.monotonic() + 60
    while (
        left := subprocess.run(["squeue"], env=cluster, capture_output=True, text=True, timeout=60, check=True).stdout
    ) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == "", "the learner ended the others"
    for name in ("server.key", "producer.key", "reward.key"):
        assert (jobs / "keys" / name).stat().st_mode & 0o177 == 0


FAKE_RAY = '''
"""Stands in for ray: actors are objects of this process."""
import functools
class Call:
    def __init__(self, work): self.value = work()
class Method:
    def __init__(self, method): self.method = method
    def remote(self, *given): return Call(lambda: self.method(*given))
class Actor:
    def __init__(self, made): self.made = made
    def __getattr__(self, name): return Method(getattr(self.made, name))
class Class:
    def __init__(self, kind): self.kind = kind
    def options(self, **_): return self
    def remote(self): return Actor(self.kind())
def init(address): assert address == "auto"
def remote(kind): return Class(kind)
def get(call, timeout=None): return [one.value for one in call] if isinstance(call, list) else call.value
'''


@pytest.mark.chaos
def test_the_driver_of_ray_places_the_same_commands(run: Any, cluster: dict[str, str], tmp_path: Path) -> None:
    jobs = render(run, "ray", "producers.count=1", "learner.steps=3")
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "ray.py").write_text(FAKE_RAY)
    env = {**cluster, "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{cluster['PYTHONPATH']}"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{cluster['PATH']}"
    done = subprocess.run(
        [sys.executable, jobs / "driver.py"], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + run.logs()
    finished(run, jobs, 3)
