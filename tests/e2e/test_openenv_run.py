"""A run on the server of the real OpenEnv (`make test-openenv`)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import agent_openai  # noqa: E402, RUF100

PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
START_S = 120

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason="make test-openenv")]


@pytest.fixture
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(PYTHON), str(ROOT / "tests/unit/openenv_server.py"), str(port), "1000"]
    with subprocess.Popen(words) as process:
        until = time.monotonic() + START_S
        while True:  # bounded: START_S
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < until and process.poll() is None, "the server did not start"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_episodes_of_a_server_train(run: Any, server: str) -> None:
    agent_openai.make_model(run.folder / "model")
    text = agent_openai.configuration(run.folder, run.folder / "model", steps=2)
    (run.folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}=", "seed": n % 3}) + "\n" for n in range(16))
    )
    text = text[: text.index("[environment]")].replace("max_new_tokens = 24", "max_new_tokens = 160")
    run.config.write_text(
        f'{text}[environment]\nname = "openenv"\nmax_turns = 3\nargs = {{url = "{server}", observe = "builtins:len"}}\n'
    )
    done = run.launch("buffer.batch_groups=2", "sampling.group_size=2", timeout=300)
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0 and (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 4), audit
    lines = [line for line in run.lines("metrics/learner.jsonl") if "reward_mean" in line]
    assert len(lines) == 2 and all(line["observed_share"] > 0 for line in lines), "what is shown is not trained"
