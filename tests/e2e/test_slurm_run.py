"""Rendered scripts on a real Slurm: munged, slurmctld and slurmd of Debian's packages, one node, in a folder.

Needs root; skipped with the reason where a program is missing (apt-get install slurm-wlm munge).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cluster_runs import finished, render, texts

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "scontrol")
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL"}
#: More cores than there are: jobs must not wait for each other. Dependencies are looked at every second.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=32 RealMemory=32000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class Slurm:
    """A cluster of this host. Its folder has a short path: it holds sockets."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.env = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        own = str(Path(sys.executable).parent)
        places = [place for place in environment["PATH"].split(os.pathsep) if place != own]
        self.env["PATH"] = os.pathsep.join([*places, "/usr/sbin"])
        self._daemons: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        control, node = free_ports(2)
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, control=control, node=node))
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        own = ("key-file=munge.key", "log-file=munge.log", "pid-file=munge.pid", "seed-file=munge.seed")
        words = [f"--{word.replace('=', f'={folder}/')}" for word in (*own, "socket=munge.socket")]
        self._start("munged", "--foreground", "--force", *words)
        self.wait("munged", (folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        self.wait("slurmctld", lambda: "UP" in self.ask("scontrol", "ping"))
        self._start("slurmd", "-D")
        self.wait("an idle node", lambda: self.ask("sinfo", "--noheader", "--format=%T") == "idle")

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(words, env=self.env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
            )

    def ask(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        return (done.stdout + done.stderr).strip()

    def states(self) -> dict[str, str]:
        """Job -> its state, also of jobs that have ended. An array is one job, which ends with the last of its own."""
        found: dict[str, str] = {}
        for line in self.ask("squeue", "--states=all", "--noheader", "--format=%F %T").splitlines():
            job, _, state = line.partition(" ")
            if found.get(job, "COMPLETED") in ENDED:
                found[job] = state
        return found

    def wait(self, what: str, condition: Callable[[], bool], timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            logs = "".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))
            assert time.monotonic() < deadline, f"waited {timeout} s for {what}\n{logs}"
            assert all(daemon.poll() is None for daemon in self._daemons), logs
            time.sleep(0.2)

    def close(self) -> None:
        if len(self._daemons) == 3 and all(daemon.poll() is None for daemon in self._daemons):
            running = [job for job, state in self.states().items() if state not in ENDED]
            if running:
                self.ask("scancel", "--signal=KILL", "--full", *running)
                self.ask("scancel", *running)
                self.wait("the end of all jobs", lambda: set(self.states().values()) <= ENDED)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait(30)


@pytest.fixture
def slurm(run: Any) -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"a Slurm needs root and {', '.join(missing or PROGRAMS)} (apt-get install slurm-wlm munge)")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Slurm(Path(folder), run.environment())
        try:
            made.open()
            yield made
        finally:
            made.close()


def submit(slurm: Slurm, jobs: Path) -> dict[str, str]:
    """Role -> job, as submit.sh prints them."""
    done = subprocess.run(
        [jobs / "submit.sh"], env=slurm.env, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"(services|producers|rewards|learner) (\d+)", done.stdout)
    assert len(found) == 4, done.stdout
    return dict(found)


def test_a_run_is_stopped_and_resumed_by_its_scripts(run: Any, slurm: Slurm) -> None:
    """No program of the environment is on the PATH: the scripts find the one that rendered them."""
    settings = ["cluster.producers=2", "producers.count=1", "cluster.cpus=1", "cluster.memory=1G"]
    jobs = render(run, "slurm", "learner.steps=5000", *settings)
    first = submit(slurm, jobs)
    slurm.wait("three steps", lambda: len(run.steps()) >= 3 or slurm.states()[first["learner"]] in ENDED, timeout=120)
    assert run.steps(), texts(jobs) + run.logs()
    slurm.ask("scancel", "--batch", "--signal=TERM", first["learner"])
    slurm.wait("the end of the learner", lambda: slurm.states()[first["learner"]] in ENDED, timeout=120)
    assert "ExitCode=143:0" in slurm.ask("scontrol", "show", "job", first["learner"]), texts(jobs)
    last = max(run.steps())
    assert (run.dir / "checkpoints" / f"step_{last:06d}").exists(), "a stopped learner loses no step"
    others = [job for role, job in first.items() if role != "learner"]
    assert not {slurm.states()[job] for job in others} & ENDED, "they wait for a learner"
    slurm.ask("scancel", *others)
    slurm.wait("the end of the others", lambda: set(slurm.states().values()) <= ENDED)

    jobs = render(run, "slurm", f"learner.steps={last + 4}", *settings)
    second = submit(slurm, jobs)
    slurm.wait("the end of all jobs", lambda: set(slurm.states().values()) <= ENDED, timeout=180)
    states = {role: slurm.states()[job] for role, job in second.items()}
    assert states["learner"] == "COMPLETED", (states, texts(jobs))
    assert set(states.values()) <= {"COMPLETED", "CANCELLED"}, (states, texts(jobs))
    finished(run, jobs, last + 4)
    assert len(run.steps()) == len(set(run.steps())), "no step was trained twice"
    names = {line["name"] for line in run.lines("processes.jsonl") if line["role"] == "producer"}
    assert len(names) == 4, names
