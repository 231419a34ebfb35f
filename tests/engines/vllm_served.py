"""A real vLLM server for tests, in the environment of vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"  # for who asks it as an OpenAI server
HELD, SLOW = "producers.engines.vllm.weight_transfer.HeldWeights", "slow_worker.SlowHeldWeights"
START_S = 600.0  # on a busy machine; an idle one needs 40


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`python -m vllm.entrypoints.openai.api_server` as the documentation says it is to be started."""

    def __init__(self, folder: Path, *, longest: int, slots: int, slow: bool = False) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
            "--port", str(self.port), "--enable-scale-out", "--worker-extension-cls",
            SLOW if slow else HELD, "--weight-transfer-config", '{"backend": "asyncrl"}',
            "--dtype", "float32", "--max-model-len", str(longest), "--max-num-seqs", str(slots), "--enforce-eager",
            "--kv-cache-memory-bytes", str(64 << 20), "--scheduling-policy", "priority", "--generation-config", "vllm",
            "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(2 * longest), "--chat-template", CHAT,
        ]  # fmt: skip
        env = os.environ | {
            "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
            "VLLM_SERVER_DEV_MODE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + START_S
        while True:
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2.0)
                return
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise AssertionError(self.log.read_text()[-3000:])
            time.sleep(0.2)

    def kill(self) -> None:
        """End it with all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
