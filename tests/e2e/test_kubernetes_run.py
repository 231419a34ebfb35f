"""Rendered manifests run: applied by apply.sh to a stand-in for Kubernetes, which runs containers as they are written.

Needs root (namespaces of network and processes), bubblewrap, `ip`, `nsenter` and `setpriv`; skipped with the reason
otherwise. What the stand-in does and does not: tests/e2e/standins/kube_pod.py, kube_node.py, kubectl.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import demo_model
import pytest

pytest.importorskip("yaml", reason="kubectl's stand-in reads manifests with PyYAML")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kubernetes"), pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"
NEEDED = ("bwrap", "ip", "nsenter", "setpriv")
ETC = {"passwd": "root:x:0:0:root:/root:/bin/bash\n", "group": "root:x:0:\n", "nsswitch.conf": "hosts: files\n"}


class Cluster:
    """A cluster of one node, with a volume claim `shared`, and a shell of somebody who has kubectl."""

    def __init__(self, folder: Path) -> None:
        self.state, self.volume, self.jobs = folder / "kube", folder / "volume", folder / "laptop" / "jobs"
        self.net = f"k8s{os.getpid()}"
        for path in (*(self.state / name for name in ("objects", "asked", "ended", "pods", "etc")), self.jobs.parent):
            path.mkdir(parents=True)
        self.volume.mkdir()
        for name, text in ETC.items():
            (self.state / "etc" / name).write_text(text)
        claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "path": str(self.volume)}
        (self.state / "objects" / "PersistentVolumeClaim.shared.json").write_text(json.dumps(claim))
        programs = folder / "bin"
        programs.mkdir()
        shutil.copy(STANDINS / "kubectl.py", programs / "kubectl")
        (programs / "kubectl").chmod(0o755)
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.env = {**os.environ, "PATH": path, "KUBECTL_STANDIN": str(self.state), "PYTHONPATH": str(ROOT)}
        self.node: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Make the network of the pods and start the node."""
        for words in (
            ["netns", "add", self.net],
            ["-n", self.net, "link", "set", "lo", "up"],
            ["-n", self.net, "link", "add", "br0", "type", "bridge"],
            ["-n", self.net, "addr", "add", "10.244.0.1/16", "dev", "br0"],
            ["-n", self.net, "link", "set", "br0", "up"],
        ):
            done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        words = ["nsenter", f"--net=/run/netns/{self.net}", sys.executable, str(STANDINS / "kube_node.py")]
        with (self.state / "node.log").open("wb") as log:
            self.node = subprocess.Popen([*words, str(self.state), self.net], env=self.env, stdout=log, stderr=log)

    def close(self) -> None:
        if self.node is not None:
            self.node.terminate()
            try:
                self.node.wait(60)
            except subprocess.TimeoutExpired:
                self.node.kill()
        for path in Path("/run/netns").glob(f"{self.net}*"):
            subprocess.run(["ip", "netns", "delete", path.name], timeout=60, check=False)
        for path in Path("/dev/shm").glob(f"{self.net}*"):  # of a node that could not clean up
            shutil.rmtree(path, ignore_errors=True)

    def shell(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.jobs.parent, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def render(self, config: Path, *settings: str) -> None:
        words = [word for setting in ("cluster.claim=shared", *settings) for word in ("--set", setting)]
        command = [sys.executable, "-m", "asyncrl", "launch", "all", str(config), "--backend", "k8s", "--render"]
        done = self.shell(*command, str(self.jobs), *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        path = self.state / "status.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"pods": {}, "jobs": {}}
        return found

    def pods(self, role: str) -> dict[str, dict[str, Any]]:
        found = self.status()["pods"].items()
        return {name: pod for name, pod in found if pod["labels"]["app.kubernetes.io/component"] == role}

    def ended(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in (self.state / "ended").iterdir()]

    def wait(self, what: str, condition: Callable[[], bool], timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.node is not None and self.node.poll() is None, (self.state / "node.log").read_text()
            if condition():
                return
            found = self.status()
            restarts = max((pod["restarts"] for pod in found["pods"].values()), default=0)
            failed = max((job["failed"] for job in found["jobs"].values()), default=0)
            assert max(restarts, failed) < 5, f"{what}: pods fail again and again\n{self.logs()}"
            time.sleep(0.2)
        raise AssertionError(f"waited {timeout} s for {what}: {self.status()}\n{self.logs()}")

    def complete(self, *names: str) -> bool:
        jobs = self.status()["jobs"]
        failed = [name for name in names if jobs.get(name, {}).get("condition") == "Failed"]
        assert not failed, f"{failed}\n{self.logs()}"
        return all(jobs.get(name, {}).get("condition") == "Complete" for name in names)

    def logs(self) -> str:
        logs = sorted((self.state / "pods").glob("*/log"))
        return "\n".join(f"--- {path.parent.name}\n{path.read_text()[-2500:]}" for path in logs)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"pods need root and {', '.join(NEEDED)}")
    made = Cluster(tmp_path)
    try:
        made.open()
        yield made
    finally:
        made.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def audit(cluster: Cluster, run: Path) -> dict[str, Any]:
    done = cluster.shell(sys.executable, "-m", "asyncrl", "audit", str(run), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def prepare(cluster: Cluster) -> None:
    """The demo's model and prompts on the volume."""
    demo_model.place(cluster.volume)
    made = subprocess.run(
        [sys.executable, "-m", "asyncrl", "demo", "--prepare-only"],
        cwd=cluster.volume,
        env={**cluster.env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.chaos
def test_the_demo_learns_in_pods_that_are_killed_and_moved(cluster: Cluster) -> None:
    steps, name = 20, "demo"
    prepare(cluster)
    cluster.render(
        ROOT / "configs" / "quickstart.toml",
        f"cluster.name={name}",
        "cluster.producers=2",
        "producers.count=1",
        f"learner.steps={steps}",
        "evaluation.at_start=false",
    )
    run = cluster.volume / "runs" / "demo-running_sum"
    started = cluster.shell(str(cluster.jobs / "apply.sh"))
    assert started.returncode == 0, started.stdout + started.stderr

    def step() -> int:
        return max((line["step"] for line in lines(run / "metrics" / "learner.jsonl")), default=0)

    cluster.wait("step 3", lambda: step() >= 3)
    users = {Path(f"/proc/{pod['main']}").stat().st_uid for pod in cluster.status()["pods"].values()}
    assert users == {1000}
    victim = next(iter(cluster.pods("producers")))
    os.kill(cluster.pods("producers")[victim]["main"], signal.SIGKILL)  # its container; a pod takes its place
    cluster.wait("step 8", lambda: step() >= 8)
    assert len(cluster.pods("producers")) == 2 and victim not in cluster.pods("producers")
    drained = cluster.shell("kubectl", "drain", "node", "--pod-selector=app.kubernetes.io/component=learner")
    assert drained.returncode == 0, drained.stderr + cluster.logs()
    cluster.wait("step 14", lambda: step() >= 14)
    [old] = cluster.pods("services").items()
    moved = cluster.shell("kubectl", "delete", "pod", old[0])
    assert moved.returncode == 0, moved.stderr
    cluster.wait("all jobs", lambda: cluster.complete(f"{name}-learner", f"{name}-producers", f"{name}-rewards"))
    [new] = cluster.pods("services").values()
    assert new["address"] != old[1]["address"] and new["restarts"] == 0
    jobs = cluster.status()["jobs"]
    assert (jobs[f"{name}-learner"]["ignored"], jobs[f"{name}-learner"]["failed"]) == (1, 0)
    assert jobs[f"{name}-producers"]["failed"] == 1, "the one that was killed"
    learned = lines(run / "metrics" / "learner.jsonl")
    rewards = [line["reward_mean"] for line in learned]
    assert [line["step"] for line in learned] == list(range(1, steps + 1)), "a drained learner loses no step"
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.15, rewards
    found = audit(cluster, run)
    assert (found["lost"], found["doubled"]) == (0, 0) and found["lag_max"] <= 2

    again = cluster.shell(str(cluster.jobs / "apply.sh"))
    assert again.returncode == 1 and "end.sh" in again.stderr, "a Job that is over is not started by applying it"
    over = cluster.shell(str(cluster.jobs / "end.sh"))
    assert over.returncode == 0, over.stdout + over.stderr
    cluster.wait("nothing", lambda: not cluster.status()["pods"], timeout=20)
    assert [path.name for path in (cluster.state / "objects").iterdir()] == ["PersistentVolumeClaim.shared.json"]
    assert not [pod for pod in cluster.ended() if pod["killed"]], "all of them ended within their grace"


@pytest.mark.chaos
def test_a_gang_of_two_pods_meets_again_after_one_was_killed(cluster: Cluster, run: Any) -> None:
    """As root, with lines of `cluster.setup`, and with a reward function that lies on the volume alone."""
    steps = 12
    for name in ("my_rewards.py", "prompts.jsonl"):
        shutil.copy(run.folder / name, cluster.volume)
    text = run.config.read_text().replace(str(run.dir), "runs/two").replace(f"{run.folder}/", "")
    model = next(line for line in text.splitlines() if line.startswith("path = ")).partition('"')[2].rstrip('"')
    shutil.copytree(model, cluster.volume / "model")
    config = cluster.jobs.parent / "two.toml"
    config.write_text(text.replace(f'"{model}"', '"model"'))
    cluster.render(
        config,
        "cluster.name=two",
        "cluster.user=0",
        "cluster.learner_hosts=2",
        "producers.count=1",
        'cluster.setup=["export MADE_BY_SETUP=1$NOT_SET"]',
        f"learner.steps={steps}",
    )
    started = cluster.shell(str(cluster.jobs / "apply.sh"))
    assert started.returncode == 0, started.stdout + started.stderr
    metrics = cluster.volume / "runs" / "two" / "metrics" / "learner.jsonl"
    cluster.wait("step 3", lambda: len(lines(metrics)) >= 3)
    first = cluster.pods("learner")
    assert len(first) == 2 and all(pod["main"] for pod in first.values()), first
    assert b"MADE_BY_SETUP=1" in Path(f"/proc/{next(iter(first.values()))['main']}/environ").read_bytes()
    os.kill(max(first.items())[1]["main"], signal.SIGKILL)
    asked = cluster.shell(
        "kubectl", "exec", "deploy/two-services", "--", "python", "-m", "asyncrl", "status", "runs/two"
    )
    assert asked.returncode == 0 and "of 12" in asked.stdout, asked.stdout + asked.stderr
    more = cluster.shell("kubectl", "patch", "job", "two-producers", "-p", '{"spec":{"parallelism":2}}')
    assert more.returncode == 0, more.stderr
    cluster.wait("another producer", lambda: len(cluster.pods("producers")) == 2)
    # A host that is killed when the run is complete meets nobody any more.
    cluster.wait("the result", (cluster.volume / "runs" / "two" / "result.json").exists)
    for name, pod in cluster.pods("learner").items():
        if name.startswith("two-learner-1") and pod["main"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pod["main"], signal.SIGKILL)
    cluster.wait("all jobs", lambda: cluster.complete("two-learner", "two-producers", "two-rewards"))
    assert cluster.status()["jobs"]["two-learner"]["succeeded"] == 2
    found = audit(cluster, cluster.volume / "runs" / "two")
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert sorted({line["step"] for line in lines(metrics)}) == list(range(1, steps + 1))
