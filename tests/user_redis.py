"""A Redis server of the user's own, as at `buffer.redis_url`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
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
        settings = ["--bind", host, "--port", str(self.port), "--dir", str(folder), "--appendonly", "yes", "--save", ""]
        self.process = subprocess.Popen(
            [program, *settings, "--protected-mode", "no", *words], stdout=subprocess.DEVNULL
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

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(60)
