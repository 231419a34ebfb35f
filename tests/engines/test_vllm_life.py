"""The life of vLLM's processes under a producer, and what they hold: on the real vLLM, in its environment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_lab import (
    LIMIT,
    MAX_NEW,
    MAX_PROMPT,
    SLOTS,
    Bench,
    config_of,
    layout,
    plain_logprobs,
    save_model,
    stage,
)
from rigs import lacks
from vllm_served import Server

from asyncrl.errors import AsyncRLError
from asyncrl.plugins import find
from asyncrl.runtime.host_facts import descendants, is_alive

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(lacks("vllm", "vllm")()), reason="no vLLM here")]
START_S = 600.0
PRODUCER = """
import asyncio, json, sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
from engine_lab import config_of
from asyncrl.plugins import find

async def main():
    engine = find("asyncrl.engines", "vllm")(config_of(Path({folder!r}), engine="vllm", kv="keep"))
    await engine.start()
    print(json.dumps(engine._children), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vllm-model"))


def all_dead(pids: list[int], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while any(is_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(is_alive(pid) for pid in pids)


def test_vllm_ends_with_a_producer_that_was_killed(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed_producer.py"
    root = Path(__file__).parents[2]
    script.write_text(PRODUCER.format(paths=[str(root), str(Path(__file__).parent)], folder=str(folder)))
    producer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert producer.stdout is not None
        line = next(text for text in producer.stdout if text.startswith("["))
        pids = sorted({*json.loads(line), *descendants(producer.pid)})
        assert len(pids) >= 2 and all(is_alive(pid) for pid in pids)
        os.kill(producer.pid, signal.SIGKILL)
        assert all_dead(pids, 20), [pid for pid in pids if is_alive(pid)]
    finally:
        producer.kill()
        producer.wait(60)


def test_weights_through_a_group_where_the_server_sees_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions through Gloo; and the server of another model is refused."""
    from producers.engines.vllm import server_facts as vllm_server

    async def none(*_: Any) -> tuple[Path, ...]:
        return ()

    monkeypatch.setattr(vllm_server, "_shared_folders", none)
    server = Server(folder, longest=MAX_PROMPT + MAX_NEW, slots=SLOTS)
    try:
        server.wait()
        lines = f'url = ["{server.url}"]'
        config = config_of(folder, engine="vllm_http", kv="recompute", more=lines)
        bench = Bench(find("asyncrl.engines", "vllm_http")(config))
        bench.run(bench.engine.start(), limit_s=120)
        for seed in (1, 2):
            bench.push(seed)
            item = bench.ask([3, 4, 5])[0]
            assert item.runs == ((bench.version, 24),)
            assert np.abs(plain_logprobs(seed, [3, 4, 5], item.token_ids) - item.logprobs).max() < LIMIT
        bench.close()
        shape = json.loads((folder / "config.json").read_text())
        other = folder / "other"
        other.mkdir()
        (other / "config.json").write_text(json.dumps(shape | {"vocab_size": 99, "num_hidden_layers": 3}))
        stranger = find("asyncrl.engines", "vllm_http")(config_of(other, engine="vllm_http", kv="keep", more=lines))
        with pytest.raises(AsyncRLError, match="vocab_size 128 there, 99 here; num_hidden_layers 2 there") as caught:
            asyncio.run(_start(stranger))
        assert caught.value.code == "handshake.mismatch"
    finally:
        server.kill()


async def _start(engine: Any) -> None:
    try:
        await engine.start()
    finally:
        await engine.close(grace_s=2)


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    engine: Any = find("asyncrl.engines", "vllm")(config_of(folder, engine="vllm", kv="keep"))
    made = Bench(engine)
    made.run(engine.start(), limit_s=START_S)
    yield made
    made.close()
    assert all_dead(engine._children, 5)
    assert not list(Path("/dev/shm").glob(f"asyncrl-engine-{os.getuid()}-{os.getpid()}-*"))


def test_weights_that_change_after_the_commit_are_seen(bench: Bench) -> None:
    engine: Any = bench.engine
    bench.push(1)
    digest = layout(1)[1].digest
    # Empty: the checksums after the commit were left out, since earlier ones took long; the call has taken them.
    assert (bench.run(engine.attest()) or bench.run(engine.attest())) == digest
    bench.run(engine._llm.collective_rpc("reset_weights"))
    assert bench.run(engine.attest()) not in ("", digest)
    bench.push(2)
    assert (bench.run(engine.attest()) or bench.run(engine.attest())) == layout(2)[1].digest


def test_a_commit_that_fails_is_the_end_of_the_engine(bench: Bench) -> None:
    """The file is gone when the workers want to read it."""
    engine: Any = bench.engine
    bench.push(1)
    bench.run(stage(engine, 2, bench.version + 1))
    engine._staged.pending_version().path.unlink()
    for _ in range(2):
        with pytest.raises(AsyncRLError) as caught:
            bench.run(engine.commit_update())
        assert caught.value.code == "engine.broken"
    assert not engine.health().alive
