"""The buffer's host dies, or its buffer is stopped and comes back: a stand-by serves on; nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plant import Plant, Role
from proxy import free_port
from user_redis import UserRedis, Watched

from asyncrl.errors import EXIT_FENCED
from asyncrl.runtime.host_facts import process_state

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300), pytest.mark.long]
REST = ("buffer.before_segments", "buffer.rotate", "buffer.before_apply", "buffer.before_answer")
ENV = {"TOY_TOKEN_S": "0.01", "MINI_STEP_S": "0.05"}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    servers = Watched(tmp_path / "redis")
    yield servers
    servers.close()


class Host:
    """A host of its own, as a network namespace with a disk (a tmpfs) that only its processes see."""

    def __init__(self) -> None:
        self.name, number = f"arl{os.getpid()}", os.getpid() % 250
        self.here, self.address = f"10.203.{number}.1", f"10.203.{number}.2"
        self.link = f"{self.name}a"
        try:
            _ip("netns", "add", self.name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace can be made here: {error}")
        peer = f"{self.name}b"
        _ip("link", "add", self.link, "type", "veth", "peer", "name", peer, "netns", self.name)
        _ip("addr", "add", f"{self.here}/30", "dev", self.link)
        _ip("link", "set", self.link, "up")
        for words in (("addr", "add", f"{self.address}/30", "dev", peer), ("link", "set", peer, "up")):
            _ip("-n", self.name, *words)
        disk = 'mount -t tmpfs disk /tmp/disk && export TMPDIR=/tmp/disk && exec "$@"'.replace("/tmp/disk", "/mnt")
        self.words = ["ip", "netns", "exec", self.name, "unshare", "--mount", "sh", "-c", disk, "sh"]

    def die(self, pid: int) -> None:
        """Without a last packet: no connection is closed."""
        _ip("link", "set", self.link, "down")
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, timeout=60)
        subprocess.run(["ip", "link", "del", self.link], check=False, timeout=60, stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def plant_with_standby(folder: Path, url: str, *extra: str, second: str = "127.0.0.1") -> Plant:
    """A run with a stand-by at `second`, which the launcher starts; workers know both addresses."""
    settings = (
        "learner.steps=1000000",
        "buffer.store=redis",
        f"buffer.redis_url={url}",
        "buffer.fsync=always",
        "buffer.lease_timeout_s=60",
        f"network.standby=tcp://{second}:{free_port()}",
        *extra,
    )
    plant = Plant(folder, producers=2, rewards=1, extra=settings, env=ENV)
    plant.roles["standby"] = role = Role("standby", None)
    role.always = ["--standby"]
    return plant


def said_by_standby(plant: Plant) -> str:
    return "".join(path.read_text() for path in plant.run.logs.glob("standby*.log"))


def await_takeover(plant: Plant, since: float) -> str:
    """Seconds until the stand-by serves, and until the learner has made four steps more."""
    plant.wait("the takeover", lambda: "ready at" in said_by_standby(plant))
    took, before = time.monotonic() - since, plant.committed()
    plant.wait("progress", lambda: plant.committed() > before + 3)
    return f"a stand-by serves after {took:.1f} s, four commits later after {time.monotonic() - since:.1f} s"


def test_the_host_dies(tmp_path: Path, host: Host, figure: Any) -> None:
    """The first buffer's host vanishes with its disk, and no connection is closed."""
    redis = UserRedis(tmp_path / "redis", host.here)
    extra = (f"network.buffer=tcp://{host.address}:5555", "network.insecure_no_auth=true")
    try:
        with plant_with_standby(tmp_path, redis.url, *extra, second=host.here) as plant:
            plant.roles["buffer"].inside = host.words
            for role in plant.roles.values():
                role.link = None  # straight to the addresses of the configuration
            plant.start()
            plant.wait("some commits", lambda: plant.committed() > 5)
            plant.wait("the stand-by", lambda: "stand-by for pid" in said_by_standby(plant))
            plant.roles["buffer"].wanted = False
            since = time.monotonic()
            host.die(plant.roles["buffer"].pid)
            figure(await_takeover(plant, since))
            plant.finish()
            plant.assert_accounted()
    finally:
        redis.close()


@pytest.mark.chaos_cases(*REST)
@pytest.mark.parametrize("place", ["buffer.after_apply", *REST])
def test_stopped_fenced_and_relieved(tmp_path: Path, watched: Watched, figure: Any, place: str) -> None:
    """SIGSTOP within a drain, as a partition or a suspended host: the first buffer is fenced when it goes on. Started
    again as the stand-by, it takes over from a buffer that is asked to stop. Then the master of Redis dies, Sentinels
    name another one, and the same buffer goes on. The end of the run ends the next stand-by.
    """
    with plant_with_standby(tmp_path, watched.url) as plant:
        first, second = plant.roles["buffer"], plant.roles["standby"]
        second.command = ["-m", "asyncrl", "launch", "buffer", str(plant.run.config), "--standby"]
        first.env = {"ASYNCRL_FAILPOINT": f"{place}:stop:{1 if place == 'buffer.rotate' else 200}"}
        plant.start()
        first.wanted = False
        plant.wait("the stop", lambda: process_state(first.pid) == "T")
        figure(await_takeover(plant, time.monotonic()))
        plant.kill("buffer", signal.SIGCONT)
        assert first.process is not None and first.process.wait(60) == EXIT_FENCED, plant.tail()
        assert "error[fenced]" in plant.said("buffer")
        first.words = ["--standby"]
        plant.begin("buffer")
        plant.wait("the stand-by", lambda: "stand-by for pid" in plant.said("buffer"))
        assert plant.stop_role("standby") == 0
        before = plant.committed()
        plant.wait("progress", lambda: plant.committed() > before + 3)
        watched.master.process.kill()
        pid, since, before = first.pid, time.monotonic(), plant.committed()
        plant.wait("progress at the other master", lambda: plant.committed() > before + 20)
        figure(f"21 commits after {time.monotonic() - since:.1f} s, in which the master of Redis was replaced")
        assert first.pid == pid and watched.replica.client.role()[0] == b"master"
        plant.finish()
        plant.assert_accounted()
        second.command = []
        plant.begin("standby")
        plant.wait("the stand-by", lambda: "stand-by for pid" in plant.said("standby"))
        assert plant.stop_role("buffer") == 0
        plant.wait("the end of the stand-by", lambda: second.codes[-1:] == [0])
        assert "no stand-by is needed: the run is complete" in plant.said("standby")
