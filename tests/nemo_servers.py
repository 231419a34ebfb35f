"""Resources servers of NeMo-Gym as its authors wrote them, in the environment that `make test-nemo-gym` makes."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-nemo-gym" / "bin" / "python"
START_S = 120
NAMES = ("mcqa", "example_session_state_mgmt", "example_multi_step")
SERVERS = sorted((PYTHON.parents[1] / "lib").glob("python3*/site-packages/resources_servers"))
INSTALLED = pytest.mark.skipif(not SERVERS, reason="make test-nemo-gym")


def data(name: str) -> Path:
    """The file with the example rows of a server."""
    return SERVERS[0] / name / "data" / "example.jsonl"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data(name).read_text().splitlines()]


def called(name: str, **arguments: Any) -> str:
    """A call of a tool as the parser `hermes` reads it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@contextmanager
def serve(name: str) -> Iterator[str]:
    """The address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([str(PYTHON), str(ROOT / "tests/unit/nemo_gym_server.py"), name, str(port)]) as process:
        try:
            until = time.monotonic() + START_S
            while True:  # bounded: START_S
                try:
                    urllib.request.urlopen(f"{url}/openapi.json", timeout=5).close()
                    break
                except OSError:
                    assert time.monotonic() < until and process.poll() is None, "the server did not start"
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def right_answer(name: str, row: dict[str, Any], turn: int) -> str:
    """Turn by turn, an answer that the server rewards with 1."""
    if name == "mcqa":
        return f"\\boxed{{{row['expected_answer']}}}"
    if name == "example_session_state_mgmt":
        more = row["expected_count"] - row["initial_count"]
        texts = [
            called("increment_counter", count=more - 1) + called("increment_counter", count=1),
            called("get_counter_value"),
        ]
    else:
        texts = [
            "".join(called("get_synonym_value", synonym=word) for word in row["expected_synonyms"]),
            called("extract_synonym_values", synonym_values=row["expected_synonym_values"]),
        ]
    return texts[turn] if turn < len(texts) else "Done."
