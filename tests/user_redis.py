"""A Redis server of the user's own, as at `buffer.redis_url`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from proxy import free_port


class UserRedis:
    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0, *words: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)("no redis-server or valkey-server on the PATH")
        folder.mkdir(exist_ok=True)
        self.port = port or free_port()
        self.url = f"redis://{host}:{self.port}"
        settings = [
            "--logfile",
            str(folder / "log"),
            "--bind",
            host,
            "--port",
            str(self.port),
            "--dir",
            str(folder),
            "--appendonly",
            "yes",
            "--save",
            "",
        ]
        self.process = subprocess.Popen(
            [program, *settings, "--protected-mode", "no", "--repl-diskless-sync-delay", "0", *words],
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis(host=host, port=self.port, socket_timeout=10)
        self._await_answer()

    def _await_answer(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.ping()
                return
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < deadline, self.url
                time.sleep(0.02)

    def follows(self) -> bool:
        """Whether it has the data of its master."""
        return bool(self.client.info("replication").get("master_link_status") == "up")

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(60)


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Watched:
    """A master with a replica, and three Sentinels that watch them."""

    name = "main"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.master = UserRedis(folder / "master")
        self.replica = UserRedis(folder / "replica", "127.0.0.1", 0, "--replicaof", "127.0.0.1", str(self.master.port))
        self.sentinels = [Sentinel(folder / f"sentinel{number}", self.master.port) for number in range(3)]
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        self.url = f"redis+sentinel://{hosts}/{self.name}"
        await_true(self.replica.follows)
        for one in self.sentinels:
            await_true(one.knows_the_others)

    def close(self) -> None:
        for one in (*self.sentinels, self.replica, self.master):
            one.close()


class Sentinel:
    def __init__(self, folder: Path, master_port: int) -> None:
        folder.mkdir()
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        assert program is not None
        self.port = free_port()
        lines = [
            f"port {self.port}",
            f"dir {folder}",
            f"sentinel monitor {Watched.name} 127.0.0.1 {master_port} 2",
            f"sentinel down-after-milliseconds {Watched.name} 1000",
            f"sentinel failover-timeout {Watched.name} 5000",
        ]
        (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
        self.process = subprocess.Popen(
            [program, str(folder / "sentinel.conf"), "--sentinel"], stdout=subprocess.DEVNULL
        )
        self.client = redis.Redis(port=self.port, socket_timeout=10)

    def knows_the_others(self) -> bool:
        try:
            found = self.client.sentinel_master(Watched.name)
        except redis.exceptions.ConnectionError:
            return False
        return (found["num-slaves"], found["num-other-sentinels"]) == (1, 2)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(60)


class Cluster:
    """Three masters, each with a replica."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        words = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        self.nodes = [UserRedis(folder / f"node{number}", "127.0.0.1", 0, *words) for number in range(6)]
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        masters, replicas = self.nodes[:3], self.nodes[3:]
        for number, master in enumerate(masters):
            first, end = 16384 * number // 3, 16384 * (number + 1) // 3
            master.client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
            for node in self.nodes:
                master.client.execute_command("CLUSTER MEET", "127.0.0.1", node.port)
        await_true(lambda: all(len(node.client.cluster("NODES")) == 6 for node in self.nodes))
        for master, replica in zip(masters, replicas, strict=True):
            replica.client.execute_command("CLUSTER REPLICATE", master.client.execute_command("CLUSTER MYID"))
        await_true(lambda: all(replica.follows() for replica in replicas))
        await_true(lambda: all(node.client.cluster("INFO")["cluster_state"] == "ok" for node in self.nodes))

    def master_with(self, key: str) -> UserRedis:
        slot = int(self.nodes[0].client.execute_command("CLUSTER KEYSLOT", key))
        return self.nodes[next(number for number in range(3) if slot < 16384 * (number + 1) // 3)]

    def close(self) -> None:
        for node in self.nodes:
            node.close()
